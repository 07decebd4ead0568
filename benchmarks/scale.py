"""W6: the cost of a step as the batch, the length or the layers grow from 1x to 16x.

The cost must grow linearly with the tokens: twice the tokens take twice the seconds and at most twice the memory.
`slope` is the exponent in seconds ~ size^slope, over the whole range and at its upper end; 1 is linear, and below 1 a
fixed cost is shared by more tokens.
"""

import math
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from benchmarks.driver import OURS, Side, command_of, take_turns
from benchmarks.work import SHAPES, WORKS, Work

TIMES = (1, 2, 4, 8, 16)
BASE = replace(WORKS["W4"], peers=(), queries=16, minibatch=16, epochs=1)
WHAT = {
    "batch": "16 to 256 queries of 8 + 24 tokens, minibatch 16, 4 layers",
    "length": "16 queries, 8 + 24 to 128 + 384 tokens, 4 layers",
    "layers": "16 queries of 8 + 24 tokens, 1 to 16 layers",
}


def spec(what: str, times: int, base: Work = BASE) -> dict[str, Any]:
    """The specification of a side for one size."""
    shape = SHAPES[base.shape] | {"n_positions": 512}
    if what == "batch":
        base = replace(base, queries=times * base.queries)
    elif what == "length":
        base = replace(base, query=times * base.query, new=times * base.new)
    else:
        shape = shape | {"n_layer": times}
    return base.spec() | {"shape": shape}


def run(rounds: int, base: Work = BASE, log=print) -> list[dict[str, Any]]:
    """Measure the growth of batch, length and layers: one row each."""
    rows = []
    for what in WHAT:
        with ExitStack() as stack:
            sides = [stack.enter_context(Side(OURS, command_of(OURS), spec(what, times, base))) for times in TIMES]
            take_turns(sides, rounds)
            rows.append(row(what, sides))
        log(f"  {what}: {_sentence(rows[-1])}", flush=True)
    return rows


def row(what: str, sides: list[Side]) -> dict[str, Any]:
    seconds = [side.median("seconds") for side in sides]
    tokens = [side.answers[-1]["tokens"] for side in sides]
    peaks = [max(answer["peak_mb"] for answer in side.answers) for side in sides]
    each = [[answer["seconds"] for answer in side.answers[1:]] for side in sides]
    return {
        "work": f"W6 {what}",
        "about": WHAT[what],
        "peer": OURS,
        "variant": "1x",
        "speed_ratio": seconds[-1] / seconds[0] / TIMES[-1],
        "memory_ratio": peaks[-1] / peaks[0] / TIMES[-1],
        "spread": [min(each[-1]) / max(each[0]) / TIMES[-1], max(each[-1]) / min(each[0]) / TIMES[-1]],
        "rounds": len(each[0]),
        "times": list(TIMES),
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": [n / s for n, s in zip(tokens, seconds, strict=True)],
        "peak_mb": peaks,
        "slope": math.log(seconds[-1] / seconds[0]) / math.log(TIMES[-1]),
        "slope_at_the_end": math.log(seconds[-1] / seconds[-2]) / math.log(TIMES[-1] / TIMES[-2]),
        "differences": [],
    }


def _sentence(row: dict[str, Any]) -> str:
    rates = ", ".join(f"{rate:,.0f}" for rate in row["tokens_per_second"])
    slopes = f"slope {row['slope']:.2f}, {row['slope_at_the_end']:.2f} at the end"
    return f"{rates} tokens/s; {slopes}; peak {', '.join(f'{mb:.0f}' for mb in row['peak_mb'])} MB"
