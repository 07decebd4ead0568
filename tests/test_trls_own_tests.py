"""TRL 0.11.4's own tests around PPO, unchanged, against `operant.compat.trl`.

They are not in this repository: OPERANT_TRL_TESTS names the folder `tests` of that release, which its source archive
has. docs/from-trl.md has their results as a table, which is held to what happens here.
"""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = [
    Path(os.environ.get("OPERANT_TRL_TESTS", "-")),
    ROOT.parent / "shared" / "data" / "trl-0.11.4-tests" / "tests",
]
FILES = {"test_ppo_trainer.py": 27, "test_modeling_value_head.py": 32, "test_peft_models.py": 8}
FILES |= {"test_core.py": 3, "test_best_of_n_sampler.py": 2, "test_environments.py": 12, "test_no_peft.py": 3}
"""The cases of each file; the folder that comes with the repository's data has the first three files alone."""
SHOWN = r"^\| `(test_\w+)`(?: of (\w+))? \| (does not apply|differs) \|"


@pytest.mark.slow
def test_those_that_apply_pass(tmp_path):
    """In a process of its own: there `trl` means ours, and the cache of the Hub has the models of the tests."""
    folder = next((place for place in PLACES if (place / "test_ppo_trainer.py").is_file()), None)
    if folder is None:
        pytest.skip("needs the folder tests of TRL 0.11.4 in OPERANT_TRL_TESTS")
    for package in ("accelerate", "peft", "parameterized", "requests"):
        pytest.importorskip(package)
    from trl_compat.models import make_cache

    make_cache(tmp_path / "cache")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
    files = [folder / name for name in FILES if (folder / name).is_file()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "trl_compat.plugin", "-p", "no:cacheprovider"]
    command += [f"--rootdir={folder.parent}", f"--junitxml={tmp_path / 'found.xml'}", *map(str, files)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8")
    cases = list(ElementTree.parse(tmp_path / "found.xml").iter("testcase"))
    odd = {case.get("name") for case in cases if len(case)}
    page = (ROOT / "docs" / "from-trl.md").read_text(encoding="utf-8")
    shown = {name for name, _, _ in re.findall(SHOWN, page, re.MULTILINE)}
    assert len(cases) == sum(FILES[file.name] for file in files), done.stdout[-2000:]
    assert odd == shown, done.stdout[-6000:]
