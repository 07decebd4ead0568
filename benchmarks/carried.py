"""What carrying replies over is worth: `python -m benchmarks.carried`, two minutes.

Replies of very unequal lengths (a sentence, at most `--tokens`) to openings of reviews, by the built-in model, one
thread. A step ends with `--batch` replies: in turn, all that it has begun; with `carry=k`, the first that have ended,
after pieces of k tokens. Nothing is trained, so that every step has the same policy. Per step:

- calls of the model that draw a token for each live reply: the time of a step where a call costs the same whatever
  the number of rows, as on a GPU;
- rows of a call: how full these calls are;
- tokens of the replies per second of processor time, prompts and replies that are read again included.

Writes `benchmarks/results/carried.json`; `make docs` writes the table of docs/engines.md.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from operant import Learner
from operant.data import Order, load_tasks
from operant.engines.native import engine as native
from operant.machine import about
from operant.rollouts.carried import continue_replies, new_groups

RESULTS = Path(__file__).parent / "results/carried.json"


def side(carry: int, given: argparse.Namespace) -> dict[str, Any]:
    """The row of a number of tokens a step; 0: in turn."""
    limits = {"max_tokens": given.tokens, "stop_strings": (".", "!", "?")}
    learner = Learner("builtin:reviews-lm", algorithm="rloo", reference=None, threads="1", **limits)
    tasks, rows = load_tasks("builtin:openings/train"), list[int]()
    order = Order(len(tasks))
    drawn = native._GenerateCall._draw

    def counted(call: Any) -> Any:
        rows.append(len(call.live))
        return drawn(call)

    native._GenerateCall._draw = counted
    try:
        begun, found = [], []
        for step in range(given.steps + given.warm):
            rows.clear()
            indices, begin = order.take(given.batch * (2 if carry and not step else 1)), time.process_time()
            learner.progress.step = step
            if carry:
                groups = [*begun, *new_groups(step, indices)]
                known = {"engine": learner.engine, "tokenizer": learner.policy.tokenizer, "sampling": learner.sampling}
                known |= {"attempts": lambda some: [tasks[i] for i in some], "seed": learner.own.seed}
                with learner.threads(len(groups)):
                    rollouts, _, begun = continue_replies(groups, given.batch, carry, **known)
            else:
                rollouts = learner.play([tasks[i] for i in indices])
            seconds, tokens = time.process_time() - begin, sum(len(rollout.ids) for rollout in rollouts)
            found.append((len(rows), statistics.mean(rows), tokens, seconds))
    finally:
        native._GenerateCall._draw = drawn
    calls, full, tokens, seconds = zip(*found[given.warm :], strict=True)
    return {
        "carry": carry,
        "calls a step": statistics.mean(calls),
        "most calls": max(calls),
        "rows of a call": sum(c * r for c, r in zip(calls, full, strict=True)) / sum(calls),
        "tokens a reply": sum(tokens) / len(tokens) / given.batch,
        "tokens a processor second": sum(tokens) / sum(seconds),
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows of the table in docs/engines.md."""
    return [
        f"| {row['carry'] or 'in turn'} | {row['calls a step']:.0f} | {row['most calls']} "
        f"| {row['rows of a call']:.0f} | {row['tokens a processor second']:,.0f} |"
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--warm", type=int, default=4, help="steps that are not counted: the first begins twice as many"
    )
    given = parser.parse_args()
    rows = [side(carry, given) for carry in (0, 16, 32, 64)]
    found = {"command": "python -m benchmarks.carried", "machine": about(), **vars(given), "rows": rows}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
