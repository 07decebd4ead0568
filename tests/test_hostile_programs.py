"""Hostile programs against the jail: none escapes, none forges a pass, none disturbs its neighbours."""

import os
import platform
from contextlib import closing
from pathlib import Path

import hostile_programs
import pytest
from cases import slow
from hostile_programs import ALL, Hostile, Room

from operant.sandbox.jail import Code, Jail, JailOptions, Program
from operant.types import OperantError

NEIGHBOUR = Program("def f(x): return sorted(x)", [Code("assert f([3, 1, 2]) == [1, 2, 3]")])
WEAK = {"reads", "harms"}
"""What the level without a boundary promises nothing about."""
LEVELS = ("namespaces", "landlock", "process")


@pytest.mark.parametrize(("level", "some"), [("namespaces", ALL[::8]), *(slow(x, ALL) for x in LEVELS)])
def test_no_program_escapes(level: str, some: list[Hostile], tmp_path: Path) -> None:
    """An eighth of them every day, of each kind some."""
    try:
        jail = Jail(JailOptions(level=level, seconds=0.4, patience=0.6, at_once=4))
    except OperantError as error:
        pytest.skip(f"THE HOSTILE PROGRAMS ARE NOT TRIED AT THE LEVEL {level}: {error}")
    with closing(Room(tmp_path / "room")) as room:
        asked = [(room.program(one), NEIGHBOUR) if i % 4 == 0 else (room.program(one),) for i, one in enumerate(some)]
        found = iter(jail.run([program for programs in asked for program in programs]))
        verdicts, neighbours = [], []
        for programs in asked:
            verdicts.append(next(found))
            neighbours += [next(found) for _ in programs[1:]]
        escaped = {one.name for one, verdict in zip(some, verdicts) if verdict.outcome == "passed"}
        assert escaped & {one.name for one in some if level != "process" or one.kind not in WEAK} == set()
        assert {verdict.outcome for verdict in neighbours} == {"passed"}, "a neighbour was disturbed"
        assert level == "process" or room.state() == room.before


def unprotected(one: Hostile, folder: Path) -> str:
    with closing(Room(folder)) as room:
        return room.unprotected(one)


def test_some_programs_do_harm_without_a_sandbox(tmp_path: Path) -> None:
    some = "exits at once, reads a file of the user, cuts a file of the user, sends SIGKILL, connects, sleeps"
    assert len([one for one in ALL if one.name in some.split(", ") and unprotected(one, tmp_path / one.name)]) == 6
    honest = Hostile("honest", "harms", "def f(): return 41\n", hostile_programs.PROOF)
    assert unprotected(honest, tmp_path / "room") == ""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64" or os.getuid() != 0, reason="some need root, some x86_64")
def test_every_program_does_harm_without_a_sandbox(tmp_path: Path) -> None:
    assert [one.name for i, one in enumerate(ALL) if not unprotected(one, tmp_path / str(i))] == []
