"""PPO under the `trl` preset has the numbers of TRL 0.11.4, other methods those of 1.16.0: `tests/parity/README.md`."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARITY = [
    ("trl_0_11_4.py", "OPERANT_TRL_PYTHON"),
    ("trl_ppo_loop.py", "OPERANT_TRL_PYTHON"),
    ("trl_1_16.py", "OPERANT_TRL_1_16_PYTHON"),
    ("trl_1_16_preference.py", "OPERANT_TRL_1_16_PYTHON"),
    ("trl_1_16_surface.py", "OPERANT_TRL_1_16_PYTHON"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "variable"), PARITY)
def test_the_numbers_are_those_of_trl(script: str, variable: str) -> None:
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"needs a python with that TRL in {variable}; `make parity` makes one")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("TRANSFORMERS_VERBOSITY", None)  # a command in this process sets it, and TRL's defaults follow it
    command = [str(ROOT / python), str(ROOT / "tests" / "parity" / script)]  # relative to the repository, or absolute
    done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
