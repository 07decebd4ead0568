"""Damaged checkpoints: each must be recognised and named, and the one before it used.

damages(run, which, seed)             kinds of damage, with a description and a function that damages a checkpoint
recognised(ground, ..., resume)       damage the newest, check that the older one is chosen, and resume from it
"""

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.harm.ground import Ground, Outcome, finish

Damage = tuple[str, str, Callable[[Path], None]]
NAMES = {"resume": "step-", "light": "light-"}


def damages(run: Path, which: str, seed: int, cuts: int = 12, flips: int = 24) -> Iterator[Damage]:
    """Yield ways to damage the newest checkpoint of a kind: cut, flip or replace each file, or delete some of them."""
    checkpoint, draw = checkpoints(run, which)[-1], random.Random(seed)
    names = sorted(path.name for path in checkpoint.iterdir())
    for name in names:
        size = (checkpoint / name).stat().st_size
        for offset in sorted({0, 1, size // 2, size - 1, *(draw.randrange(size) for _ in range(cuts))}):
            yield "a file cut off", f"{name} at {offset}", partial(_cut, name=name, offset=offset)
        for offset in sorted({0, 7, size - 1, *(draw.randrange(size) for _ in range(flips))}):
            bit = draw.randrange(8)
            yield "a bit flipped", f"{name}, bit {bit} at {offset}", partial(_flip, name=name, offset=offset, bit=bit)
        for what, data in (("zeros", bytes(size)), ("a longer file", b"more"), ("{}", b"{}"), ("[]", b"[]")):
            yield "a file with other content", f"{name}: {what}", partial(_fill, name=name, data=data)
    for number in range(2 ** len(names) - 1):
        gone = [name for place, name in enumerate(names) if not number >> place & 1]
        yield "half deleted", f"without {', '.join(gone)}", partial(_delete, names=gone)


def _cut(folder: Path, name: str, offset: int) -> None:
    os.truncate(folder / name, offset)


def _flip(folder: Path, name: str, offset: int, bit: int) -> None:
    data = bytearray((folder / name).read_bytes())
    data[offset] ^= 1 << bit
    (folder / name).write_bytes(data)


def _fill(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes((folder / name).read_bytes() + data if data == b"more" else data)


def _delete(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).unlink()


def recognised(ground: Ground, which: str, damage: Damage, resume: bool) -> Outcome:
    """Damage the newest checkpoint of a kind (`which`); `resume`: then resume the run and compare it."""
    from operant.storage.checkpoint import newest_whole

    kind, what, act = damage
    out, outcome, warnings = ground.place("damaged", ground.half), Outcome(f"{kind} ({which})", what), []
    older, newest = checkpoints(out, which)[-2:]
    act(newest)
    found = newest_whole(out / "checkpoints", warnings.append, (which,))
    if found != older:
        outcome.wrong.append(f"{found} was chosen, not {older}")
    if not any(str(newest) in text for text in warnings):
        outcome.wrong.append(f"{newest.name} was not named: {warnings}")
    return finish(ground, out, outcome, damaged=True) if resume else outcome


def checkpoints(run: Path, which: str) -> list[Path]:
    """The checkpoints of a kind, the newest last."""
    return sorted((run / "checkpoints").glob(f"{NAMES[which]}*"))
