"""Writing to disk: a file is whole or it is not there, and a write that is refused says so in a sentence.

`explained(path)` turns an `OSError` of its block into an `OperantError`; `write` replaces a file as a whole; `append`
adds one strict JSON object as a line, and `records` reads such lines. Every change to the disk goes through the one
place `operation`, so that a test can stop the process, or refuse the disk, before and after each.
"""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from operant.types import OperantError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_FOLDER = {errno.ENOTDIR, errno.ENOENT, errno.EEXIST}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.EBADF, errno.ENOTSUP}
"""What file systems say that cannot bring a folder to the disk (some of a network's): there it cannot be helped."""


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


def _nothing(when: str, operation: str, path: Path) -> None:
    pass


seam: Callable[[str, str, Path], None] = _nothing
"""Called as `seam("before" | "after", operation, path)` around whatever is done to the disk; a test puts its own here,
which may raise `OSError` (a full disk) or end the process. A rename is told by the name that comes to be."""


@contextmanager
def operation(name: str, path: str | Path) -> Iterator[None]:
    """The block does one thing to the disk: mkdir, write, append, truncate, fsync, fsync_folder, rename, remove or
    remove_tree. Whatever writes by itself (safetensors, transformers) stands in a block `operation("write", path)`.
    """
    seam("before", name, Path(path))
    try:
        yield
    except Exception as error:  # safetensors and tokenizers hide the number of the system's error in their text
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None or isinstance(error, OSError):
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
    seam("after", name, Path(path))


def write(path: str | Path, data: str | bytes) -> None:
    """Replace the file at `path` as a whole: a reader, or a crash, finds the old content or the new."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained(path):
        try:
            fill(temporary, data)
            rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                remove(temporary)
            raise
        sync_folder(path.parent)


def fill(path: str | Path, data: str | bytes) -> None:
    """Write a file and bring it to the disk, where nobody looks for it before it, or its folder, is named. Raises:
    OSError."""
    # A lone surrogate in somebody's text is no reason to lose the file.
    content = data if isinstance(data, bytes) else data.encode("utf-8", errors="replace")
    with operation("write", path):
        Path(path).write_bytes(content)
    sync(path)


def sync(path: str | Path) -> None:
    """Bring a file to the disk itself. Raises: OSError."""
    with operation("fsync", path), open(path, "r+b") as file:
        os.fsync(file.fileno())


def sync_folder(folder: str | Path) -> None:
    """Bring the names in a folder to the disk: without it a rename may be lost with the power. Raises: OSError."""
    if os.name == "nt":  # folders cannot be opened there, and renames are journalled
        return
    with operation("fsync_folder", folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise
        finally:
            os.close(descriptor)


def mkdir(path: str | Path, *, exist_ok: bool = True) -> None:
    """Make a folder and what is missing above it, and bring their names to the disk. Raises: OSError."""
    path = Path(path)
    if exist_ok and path.is_dir():
        return
    if not path.parent.is_dir():
        mkdir(path.parent)
    with operation("mkdir", path):
        path.mkdir(exist_ok=exist_ok)
    sync_folder(path.parent)


def rename(source: str | Path, target: str | Path) -> None:
    """Give a file or folder its name; a file of that name is replaced. Raises: OSError."""
    with operation("rename", target):
        os.replace(source, target)


def remove(path: str | Path) -> None:
    """Delete a file; one that is not there is no error. Raises: OSError."""
    if Path(path).exists() or Path(path).is_symlink():
        with operation("remove", path):
            Path(path).unlink(missing_ok=True)


def remove_tree(path: str | Path) -> None:
    """Delete a folder with all that is in it, of a link the link; what is not there is no error. Raises: OSError."""
    if Path(path).is_symlink() or not Path(path).is_dir():
        remove(path)
        return
    with operation("remove_tree", path):
        shutil.rmtree(path)


def put_folder(made: str | Path, path: str | Path) -> None:
    """Give a folder that is whole its name. One that stands there is `path.old` until then. Raises: OSError."""
    path = Path(path)
    aside = path.with_name(f"{path.name}.old")
    if path.exists():
        remove_tree(aside)
        rename(path, aside)
    try:
        rename(made, path)
    except OSError:
        if aside.exists():
            with suppress(OSError):
                rename(aside, path)
        raise
    sync_folder(path.parent)
    remove_tree(aside)


def truncate(path: str | Path, size: int) -> None:
    """Cut a file back to its first `size` bytes, on the disk itself. Raises: OSError."""
    with operation("truncate", path):
        os.truncate(path, size)
    sync(path)


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
    with explained(path), operation("append", path), open(path, "a", encoding="utf-8", errors="replace") as file:
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
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise OperantError(f"{path}, line {number} is no JSON ({error}); delete that line") from error
            continue
        if not isinstance(record, dict) or type(record.get("step", 0)) is not int:
            raise OperantError(f"{path}, line {number} is no record of a step; delete that line")
        found.append(record)
    return found


def step_name(step: int, before: str = "step") -> str:
    """`step-00012`: sorts as text in the order of steps."""
    return f"{before}-{step:05d}"


def step_of(path: str | Path, before: str = "step") -> int | None:
    """The step in a name that `step_name` began; None for any other name."""
    found = re.match(rf"{before}-(\d{{1,18}})(\.\w+)?$", Path(path).name)
    return int(found[1]) if found else None
