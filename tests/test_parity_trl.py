"""PPO under the `trl` preset gives TRL 0.11.4's own numbers; see `tests/parity/README.md`."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = os.environ.get("OPERANT_TRL_PYTHON")


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="needs a python with TRL 0.11.4 in OPERANT_TRL_PYTHON; `make parity` makes one")
def test_ppo_has_the_numbers_of_trl() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    script = ROOT / "tests" / "parity" / "trl_0_11_4.py"
    python = str(ROOT / PYTHON)  # relative to the repository, or absolute
    done = subprocess.run([python, str(script)], env=environment, capture_output=True, text=True, encoding="utf-8")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
