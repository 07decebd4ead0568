"""Kill a run at any moment, damage its checkpoints, fill its disk; resume; compare: `python -m benchmarks.chaos`.

A small but real run (`harm/trials.py`) is killed with signal 9 at random moments of its whole time (`--kills 100`), and
before and after every operation on the disk of a step with its checkpoints and of a resume, and some of its start and
its end. A resume may be killed as well. Then power that goes, a disk that fills, checkpoints that are damaged. What is
left in the end must be what the undisturbed run left, bit for bit, and no checkpoint that had its name may be lost.
Fewer kills take as small a share of the rest.

Writes `benchmarks/results/chaos.json`. The last line is the number of random kills after which all was equal, of how
many; the exit status is 0 only where nothing at all was lost.
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
from benchmarks.harm.ground import KILLED, Ground, Outcome, Seam, Told, die, finish, make_ground, operations, watched
from benchmarks.harm.order import available, disorder, traced
from benchmarks.harm.trials import fork, play, wait

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/chaos.json"
WHOLE = ("an operation of a resume", "an operation of a step and its checkpoint")
"""What is enumerated without a gap; of the operations of the start and the end, every fourth."""


# --- kills ------------------------------------------------------------------------------------------------------------


def at_random(ground: Ground, number: int, seed: int) -> Outcome:
    """Killed at a moment of its whole time, then up to twice more while it goes on."""
    draw = random.Random(f"{seed}/{number}")
    out, moment = ground.place("random"), draw.uniform(0, ground.seconds)
    outcome = Outcome("a random moment", f"{moment:.3f} s")
    while wait(fork(partial(play, ground.job, out), ground.log(out)), moment) != KILLED:
        moment *= draw.uniform(0.5, 1)  # a quick run had ended before
        out = ground.place("random")
    outcome.kills = 1
    while outcome.kills < 3 and draw.random() < 0.4:
        moment = draw.uniform(0, 0.8 * ground.seconds)
        if wait(fork(partial(play, ground.job, out), ground.log(out)), moment) != KILLED:
            break
        outcome.kills += 1
    return finish(ground, out, outcome)


def at_operation(ground: Ground, kind: str, start: Path | None, number: int, told: Told) -> Outcome:
    """Killed at one operation on the disk."""
    out = ground.place("operation", start)
    outcome = Outcome(kind, " ".join(told), kills=1)
    status = wait(fork(partial(watched, ground.job, out, Seam(die, number)), ground.log(out)))
    if status != KILLED:
        outcome.wrong.append(f"the operation was not reached: the run ended with {status}")
    return finish(ground, out, outcome)


# --- the command ------------------------------------------------------------------------------------------------------


def share(items: Sequence[Any], kills: int, seed: int) -> list[Any]:
    """All of them from a hundred kills on, else as large a part, spread over the whole."""
    every = max(1, round(100 / kills))
    return list(items[random.Random(seed).randrange(every) :: every])


def works(ground: Ground, kills: int, seed: int) -> Iterator[Callable[[], Outcome | None]]:
    """Every trial, to be made."""
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
        again = which == "resume"  # nothing goes on from a light one
        yield from (partial(recognised, ground, which, d, again and i % 20 == 0) for i, d in enumerate(planned))
    yield partial(in_order, ground)


def make(ground: Ground, kills: int, seed: int, lanes: int) -> list[Outcome]:
    """All trials, shared out over several processes."""
    children = []
    for lane in range(lanes):
        own = replace(ground, lane=lane)
        children.append(fork(partial(_make_share, own, kills, seed, lanes)))
    failed = [status for child in children if (status := wait(child, 24 * 3600))]
    if failed:
        raise RuntimeError(f"of the processes that make trials some ended with {failed}")
    told = [json.loads((replace(ground, lane=lane).own / "outcomes.json").read_text("utf-8")) for lane in range(lanes)]
    return [
        Outcome(**outcome) for _, outcome in sorted((pair for lane in told for pair in lane), key=lambda pair: pair[0])
    ]


def _make_share(ground: Ground, kills: int, seed: int, lanes: int) -> None:
    outcomes = []
    for number, work in enumerate(works(ground, kills, seed)):
        if number % lanes == ground.lane and (outcome := work()):
            outcomes.append((number, asdict(tell(outcome))))
    (ground.own / "outcomes.json").write_text(json.dumps(outcomes), encoding="utf-8")


def in_order(ground: Ground) -> Outcome | None:
    """The system calls of one checkpoint."""
    if not available():
        return None
    folder = ground.place("traced").parent
    return Outcome("system calls of one checkpoint, in order (strace)", "", wrong=disorder(traced(folder)))


def table(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row a kind: how many trials, kills, resumes from a checkpoint and fresh starts, and how many were equal."""
    rows = []
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        of = [outcome for outcome in outcomes if outcome.kind == kind]
        resumed = [step for outcome in of for step in outcome.resumed]
        rows.append(
            {
                "kind": kind,
                "trials": len(of),
                "kills": sum(outcome.kills for outcome in of),
                "resumed": sum(step > 0 for step in resumed),
                "fresh": sum(step == 0 for step in resumed),
                "equal": sum(not outcome.wrong for outcome in of),
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
    parser.add_argument("--kills", type=int, default=100, help="at random moments; below 100, a share of the rest too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=os.cpu_count() or 1, help="trials at the same time")
    parser.add_argument("--folder", type=Path, help="where the runs go; kept. Without it a folder that is deleted")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    memory = Path("/dev/shm")  # where there is one: a kill takes no written byte back, and fsync costs nothing there
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as temporary:
        ground = make_ground(given.folder or Path(temporary))
        start = time.monotonic()
        outcomes = make(ground, given.kills, given.seed, given.lanes)
    rows = table(outcomes)
    wrong = [asdict(outcome) for outcome in outcomes if outcome.wrong]
    result = {"command": f"python -m benchmarks.chaos --kills {given.kills}", "seed": given.seed, "rows": rows}
    result |= {"wrong": wrong, "seconds": round(time.monotonic() - start), "run_seconds": round(ground.seconds, 2)}
    given.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(report(rows))
    lost = len([outcome for outcome in wrong if outcome["kind"] != rows[0]["kind"]])
    if lost:
        print(f"{lost} of the others were not equal: {given.results}")
    print(f"{rows[0]['equal']} of {rows[0]['trials']}")
    return int(bool(wrong))


def tell(outcome: Outcome) -> Outcome:
    print("." if not outcome.wrong else f"\n{outcome.kind}, {outcome.what}: {outcome.wrong}\n", end="", flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
