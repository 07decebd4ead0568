"""Selects the episodes whose transcripts a report shows: held-out ones before and after training, and of each step.

An episode is its record from the rollouts or from evaluation.json (`metrics.games`), with long texts cut, and of a
long one the first turns only. A page embeds `EACH` of up to `GROUPS` steps, good and bad ones in turn, in at most
`BUDGET` bytes; the live server has `MOST` of every step. A game is good if it was won, another episode if it earned
more than the mean of its group.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from operant.tools.report import parquet
from operant.tools.report.diagnosis.history import read_json
from operant.tools.report.html import fitting, spread
from operant.tools.report.replies import Reader

GROUPS, EACH, MOST = 12, 8, 64
BUDGET = 2_000_000
"""Bytes of JSON."""
TURNS, TEXT = 200, 2_000
"""Most turns of a transcript, and most characters of a text in it."""
_TURN = "place state thought command reply by valid copied reward value options chosen parent".split()
HELD_OUT = {"before": "held-out tasks before training", "after": "held-out tasks after training"}


class GameGroup(TypedDict):
    """The games of a step, or the held-out ones `before` or `after` training."""

    label: str
    step: NotRequired[int]
    when: NotRequired[str]


def groups(folder: Path) -> list[GameGroup]:
    paths = parquet.steps(folder / "rollouts")
    has = any("game" in (Reader()(parquet.names, paths[step]) or ()) for step in spread(list(paths), GROUPS))
    steps: list[GameGroup] = [{"label": f"step {step}", "step": step} for step in paths] if has else []
    held: list[GameGroup] = [{"label": x, "when": when} for when, x in HELD_OUT.items() if _held_out(folder, when)]
    return [*held[:1], *steps, *held[1:]]


def games(folder: Path, step: int | None = None, when: str | None = None, most: int = MOST) -> list[dict[str, object]]:
    """Return at most `most` games of a step, or of the held-out games `when` ("before", "after"), good and bad in turn.

    Raises: OperantError and FileNotFoundError where the file of the step cannot be read.
    """
    if step is None:
        found = _held_out(folder, when or "after")
    else:
        found = parquet.games(parquet.steps(folder / "rollouts").get(step, folder / "rollouts" / "missing"))
    mean = statistics.fmean(paid) if (paid := [x for g in found if (x := g.get("reward")) is not None]) else 0.0
    found = [{"good": g["won"] if "won" in g else (g.get("reward") or 0.0) > mean} | g for g in found]
    won, lost = [g for g in found if g["good"]], [g for g in found if not g["good"]]
    few = min(len(won), len(lost), -(-most // 2))
    kept = won[: max(few, most - len(lost))], lost[: max(few, most - len(won))]
    mixed = [game for pair in zip(*kept) for game in pair]
    return [shortened(game) for game in (mixed + max(kept, key=len)[len(mixed) // 2 :])[:most]]


def embedded(folder: str | Path, budget: int = BUDGET) -> dict[str, object] | None:
    """Select the games that the page of a run embeds, in at most `budget` bytes of JSON; None without games.

    `groups`: with their `games`. `summary`: a sentence if the run has more of them.
    """
    folder, read = Path(folder), Reader()
    if not (every := groups(folder)):
        return None

    def chosen(most: int) -> list[dict[str, object]]:
        kept = spread(every, max(2, min(GROUPS, most // 2)))
        each = min(EACH, max(1, most // len(kept)))
        found = [{**g, "games": read(games, folder, g.get("step"), g.get("when"), each) or []} for g in kept]
        return [g for g in found if g["games"]]

    found = fitting(chosen, GROUPS * EACH, budget)
    count = sum(len(group["games"]) for group in found)
    text = f"{count:,} episodes are embedded, from {len(found):,} of {len(every):,} steps and evaluations"
    return {"groups": found, "summary": f"{text}; `operant report {folder} --serve` shows more of each."}


def _held_out(folder: Path, when: str) -> list[dict[str, Any]]:
    replies = (read_json(folder / "evaluation.json").get(when) or {}).get("replies", ())
    return [reply["game"] | {"reward": reply.get("score")} for reply in replies if reply.get("game")]


def shortened(game: Mapping[str, Any]) -> dict[str, object]:
    """Return a game as a page holds it, with the number of `further` turns that are left out."""
    turns = game.get("turns") or []
    return {
        **{name: _cut(game.get(name)) for name in ("name", "won", "lost", "score", "most", "optimum", "objective")},
        **{name: game.get(name) for name in ("map", "final", "reward", "good")},
        "further": max(0, len(turns) - TURNS),
        "turns": [
            {name: _cut(turn[name]) for name in _TURN if turn.get(name) is not None and turn[name] != ""}
            for turn in turns[:TURNS]
        ],
    }


def _cut(value: object) -> object:
    if isinstance(value, str) and len(value) > TEXT:
        return f"{value[:TEXT]} … ({len(value) - TEXT:,} more characters)"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_cut(inner) for inner in value]
    return parquet.plain(value)
