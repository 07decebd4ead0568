"""Run folders of older versions go on bit-identically: no rename and no move may lose a state, a stream or a check."""

import json
import math

import pytest
from cases import slow_but
from old_runs import CASES, OLD, machine, resumed


@pytest.mark.parametrize("case", slow_but(("ppo", "lora", "world"), CASES))
def test_a_run_of_an_older_version_goes_on_bit_identically(case, tmp_path):
    expected = json.loads((OLD / case / "expected.json").read_text(encoding="utf-8"))
    found = resumed(case, tmp_path / "run")
    pairs = list(zip(found["metrics"], expected["metrics"], strict=True))
    assert all(theirs.keys() <= mine.keys() for mine, theirs in pairs)  # a later version may measure more
    if expected["machine"] == machine():
        assert [{name: mine[name] for name in theirs} for mine, theirs in pairs] == expected["metrics"]
        assert found["weights"] == expected["weights"]
        return
    for mine, theirs in pairs:  # other kernels round otherwise
        for name, number in theirs.items():
            if isinstance(number, float) and name.partition("/")[0] in ("reward", "kl", "loss", "update"):
                assert math.isclose(mine[name], number, rel_tol=1e-2, abs_tol=1e-3), name


def test_every_old_run_is_looked_at():
    assert {path.name for path in OLD.iterdir()} == set(CASES)
