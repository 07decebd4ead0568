"""Turns a second with and without overlap: the world steps one wave while the replies of the other are generated.

    python -m benchmarks.overlap [--world module:World ...] [--rounds 3]

Episodes of the built-in language model play in the process itself, in worker processes one after the other with
generation (waves=1), and in worker processes beside it (waves=2). By default the world is one that answers by itself:
it computes (`works`) or waits (`sleeps`) for as long as a turn's generation takes here, which is measured first. The
sides take turns, and every rollout has to have the same tokens on all sides; the log-probs differ by the value printed.
Writes `benchmarks/results/overlap.json`.
"""

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import operant
from operant import Sampling, Step, Task
from operant.envs.isolated import WorkerEnv
from operant.machine import about
from operant.runs import named_parts
from operant.training.learner import Learner

RESULTS = Path(__file__).parent / "results/overlap.json"


class Slow:
    """Pays nothing and answers " go on." for `turns` turns; each step takes `seconds`, of computing or of waiting."""

    def __init__(self, seconds: float = 0.0, turns: int = 5, waits: bool = False):
        self.seconds, self.turns, self.waits = seconds, turns, waits

    def reset(self, tasks):
        self.left = dict.fromkeys(tasks, self.turns)
        return {slot: Step() for slot in tasks}

    def step(self, replies):
        return {slot: self.answer(slot) for slot in replies}

    def answer(self, slot: int) -> Step:
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            if self.waits:
                time.sleep(max(end - time.perf_counter(), 0.0))
        self.left[slot] -= 1
        return Step(" go on.", terminated=self.left[slot] == 0)


def measured(play_in: Any, env: Any, tasks: list[Task]) -> tuple[float, list[Any]]:
    """Turns a second, and the rollouts."""
    begun = time.perf_counter()
    rollouts = play_in(tasks, env=env)
    return sum(len(rollout.turns) for rollout in rollouts) / (time.perf_counter() - begun), rollouts


def compared(name: str, spec: Any, options: dict[str, Any], play_in: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The sides of one world, which take turns."""
    world = named_parts.make("env", spec, options)
    tasks = world.games("train")[: args.episodes] if hasattr(world, "games") else []
    tasks = tasks or [Task(f"t/{i}", "The film was") for i in range(args.episodes)]
    sides = {"in the process": world}
    sides |= {f"workers, waves={n}": WorkerEnv(spec, options, workers=args.workers, waves=n) for n in (1, 2)}
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    found = {}
    for round in range(args.rounds + 1):  # the first one warms up
        for side, env in sides.items():
            speed, found[side] = measured(play_in, env, tasks)
            speeds[side] += [speed] * (round > 0)
    for env in list(sides.values())[1:]:
        env.close()
    first, *others = ([turn for rollout in rollouts for turn in rollout.turns] for rollouts in found.values())
    assert all([turn.action for turn in turns] == [turn.action for turn in first] for turns in others), "tokens differ"
    pairs = [pair for turns in others for a, b in zip(first, turns) for pair in zip(a.logprobs or (), b.logprobs or ())]
    row = {"world": name, "options": options, "turns a second": {k: statistics.median(v) for k, v in speeds.items()}}
    row |= {"spread": {k: [min(v), max(v)] for k, v in speeds.items()}, "turns": len(first)}
    row |= {"largest difference of log-probs": max((abs(a - b) for a, b in pairs), default=0.0)}
    base = row["turns a second"]["workers, waves=1"]
    for side, speed in row["turns a second"].items():
        low, high = row["spread"][side]
        print(f"{name:22} {side:18} {speed:7.1f} turns/s ({low:.1f} to {high:.1f}), {speed / base:.2f}x", flush=True)
    print(f"{'':22} log-probs differ by at most {row['largest difference of log-probs']:.1e}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__.partition("\n")[0])
    parser.add_argument("--world", action="append", default=[], help="module:World or a name, in place of the two")
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8, help="of a reply")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    learner = Learner("builtin:reviews-lm", algorithm="ppo", max_tokens=args.tokens, device=args.device, threads=1)
    play_in = partial(learner.play, sampling=Sampling(max_tokens=args.tokens))
    tasks = [Task(f"t/{i}", "The film was") for i in range(args.episodes)]
    measured(play_in, Slow(), tasks)
    seconds = args.episodes / measured(play_in, Slow(), tasks)[0]
    print(f"a turn of {args.episodes} replies of {args.tokens} tokens is generated in {seconds:.3f} s", flush=True)
    own = "benchmarks.overlap:Slow"
    share = seconds / args.episodes  # of one slot: a worker answers for its slots one after the other
    worlds = [(spec, spec, {}) for spec in args.world] or [
        ("works", own, {"seconds": share}),
        ("sleeps", own, {"seconds": args.workers * share, "waits": True}),
    ]
    rows = [compared(name, spec, options, play_in, args) for name, spec, options in worlds]
    result = {"command": " ".join(["python -m benchmarks.overlap", *sys.argv[1:]]), "machine": about()}
    result |= {"seconds of generation": seconds, "rows": rows, "version": operant.__version__}
    if not args.world:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
