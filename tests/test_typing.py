"""What an editor and a type checker see of the package: pyright in its strict mode, over scripts of a user."""

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_python
from texts import parts

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
FINE = parts("programs.txt")["a typed script"]
WRONG = parts("programs.txt")["a script with wrong options"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """The errors of each script, by line, beside a package with the keywords that `make` and a build write."""
    folder = tmp_path_factory.mktemp("scripts")
    for name, text in (("fine.py", FINE), ("wrong.py", WRONG)):
        (folder / name).write_text(text, encoding="utf-8")
    package = folder / "installed/operant"
    shutil.copytree(SRC / "operant", package, ignore=shutil.ignore_patterns("builtin", "__pycache__", "keywords.pyi"))
    stub = runpy.run_path(str(ROOT / "docs/keywords.py"))["keywords"]()
    (package / "keywords.pyi").write_text(stub, encoding="utf-8")
    settings = {"typeCheckingMode": "strict", "extraPaths": ["installed"], "pythonVersion": "3.11"}
    settings["exclude"] = ["installed"]
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    words = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, encoding="utf-8", check=False)
    errors: dict[str, dict[int, str]] = {"fine.py": {}, "wrong.py": {}}
    for complaint in json.loads(done.stdout)["generalDiagnostics"]:
        errors[Path(complaint["file"]).name][complaint["range"]["start"]["line"] + 1] = complaint["message"]
    return errors


def test_a_script_of_a_user_is_fine_in_strict_mode(found: dict[str, dict[int, str]]) -> None:
    assert found["fine.py"] == {}


def test_wrong_options_are_seen_before_the_script_runs(found: dict[str, dict[int, str]]) -> None:
    wrong = found["wrong.py"]
    assert list(wrong) == [2, 3, 4, 5, 6]
    assert '"steps" of type "int"' in wrong[2] and '"stepz"' in wrong[3] and '"coeff"' in wrong[4]


def test_the_package_says_that_it_is_typed() -> None:
    assert (SRC / "operant/py.typed").is_file()


def test_a_build_writes_them_with_the_packages_that_it_asks_for_alone(tmp_path: Path) -> None:
    """A build is isolated from what is installed: it has the standard library and `build-system.requires`."""
    skipped = shutil.ignore_patterns("builtin", "keywords.pyi", "figures", "__pycache__")
    for name in ("docs", "src"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skipped)
    code = f"""
import re, sys, tomllib, types
from importlib.metadata import packages_distributions
wanted = tomllib.load(open({str(ROOT / "pyproject.toml")!r}, "rb"))["build-system"]["requires"]
wanted = {{re.split("[<>=]", each)[0].lower() for each in wanted}}
others = {{name for name, owners in packages_distributions().items() if not wanted & {{o.lower() for o in owners}}}}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in others - {{"operant"}}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
interface = types.ModuleType("hatchling.builders.hooks.plugin.interface")
interface.BuildHookInterface = object
for name in ("hatchling", "hatchling.builders", "hatchling.builders.hooks", "hatchling.builders.hooks.plugin"):
    sys.modules[name] = types.ModuleType(name)
sys.modules[interface.__name__] = interface
sys.path[:0] = [{str(tmp_path / "docs")!r}]
from build_hook import KeywordsHook
hook = KeywordsHook()
hook.root, data = {str(tmp_path)!r}, {{"artifacts": []}}
hook.initialize("editable", data)
print(data["artifacts"])
"""
    assert run_python(code).endswith("['/src/operant/keywords.pyi']")
    written = (tmp_path / "src/operant/keywords.pyi").read_text(encoding="utf-8")
    assert written == runpy.run_path(str(ROOT / "docs/keywords.py"))["keywords"]()
