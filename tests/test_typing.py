"""What an editor and a type checker see of the package: pyright in its strict mode, over scripts of a user."""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from texts import parts

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"


@pytest.mark.slow
def test_wrong_options_are_seen_before_a_script_runs(tmp_path: Path) -> None:
    """Beside a package with the keywords that `make` and a build write."""
    for name, text in (("fine.py", "a typed script"), ("wrong.py", "a script with wrong options")):
        (tmp_path / name).write_text(parts("programs.txt")[text], encoding="utf-8")
    package = tmp_path / "installed/operant"
    shutil.copytree(SRC / "operant", package, ignore=shutil.ignore_patterns("builtin", "__pycache__", "keywords.pyi"))
    stub = runpy.run_path(str(ROOT / "docs/keywords.py"))["keywords"]()
    (package / "keywords.pyi").write_text(stub, encoding="utf-8")
    settings = {"typeCheckingMode": "strict", "extraPaths": ["installed"], "pythonVersion": "3.11"}
    settings["exclude"] = ["installed"]
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    words = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", check=False)
    errors: dict[str, dict[int, str]] = {}
    for complaint in json.loads(done.stdout)["generalDiagnostics"]:
        of_file = errors.setdefault(Path(complaint["file"]).name, {})
        of_file[complaint["range"]["start"]["line"] + 1] = complaint["message"]
    assert list(errors) == ["wrong.py"] and list(wrong := errors["wrong.py"]) == [2, 3, 4, 5, 6], errors
    assert '"steps" of type "int"' in wrong[2] and '"stepz"' in wrong[3] and '"coeff"' in wrong[4]


def test_the_package_says_that_it_is_typed() -> None:
    assert (SRC / "operant/py.typed").is_file()
