"""Kill a run at any moment, damage its checkpoints, fill its disk; resume; compare: `python -m benchmarks.chaos`.

A small but real run (`harm/trials.py`) is killed with signal 9 at random moments (`--kills 100`), and before and after
every disk operation of a resume and of a step with its checkpoints, and at some of those of its start and its end. A
resume may be killed as well. Further trials cut the power, fill the disk and damage checkpoints. After each, the
resumed run must be bit-identical to the undisturbed one, and no checkpoint that has its final name may be lost. With
fewer kills, an equally small share of the other trials is made.

Writes `benchmarks/results/chaos.json`. The last line is "N of M": the number of random kills after which the runs were
equal. The exit status is 0 only if every trial ended equal.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harm.breakage import WRITES, full_disk, power, refused
from benchmarks.harm.damage import damages, recognised
from benchmarks.harm.ground import (
    KILLED,
    DiskOperation,
    Ground,
    Outcome,
    Seam,
    die,
    finish,
    make_ground,
    operations,
    watched,
)
from benchmarks.harm.order import available, disorder, traced
from benchmarks.harm.trials import fork, play, wait

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/chaos.json"
WHOLE = ("an operation of a resume", "an operation of a step and its checkpoint")
"""Kinds of disk operations that are all tried; of those of the start and the end, every fourth is."""


# --- kills ------------------------------------------------------------------------------------------------------------


def at_random(ground: Ground, number: int, seed: int) -> Outcome:
    """Kill the run at a random moment, and up to two of its resumes."""
    draw = random.Random(f"{seed}/{number}")
    out, moment = ground.place("random"), draw.uniform(0, ground.seconds)
    outcome = Outcome("a random moment", f"{moment:.3f} s")
    while wait(fork(partial(play, ground.job, out), ground.log(out)), moment) != KILLED:
        moment *= draw.uniform(0.5, 1)  # the run ended before the kill
        out = ground.place("random")
    outcome.kills = 1
    while outcome.kills < 3 and draw.random() < 0.4:
        moment = draw.uniform(0, 0.8 * ground.seconds)
        if wait(fork(partial(play, ground.job, out), ground.log(out)), moment) != KILLED:
            break
        outcome.kills += 1
    return finish(ground, out, outcome)


def at_operation(ground: Ground, kind: str, start: Path | None, number: int, operation: DiskOperation) -> Outcome:
    """Kill the run at one disk operation."""
    out = ground.place("operation", start)
    outcome = Outcome(kind, " ".join(operation), kills=1)
    status = wait(fork(partial(watched, ground.job, out, Seam(die, number)), ground.log(out)))
    if status != KILLED:
        outcome.wrong.append(f"the operation was not reached: the run ended with {status}")
    return finish(ground, out, outcome)


# --- the command ------------------------------------------------------------------------------------------------------


def share(items: Sequence[Any], kills: int, seed: int) -> list[Any]:
    """All items for 100 kills or more; for fewer, an equally small share, evenly spaced."""
    every = max(1, round(100 / kills))
    return list(items[random.Random(seed).randrange(every) :: every])


def trials(ground: Ground, kills: int, seed: int) -> Iterator[Callable[[], Outcome | None]]:
    """Yield every trial as a function that makes it."""
    part = partial(share, kills=kills, seed=seed)
    yield from (partial(at_random, ground, number, seed) for number in range(kills))
    every = operations(ground)
    whole = [operation for operation in every if operation[0] in WHOLE]
    rest = [operation for operation in every if operation[0] not in WHOLE]
    yield from (partial(at_operation, ground, *operation) for operation in [*part(whole), *part(rest)[::4]])
    before = [operation[1:] for operation in every if operation[-1][0] == "before"]
    yield from (partial(power, ground, *operation) for operation in part(before)[::4])
    writes = [operation for operation in before if operation[-1][1] in WRITES]
    yield from (partial(refused, ground, *operation) for operation in part(writes)[::2])
    yield from (partial(full_disk, ground, number, seed) for number in range(max(2, kills // 10)))
    for which in ("resume", "light"):
        planned = part(list(damages(ground.half, which, seed)))
        resumes = which == "resume"  # a run cannot resume from a light checkpoint
        yield from (partial(recognised, ground, which, d, resumes and i % 20 == 0) for i, d in enumerate(planned))
    yield partial(in_order, ground)


def make(ground: Ground, kills: int, seed: int, lanes: int) -> list[Outcome]:
    """Make all trials, shared out over several processes, and return their outcomes in order."""
    children = []
    for lane in range(lanes):
        own = replace(ground, lane=lane)
        children.append(fork(partial(_make_share, own, kills, seed, lanes)))
    failed = [status for child in children if (status := wait(child, 24 * 3600))]
    if failed:
        raise RuntimeError(f"some of the processes that make the trials ended with exit statuses {failed}")
    lanes_outcomes = [
        json.loads((replace(ground, lane=lane).own / "outcomes.json").read_text("utf-8")) for lane in range(lanes)
    ]
    numbered = sorted((pair for outcomes in lanes_outcomes for pair in outcomes), key=lambda pair: pair[0])
    return [Outcome(**outcome) for _, outcome in numbered]


def _make_share(ground: Ground, kills: int, seed: int, lanes: int) -> None:
    outcomes = []
    for number, trial in enumerate(trials(ground, kills, seed)):
        if number % lanes == ground.lane and (outcome := trial()):
            outcomes.append((number, asdict(outcome)))
            mark = "." if not outcome.wrong else f"\n{outcome.kind}, {outcome.what}: {outcome.wrong}\n"
            print(mark, end="", flush=True)
    (ground.own / "outcomes.json").write_text(json.dumps(outcomes), encoding="utf-8")


def in_order(ground: Ground) -> Outcome | None:
    """Check the order of the system calls of one checkpoint; None without strace."""
    if not available():
        return None
    folder = ground.place("traced").parent
    return Outcome("system calls of one checkpoint, in order (strace)", "", wrong=disorder(traced(folder)))


def table(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One row per kind of trial: its trials, kills, resumes from a checkpoint, fresh starts and equal outcomes."""
    rows = []
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        same_kind = [outcome for outcome in outcomes if outcome.kind == kind]
        resumed = [step for outcome in same_kind for step in outcome.resumed]
        rows.append(
            {
                "kind": kind,
                "trials": len(same_kind),
                "kills": sum(outcome.kills for outcome in same_kind),
                "resumed": sum(step > 0 for step in resumed),
                "fresh": sum(step == 0 for step in resumed),
                "equal": sum(not outcome.wrong for outcome in same_kind),
            }
        )
    return rows


