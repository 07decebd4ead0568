"""The speed-up of each optimisation: with and without it, in turn. `python -m benchmarks.pieces [NAME ...]`

Writes benchmarks/results/pieces.json; docs/fast.md shows it. Half an hour on two cores.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.driver import SIDES, Side
from benchmarks.report import machine
from benchmarks.work import WORKS, Work

RESULTS = Path(__file__).parent / "results/pieces.json"


@dataclass(frozen=True)
class Piece:
    """One optimisation, which an option or a patch of `pieces_side.py` turns off."""

    name: str
    work: str
    description: str
    phase: str
    """The phase of the step that it speeds up."""
    patch: str = "nothing"
    options: dict[str, Any] = field(default_factory=dict)
    beside: dict[str, Any] = field(default_factory=dict)
    """Options of both sides."""


RAGGED = {"update.minibatch": 64, "update.micro_tokens": 1024, "model.packing": "off"}
PIECES = (
    Piece("kept-numbers", "W1", "decoding keeps log-probs and values", "observe", options={"rescore": True}),
    Piece("buffer", "W1", "keys and values are written in place", "generate", "buffer"),
    Piece("drawing", "W1", "a token is drawn in two levels", "generate", "drawing"),
    Piece("retiring", "W3", "finished replies leave the batch", "generate", "retiring"),
    Piece("reading-once", "W5b", "the prompt of a group is read once", "generate", "reading_once"),
    Piece("trunk", "W2", "frozen layers are computed once: `trunk`", "step", options={"model.train_layers": None}),
    Piece(
        "kept-states", "W2", "hidden states of the frozen trunk are cached", "step", options={"model.states_gb": 0.0}
    ),
    Piece("bfloat16", "W2", "the model computes in bfloat16", "step", options={"model.precision": "float32"}),
    Piece("attention", "W2", "short bfloat16 attention without the fused kernel", "update", "attention"),
    Piece("sweep", "W2", "one pass over the vocabulary, forward and backward", "update", "sweep"),
    Piece("activations", "W1", "GELU is one kernel", "update", "activations"),
    Piece("embedding", "W1", "the embedding's gradient has only the rows that were looked up", "update", "embedding"),
    Piece("sorting", "W3", "micro-batches of near-equal length", "update", "sorting", beside=RAGGED),
    Piece("packing", "W3", "ragged rows are packed end to end", "update", options={"model.packing": "off"}),
    Piece("clipping", "W1", "clipping is part of the optimizer's pass", "update", "clipping"),
    Piece("memory", "W1", "freed memory is kept for the next step", "step", options={"learner.keep_memory": False}),
)


def measure(piece: Piece, rounds: int) -> dict[str, Any]:
    """Seconds of the phase with every piece and without this one; medians of alternating rounds, one epoch per step."""
    work = replace(WORKS[piece.work], epochs=1)
    work = replace(work, options=work.options | piece.beside)
    with ExitStack() as stack:
        whole = stack.enter_context(_side("nothing", work))
        less = stack.enter_context(_side(piece.patch, replace(work, options=work.options | piece.options)))
        for side in (whole, less):
            side.build()
        for _ in range(rounds + 1):
            whole.step()
            less.step()
        path = ("seconds",) if piece.phase == "step" else ("phases", piece.phase)
        with_it, without = whole.median(*path), less.median(*path)
        step = whole.median("seconds"), less.median("seconds")
        peaks = [max(answer["peak_mb"] for answer in side.answers) for side in (whole, less)]
    row = {"name": piece.name, "work": piece.work, "says": piece.description, "phase": piece.phase}
    row |= {"seconds": with_it, "without": without, "ratio": without / with_it, "step_ratio": step[1] / step[0]}
    return row | {"peak_mb": peaks[0], "peak_mb_without": peaks[1], "rounds": rounds, "machine": machine()}


def _side(patch: str, work: Work) -> Side:
    return Side(patch, [sys.executable, str(SIDES / "pieces_side.py"), patch], work.spec())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [piece.name for piece in PIECES]
    parser.add_argument("pieces", nargs="*", metavar="NAME", help=f"one or more of {', '.join(names)}; by default all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="only check that it runs: tiny models, no results written")
    args = parser.parse_args(arguments)
    if wrong := [name for name in args.pieces if name not in names]:
        parser.error(f"there is no piece {wrong[0]}; choose from {', '.join(names)}")
    if args.quick:
        WORKS.update({name: work.quick() for name, work in WORKS.items()})
    rows = {row["name"]: row for row in (json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else [])}
    for piece in PIECES:
        if piece.name in (args.pieces or names):
            row = measure(piece, args.rounds)
            timings = f"{row['seconds']:.3f} s, without it {row['without']:.3f} s"
            print(f"{piece.name:14} {row['phase']:9} {timings}", flush=True)
            if not args.quick:
                rows[piece.name] = row
                RESULTS.write_text(json.dumps([rows[n] for n in names if n in rows], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
