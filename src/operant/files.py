"""Writing to disk: a file is whole or it is not there, and a write that is refused says so in a sentence.

`explained(path)` turns an `OSError` of its block into an `OperantError`; `write` replaces a file as a whole; `append`
adds one strict JSON object as a line, and `records` reads such lines.
"""

import errno
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from operant.types import OperantError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_FOLDER = {errno.ENOTDIR, errno.ENOENT, errno.EEXIST}


@contextmanager
def explained(path: str | Path, doing: str = "write") -> Iterator[None]:
    """Turn an `OSError` of the block into an `OperantError` with path, reason and remedy."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        remedy = "check that it is there and that you may read it" if doing == "read" else _remedy(error.errno)
        raise OperantError(f"cannot {doing} {path}: {reason}; {remedy}") from error


def _remedy(code: int | None) -> str:
    if code in _FULL:
        return "free some space there, or choose a folder on another disk with --out"
    if code in _FORBIDDEN:
        return "choose a folder that you may write to with --out"
    if code in _NO_FOLDER:
        return "a part of that path is missing or is no folder: check it, or choose another with --out"
    return "check that disk, or choose another folder with --out"


def write(path: str | Path, data: str | bytes) -> None:
    """Replace the file at `path` as a whole: a reader, or a crash, finds the old content or the new."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # A lone surrogate in somebody's text is no reason to lose the file.
    content = data if isinstance(data, bytes) else data.encode("utf-8", errors="replace")
    with explained(path):
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                sync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def sync(descriptor: int) -> None:
    """Ask the system to bring an open file to the disk itself."""
    os.fsync(descriptor)


def sync_folder(folder: str | Path) -> None:
    """Bring the names in a folder to the disk: without it a rename may be lost with the power."""
    if os.name == "nt":  # folders cannot be opened there, and renames are journalled
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def strict_json(record: Mapping[str, Any]) -> str:
    """One line of JSON that every reader accepts. NaN and infinity, which JSON lacks, become null."""
    return json.dumps({key: _number(value) for key, value in record.items()}, allow_nan=False, ensure_ascii=False)


def _number(value: Any) -> Any:
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, Mapping):
        return {key: _number(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_number(inner) for inner in value]
    number = float(value)  # takes 0-dimensional tensors and numpy scalars too
    return number if math.isfinite(number) else None


def append(path: str | Path, record: Mapping[str, Any]) -> None:
    """Add one line and hand it to the system, so that killing this process loses nothing."""
    append_text(path, strict_json(record) + "\n")


def append_text(path: str | Path, text: str) -> None:
    """Add text at the end of a file."""
    with explained(path), open(path, "a", encoding="utf-8", errors="replace") as file:
        file.write(text)


def records(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object a line. A last line that a crash tore is left out."""
    path = Path(path)
    if not path.exists():
        return []
    with explained(path, "read"), open(path, encoding="utf-8", errors="replace") as file:
        lines = file.readlines()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise OperantError(f"{path}, line {number} is no JSON ({error.msg}); delete that line") from error
    return found


def step_name(step: int) -> str:
    """`step-00012`: sorts as text in the order of steps."""
    return f"step-{step:05d}"


def step_of(path: str | Path) -> int | None:
    """The step in a name that `step_name` began; None for any other name."""
    found = re.match(r"step-(\d+)(\.\w+)?$", Path(path).name)
    return int(found[1]) if found else None