def report(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'':45}{'trials':>8}{'kills':>8}{'resumed':>9}{'fresh':>7}{'equal':>7}"]
    for row in rows:
        lines.append("{kind:45}{trials:8}{kills:8}{resumed:9}{fresh:7}{equal:7}".format(**row))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kills", type=int, default=100, help="kills at random moments; below 100, a share of the other trials too"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=os.cpu_count() or 1, help="trials that run at the same time")
    parser.add_argument("--folder", type=Path, help="folder of the runs; by default a temporary one")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    memory = Path("/dev/shm")  # a kill loses no written byte there either, and fsync is free
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as temporary:
        ground = make_ground(args.folder or Path(temporary))
        start = time.monotonic()
        outcomes = make(ground, args.kills, args.seed, args.lanes)
    rows = table(outcomes)
    wrong = [asdict(outcome) for outcome in outcomes if outcome.wrong]
    result = {"command": f"python -m benchmarks.chaos --kills {args.kills}", "seed": args.seed, "rows": rows}
    result |= {"wrong": wrong, "seconds": round(time.monotonic() - start), "run_seconds": round(ground.seconds, 2)}
    args.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(report(rows))
    lost = len([outcome for outcome in wrong if outcome["kind"] != rows[0]["kind"]])
    if lost:
        print(f"{lost} of the other trials were not equal: {args.results}")
    print(f"{rows[0]['equal']} of {rows[0]['trials']}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
