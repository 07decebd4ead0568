"""Tokens a second of whole steps: in turn, one step ahead in a thread, and with two actors of Ray.

    python -m benchmarks.ahead [--steps 8] [--rounds 2]

The same run is made in five ways, in turn: the native engine, the native engine one step ahead, two actors of Ray, two
actors one step ahead, and that with an actor killed in every third step, whose replies have to be those of the run
without: none is lost, and none is there twice. Rates are tokens of the replies over the
seconds of a whole step, the median of the steps behind the first two.
Writes `benchmarks/results/ahead.json`.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import operant
from operant.api import runs
from operant.machine import about
from operant.sandbox.ray import ENGINE, RaySession

RESULTS = Path(__file__).parent / "results/ahead.json"
WARM = 2
"""Steps that are not counted: the first one measures what is exact, and the thread has no lead yet."""
Replies = list[tuple[int, str, list[int]]]


def side(args: argparse.Namespace, folder: str, *, actors: int, ahead: int, kills: bool) -> tuple[list[dict], Replies]:
    """The metrics of each step of a run, and (step, task, ids) of all its replies."""
    options: dict[str, Any] = {"engine": "ray", "engine.actors": actors, "engine.cpus": 1.0 / actors} if actors else {}
    options |= {"policy": "builtin:reviews-lm", "tasks": "builtin:openings/train", "reward": "letters:e"}
    options |= {"steps": args.steps, "batch": args.batch, "sampling.max_tokens": args.tokens, "threads": 1}
    options |= {"sampling.fixed_length": True, "probes": 0, "samples_every": 0, "ahead": ahead, "quiet": True}
    replies: Replies = []
    for run in runs(Path(folder) / f"{actors}-{ahead}-{kills}", **options):
        step, last = len(run.metrics), run.learner.last_step
        if last is not None and all(step != known for known, *_ in replies):
            replies += [(step, rollout.task.id, rollout.ids) for rollout in last.rollouts]
        if kills and step % 3 == 2:
            engine: Any = run.learner.engine
            kill(engine.actors[step % actors])
        found = run.metrics
    return found, replies


def kill(actor: Any) -> None:
    """End the process of an actor, at once."""
    import ray

    os.kill(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)


def rate(metrics: Mapping[str, float]) -> float:
    return metrics["tokens/per_second"]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows of the table in docs/engines.md."""
    base, lines = rows[0]["tokens a second"], list[str]()
    for row in rows:
        found = f"{row['tokens a second']:.0f} | {row['tokens a second'] / base:.2f}x"
        lines.append(f"| {row['side']} | {found} | {row['seconds of generate']:.1f} | {row['seconds of step']:.1f} |")
    return lines


SIDES = {
    "native, in turn": {"actors": 0, "ahead": 0, "kills": False},
    "native, one ahead": {"actors": 0, "ahead": 1, "kills": False},
    "ray, in turn": {"actors": 2, "ahead": 0, "kills": False},
    "ray, one ahead": {"actors": 2, "ahead": 1, "kills": False},
    "ray, one ahead, killed": {"actors": 2, "ahead": 1, "kills": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ahead", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48, help="of a reply")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    RaySession(ENGINE).begin()
    rates: dict[str, list[float]] = {name: [] for name in SIDES}
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in SIDES}
    said: dict[str, Replies] = {}
    deaths: list[str] = []
    for number in range(args.rounds):
        for name, options in SIDES.items():
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                metrics, said[name] = side(args, folder, **options)
            deaths += [str(w.message) for w in caught if "of engine ray died" in str(w.message)]
            counted = metrics[WARM:]
            rates[name] += map(rate, counted)
            for phase in ("step", "generate", "ahead", "update"):
                own = seconds[name].setdefault(phase, [])
                own += [row[f"time/{phase}"] for row in counted if f"time/{phase}" in row]
            assert len(said[name]) == args.steps * args.batch, f"{name}: {len(said[name])} replies"
            print(f"round {number}: {name}, {statistics.median(map(rate, counted)):.0f} tokens/s", flush=True)
    killed, spared = said["ray, one ahead, killed"], said["ray, one ahead"]
    assert killed == spared, "an actor that died has changed replies"
    rows = []
    for name, options in SIDES.items():
        ahead = options["ahead"]
        row = {"side": name, **options, "tokens a second": statistics.median(rates[name])}
        row |= {"spread": [min(rates[name]), max(rates[name])], "replies": len(said[name])}
        row |= {f"seconds of {k}": statistics.median(v) for k, v in seconds[name].items() if v}
        same = sum(a == b for a, b in zip(said[name], said[list(SIDES)[ahead]], strict=True))
        rows.append(row | {"replies as the native engine's": same})
    print(*table(rows), sep="\n")
    result = {"command": " ".join(["python -m benchmarks.ahead", *sys.argv[1:]]), "machine": about()}
    result |= {"load": os.getloadavg(), "deaths": len(deaths), "rows": rows, "version": operant.__version__}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
