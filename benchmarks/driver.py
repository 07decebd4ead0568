"""Sides that take turns: one process each, alive throughout, and one step at a time on command."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
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


class SideFailed(Exception):
    """A side ended or said nothing in time; the message holds the end of what it wrote."""


class Side:
    """A process that does one step of a work when it is told to. It imports at once, and builds in `build`."""

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
        """What the side says of itself once it is built."""
        self.answers: list[dict[str, Any]] = []

    def build(self) -> "Side":
        """Wait until the side has imported, and let it build what it needs, while nobody else computes."""
        self.imported = self._hear()["imported_mb"]
        self.about = self.ask(self._spec)
        return self

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Tell the side something, and wait for its answer. Raises: SideFailed."""
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failed("has ended") from None
        return self._hear()

    def step(self, **command: Any) -> dict[str, Any]:
        """One step; its answer is kept."""
        time.sleep(PAUSE)
        self.answers.append(self.ask({"do": "step"} | command))
        return self.answers[-1]

    def _hear(self) -> dict[str, Any]:
        out = self._process.stdout
        if not select.select([out], [], [], self.patience)[0]:
            raise self._failed(f"said nothing for {self.patience:.0f} s")
        line = out.readline()
        if not line:
            raise self._failed("has ended")
        return json.loads(line)

    def _failed(self, what: str) -> SideFailed:
        self._log.seek(0)
        said = "".join(self._log.readlines()[-25:])
        return SideFailed(f"{self.name} {what}; it wrote last:\n{said}")

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
        """Of a number in the answers, the first one left out."""
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
    """How a side is started. Raises: SideFailed where its environment has not been made."""
    if name in (OURS, LIMIT):
        return [sys.executable, str(SIDES / f"{name}_side.py")]
    python = ROOT / ENVIRONMENTS[name] / "bin/python"
    if not python.exists():
        raise SideFailed(f"{name}: there is no {python.relative_to(ROOT)}; `make bench` makes it")
    return [str(python), str(SIDES / SCRIPTS[name])]


def take_turns(sides: Sequence[Side], rounds: int, products: str | None = None) -> None:
    """A warm-up round, then `rounds` more. Our warm-up writes `products` down, and the limit plays them again."""
    for side in sides:
        side.build()
    for number in range(rounds + 1):
        for side in sides:
            if side.name == OURS:
                side.step(**({"capture": products} if number == 0 and products else {}))
            else:
                side.step(**({"products": products} if side.name == LIMIT else {}))


def faster_precision(work: Work, peer: Peer, rounds: int = 2) -> tuple[str, dict[str, float]]:
    """float32 or bfloat16, and the seconds of each, in turn."""
    with ExitStack() as stack:
        sides = {
            kind: stack.enter_context(Side(peer.label, command_of(peer.name), _told(work, peer, kind)))
            for kind in ("float32", "bfloat16")
        }
        take_turns(list(sides.values()), rounds)
        seconds = {kind: side.median("seconds") for kind, side in sides.items()}
    return min(seconds, key=lambda kind: seconds[kind]), seconds


def _told(work: Work, peer: Peer, precision: str = "float32") -> dict[str, Any]:
    return work.spec() | {"precision": precision} | peer.settings


def run(work: Work, rounds: int, say=print) -> list[dict[str, Any]]:
    """One row a peer, and one for the limit. Raises: WorkDiffers, SideFailed."""
    notes: dict[str, str] = {}
    specs: dict[str, dict[str, Any]] = {}
    for peer in work.peers:
        specs[peer.label] = _told(work, peer)
        if peer.faster:
            kind, seconds = faster_precision(work, peer)
            specs[peer.label] = _told(work, peer, kind)
            told = ", ".join(f"{name} {value:.3g} s" for name, value in seconds.items())
            notes[peer.label] = f"{peer.label} runs in {kind} ({told})"
            say(f"  {notes[peer.label]}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ours = stack.enter_context(Side(OURS, command_of(OURS), work.spec()))
        theirs = [stack.enter_context(Side(p.label, command_of(p.name), specs[p.label])) for p in work.peers]
        limit = stack.enter_context(Side(LIMIT, command_of(LIMIT), {}))
        take_turns([ours, *theirs, limit], rounds, f"{folder}/products.json")
        rows = [
            row(work, ours, side, peer, notes.get(peer.label)) for side, peer in zip(theirs, work.peers, strict=True)
        ]
        return [*rows, limit_row(work, ours, limit)]


def row(work: Work, ours: Side, theirs: Side, peer: Peer, note: str | None = None) -> dict[str, Any]:
    """Medians, their ratios, and how far single rounds lie apart. Raises: WorkDiffers."""
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
    """Our update beside the same products alone; shares of the limit, not times of it."""
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
