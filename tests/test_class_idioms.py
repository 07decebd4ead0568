"""Tests that use the classes of a program: their verdict is the one that plain Python gives them."""

import sys
import types
from pathlib import Path

import pytest

from operant.sandbox.jail import Code, Jail, JailOptions, Program

PROGRAM, IDIOMS = Path(__file__).with_name("class_idioms.txt").read_text(encoding="utf-8").split("### tests\n")
"""Classes of a program, and tests that use them, with an empty line between two."""


def plain(test: str) -> bool:
    """Whether it passes where program and test are one process."""
    module = types.ModuleType("program")
    sys.modules["program"] = module
    try:
        exec(PROGRAM, module.__dict__)
        exec(compile(test, "test", "exec"), {**module.__dict__, "__name__": "<test>"})
    except Exception:
        return False
    finally:
        del sys.modules["program"]
    return True


@pytest.mark.slow
def test_idioms_have_the_verdict_of_plain_python() -> None:
    tests = IDIOMS.strip().split("\n\n")
    wanted = {test: plain(test) for test in tests}
    assert len(tests) > 100 and 20 <= list(wanted.values()).count(False) < 40
    verdicts = Jail(JailOptions()).run([Program(PROGRAM, [Code(test)]) for test in tests])
    odd = {v.message: test for test, v in zip(tests, verdicts, strict=True) if (v.outcome == "passed") != wanted[test]}
    assert odd == {}
