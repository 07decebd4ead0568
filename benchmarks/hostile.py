"""Hostile programs, one after the other, at every level of the jail. `python -m benchmarks.hostile`.

Each program of `tests/hostile_programs.txt` runs without a sandbox first: a plain interpreter executes program and
test, and the exit status is the verdict. Then it runs at each level that this machine has, in a room of canaries that
is made anew after every harm. Writes `benchmarks/results/hostile.json`. The exit status is 0 if every program does harm
without a sandbox, and none does at the levels that are a security boundary.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from operant.machine import about
from operant.sandbox.jail import Jail, JailOptions
from operant.sandbox.levels import LEVELS, UNTRUSTED
from operant.types import OperantError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/hostile.json"


def harms(jail: Jail | None, hostile: Any, folder: Path) -> dict[str, str]:
    """What each program does: without a jail, or in it; empty for nothing."""
    found, room = {}, None
    try:
        for i, one in enumerate(hostile.ALL):
            if room is None or room.state() != room.before:
                if room:
                    room.close()
                room = hostile.Room(folder / str(i))
            found[one.name] = (
                hostile.judged(room, one, jail.run([room.program(one)])[0]) if jail else room.unprotected(one)
            )
    finally:
        if room:
            room.close()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__)
    for name in ("image", "engine", "runtime"):
        parser.add_argument(f"--{name}", default=getattr(JailOptions(), name), help="of the level container")
    given = vars(parser.parse_args(argv))
    sys.path.insert(0, str(ROOT / "tests"))
    import hostile_programs

    found, untried = {}, {}
    for level in ("none", *UNTRUSTED):
        try:
            jail = None if level == "none" else Jail(JailOptions(level=level, seconds=0.5, patience=1.0, **given))
        except OperantError as error:
            untried[level] = str(error)
            print(f"{level}: not tried: {error}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            found[level] = harms(jail, hostile_programs, Path(folder))
        print(f"{level}: {sum(map(bool, found[level].values()))} of {len(found[level])} do harm", flush=True)
    rows = [
        {"name": one.name, "kind": one.kind, **{level: results[one.name] for level, results in found.items()}}
        for one in hostile_programs.ALL
    ]
    results = {
        "command": "python -m benchmarks.hostile",
        "container": given,
        "machine": about(),
        "untried": untried,
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    strong = [level for level in found if level != "none" and LEVELS[level].boundary]
    return 0 if all(row["none"] and not any(row[level] for level in strong) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
