"""Episodes to read: `python -m benchmarks.gallery`. A minute on one core.

`builtin:rooms` plays six games that it never saw, and `builtin:code-lm` writes, refines and repairs programs for twelve
problems. `benchmarks/results/gallery.json` keeps the first game that was won, the end of the first that was not, and a
problem: the first that a repaired program solves, or else the first that is solved. docs/gallery.md shows them.
"""

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path

from operant.tools.cli import main as operant

RESULT = Path(__file__).parent / "results/gallery.json"
GAMES = "play rooms --player builtin:rooms --env.memory 0"
PROGRAMS = "generate builtin:code-lm --tasks programs/held-out --tests --all --refine --repair policy"
LINES = 12
"""Of a game that was not won: its last ones."""


def games(count: int) -> dict:
    """The games that the model plays, told turn by turn."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        operant([*GAMES.split(), "--games", str(count), "--transcript", str(count)])
    told = [game.rpartition("\nplayer ")[0] or game for game in said.getvalue().split("--- ")[1:]]
    won = next((game for game in told if "not won" not in game), "")
    lost = next((game for game in told if "not won" in game), "")
    head, *lines = lost.splitlines() or [""]
    shown = "\n".join([head, lines[0], "...", *lines[-LINES:]]) if len(lines) > LINES else lost
    return {"games": count, "won": sum("not won" not in game for game in told), "first won": won, "first lost": shown}


def programs(limit: int, samples: int) -> dict:
    """A problem, a program of its first round that fails, and the one that passes the hidden tests."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "programs.jsonl"
        with contextlib.redirect_stdout(io.StringIO()):
            operant([*PROGRAMS.split(), "--limit", str(limit), "--samples", str(samples), "--out", str(out)])
        rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    tasks: dict[str, list[dict]] = {}
    for row in rows:
        tasks.setdefault(row["task"], []).append(row)
    solved = [found for found in tasks.values() if any(row["outcome"] == "passed" for row in found)]
    solved.sort(key=lambda found: not any(row["outcome"] == "passed" and row["how"] == "repaired" for row in found))
    shown = solved[0] if solved else []
    right = next(iter(sorted(shown, key=lambda row: (row["outcome"] != "passed", row["how"] != "repaired"))), None)
    wrong = next((row for row in shown if row["outcome"] != "passed" and row["round"] == 0), None)
    return {"problems": len(tasks), "solved": len(solved), "samples": samples, "before": wrong, "after": right}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only check that it runs: nothing is written")
    quick = parser.parse_args().quick
    found = {"command": "python -m benchmarks.gallery", "rooms": games(1 if quick else 6)}
    found["programs"] = programs(1, 2) if quick else programs(12, 16)
    if not quick:
        RESULT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
