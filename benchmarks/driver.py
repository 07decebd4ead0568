"""Runs the sides of a comparison in turn: each is a process that stays alive and takes one step on command."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.work import Peer, Work, compare

ROOT = Path(__file__).parents[1]
SIDES = ROOT / "benchmarks/peers"
ENVIRONMENTS = {"trl-0.11.4": ".venv-trl", "trl-1.12.0": ".venv-trl-1.12", "trl-1.16.0": ".venv-trl-1.16"}
SCRIPTS = {"trl-0.11.4": "trl_0_11.py", "trl-1.12.0": "trl_1_12.py", "trl-1.16.0": "trl_1_16.py"}
OURS, LIMIT = "operant", "limit"
PAUSE = 0.3
"""Seconds between two turns, in which the last side's threads fall asleep."""
# A busy process ends with its parent, so that one that is killed leaves none behind.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(i * i for i in range(10000))"


class SideFailed(Exception):
    """A side ended or did not answer in time; the message contains the end of its log."""


class Side:
    """A process that does one step of a work on command. It imports when it is created and builds in `build`."""

    def __init__(self, name: str, command: Sequence[str], spec: dict[str, Any], *, patience: float = 3600.0):
        self.name, self.patience = name, patience
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115, closed at the end
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_environment(),
            text=True,
        )
        self._spec = spec
        self.imported = 0.0
        self.about: dict[str, Any] = {}
        """How the side describes itself once it is built."""
        self.answers: list[dict[str, Any]] = []

    def build(self) -> "Side":
        """Wait until the side has imported, then let it build its models while no other side computes."""
        self.imported = self._read()["imported_mb"]
        self.about = self.ask(self._spec)
        return self

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command to the side and wait for its answer. Raises: SideFailed."""
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failed("has ended") from None
        return self._read()

    def step(self, **command: Any) -> dict[str, Any]:
        """Take one step and append the answer to `answers`."""
        time.sleep(PAUSE)
        self.answers.append(self.ask({"do": "step"} | command))
        return self.answers[-1]

    def _read(self) -> dict[str, Any]:
        out = self._process.stdout
        if not select.select([out], [], [], self.patience)[0]:
            raise self._failed(f"did not answer for {self.patience:.0f} s")
        line = out.readline()
        if not line:
            raise self._failed("has ended")
        return json.loads(line)

    def _failed(self, reason: str) -> SideFailed:
        self._log.seek(0)
        log = "".join(self._log.readlines()[-25:])
        return SideFailed(f"{self.name} {reason}; it wrote last:\n{log}")

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def median(self, *path: str) -> float:
        """The median of a number in the answers, without the first one, which warms up. `path`: its keys."""
        return median(_reach(answer, path) for answer in self.answers[1:])


def _reach(answer: Any, path: Sequence[str]) -> float:
    for name in path:
        answer = answer[name]
    return answer


def _environment() -> dict[str, str]:
    threads = os.environ.get("BENCH_THREADS") or str(os.cpu_count() or 1)
    quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
    offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    return os.environ | quiet | offline | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def command_of(name: str) -> list[str]:
    """The command that starts a side. Raises: SideFailed if its environment has not been made."""
    if name in (OURS, LIMIT):
        return [sys.executable, str(SIDES / f"{name}_side.py")]
    python = ROOT / ENVIRONMENTS[name] / "bin/python"
    if not python.exists():
        raise SideFailed(f"{name}: there is no {python.relative_to(ROOT)}; `make bench` creates it")
    return [str(python), str(SIDES / SCRIPTS[name])]


def take_turns(sides: Sequence[Side], rounds: int, products: str | None = None) -> None:
    """Run a warm-up round and `rounds` more. Our warm-up records its matrix products in the file `products`, which the
    limit replays."""
    for side in sides:
        side.build()
    for number in range(rounds + 1):
        for side in sides:
            if side.name == OURS:
                side.step(**({"capture": products} if number == 0 and products else {}))
            else:
                side.step(**({"products": products} if side.name == LIMIT else {}))


@contextmanager
def others(count: int):
    """Run `count` processes that compute, for the duration of the block."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def faster_precision(work: Work, peer: Peer, rounds: int = 2) -> tuple[str, dict[str, float]]:
    """The faster of float32 and bfloat16, and the seconds of each, measured in turn."""
    with ExitStack() as stack:
        sides = {
            kind: stack.enter_context(Side(peer.label, command_of(peer.name), _spec(work, peer, kind)))
            for kind in ("float32", "bfloat16")
        }
        take_turns(list(sides.values()), rounds)
        seconds = {kind: side.median("seconds") for kind, side in sides.items()}
    return min(seconds, key=lambda kind: seconds[kind]), seconds


def _spec(work: Work, peer: Peer, precision: str = "float32") -> dict[str, Any]:
    return work.spec() | {"precision": precision} | peer.settings


def run(work: Work, rounds: int, log=print) -> list[dict[str, Any]]:
    """Measure a work: one row per peer and one for the limit. Raises: WorkDiffers, SideFailed."""
    notes: dict[str, str] = {}
    specs: dict[str, dict[str, Any]] = {}
    for peer in work.peers:
        specs[peer.label] = _spec(work, peer)
        if peer.faster:
            kind, seconds = faster_precision(work, peer)
            specs[peer.label] = _spec(work, peer, kind)
            timings = ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items())
            notes[peer.label] = f"{peer.label} runs in {kind} ({timings})"
            log(f"  {notes[peer.label]}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ours = stack.enter_context(Side(OURS, command_of(OURS), work.spec()))
        theirs = [stack.enter_context(Side(p.label, command_of(p.name), specs[p.label])) for p in work.peers]
        limit = stack.enter_context(Side(LIMIT, command_of(LIMIT), {}))
        stack.enter_context(others(os.cpu_count() or 1 if work.busy else 0))
        take_turns([ours, *theirs, limit], rounds, f"{folder}/products.json")
        rows = [
            row(work, ours, side, peer, notes.get(peer.label)) for side, peer in zip(theirs, work.peers, strict=True)
        ]
        return [*rows, limit_row(work, ours, limit)]


def row(work: Work, ours: Side, theirs: Side, peer: Peer, note: str | None = None) -> dict[str, Any]:
    """The row of a peer: medians, their ratios, and the range over single rounds. Raises: WorkDiffers."""
    differences = []
    for mine, other in zip(ours.answers, theirs.answers, strict=True):
        differences = compare(ours.about | mine, theirs.about | other, peer.differs)
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(ours.answers[1:], theirs.answers[1:], strict=True)]
    peaks = [max(a["peak_mb"] for a in side.answers) for side in (ours, theirs)]
    extra = theirs.about.get("note")
    return {
        "work": work.name,
        "about": work.about,
        "peer": peer.name,
        "variant": peer.variant,
        "speed_ratio": theirs.median("seconds") / ours.median("seconds"),
        "memory_ratio": peaks[0] / peaks[1],
        "spread": [min(ratios), max(ratios)],
        "rounds": len(ratios),
        "seconds": {"operant": ours.median("seconds"), "peer": theirs.median("seconds")},
        "all_seconds": {"operant": _seconds(ours), "peer": _seconds(theirs)},
        "peak_mb": {"operant": peaks[0], "peer": peaks[1]},
        "imported_mb": {"operant": ours.imported, "peer": theirs.imported},
        "phases": {"operant": _phases(ours), "peer": _phases(theirs)},
        "did": {
            what: (ours.about | ours.answers[-1])[what]
            for what in ("tokens", "optimizer_steps", "trained", "precision")
        },
        "differences": differences + ([extra] if extra else []) + ([note] if note else []),
    }


def limit_row(work: Work, ours: Side, limit: Side) -> dict[str, Any]:
    """The row that compares our update with its matrix products alone; ratios are shares of the limit."""
    shares = [
        b["phases"]["update"] / a["phases"]["update"] for a, b in zip(ours.answers[1:], limit.answers[1:], strict=True)
    ]
    update = ours.median("phases", "update")
    return {
        "work": work.name,
        "about": work.about,
        "peer": LIMIT,
        "variant": "update",
        "speed_ratio": limit.median("phases", "update") / update,
        "memory_ratio": None,
        "spread": [min(shares), max(shares)],
        "rounds": len(shares),
        "seconds": {"operant": update, "peer": limit.median("phases", "update")},
        "all_seconds": {"operant": [a["phases"]["update"] for a in ours.answers[1:]], "peer": _seconds(limit)},
        "phases": {"operant": _phases(ours), "peer": _phases(limit)},
        "of_square_rate": limit.median("phases", "ideal") / update,
        "square_gflops": limit.median("square_gflops"),
        "update_gflop": limit.answers[-1]["flops"] / 1e9,
        "differences": [],
    }


def _seconds(side: Side) -> list[float]:
    return [answer["seconds"] for answer in side.answers[1:]]


def _phases(side: Side) -> dict[str, float]:
    names = side.answers[-1].get("phases", {})
    return {name: side.median("phases", name) for name in names if all(name in a["phases"] for a in side.answers[1:])}
