"""Atomic writing: after a crash a file is complete or absent, and every error of the disk is explained.

`explained(path)` turns an `OSError` of its block into an `OperantError`; `write` replaces a file atomically;
`append_text` adds lines, and `records` reads lines of JSON. Every change of the disk goes through `operation`, so that
a test can kill the process, or make the disk fail, before and after each one.
"""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from operant.types import OperantError

REMEDIES = {  # by the numbers of errors
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG): "free some space there, or choose a folder on another disk",
    (errno.EROFS, errno.EACCES, errno.EPERM): "choose a folder that you may write to",
    (errno.ENOTDIR, errno.ENOENT, errno.EEXIST): "a part of it is missing or no folder: check it, or choose another",
}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.EBADF, errno.ENOTSUP}
"""Errors of file systems (some network ones) that cannot sync a folder; they are ignored."""


@contextmanager
def explained(path: str | Path, doing: str = "write") -> Iterator[None]:
    """Turn an `OSError` of the block into an `OperantError` with path, reason and remedy."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if doing == "read":
            remedy = "check that it is there and that you may read it"
        else:
            known = [text for numbers, text in REMEDIES.items() if error.errno in numbers]
            remedy = f"{[*known, 'check that disk, or choose another folder'][0]} (--out, where the command has it)"
        raise OperantError(f"cannot {doing} {path}: {reason}; {remedy}") from error


def seam(when: str, operation: str, path: Path) -> None:
    """Called as `seam("before" | "after", operation, path)` around every change of the disk. A test replaces it by a
    function that raises `OSError` (a full disk) or ends the process. The path of a rename is the new name."""


@contextmanager
def operation(name: str, path: str | Path) -> Iterator[None]:
    """The block changes the disk in one way: mkdir, write, append, truncate, fsync, fsync_folder, rename, remove or
    remove_tree. Libraries that write by themselves (safetensors, transformers) run inside `operation("write", path)`.
    """
    seam("before", name, Path(path))
    try:
        yield
    except Exception as error:  # safetensors and tokenizers report the system's error number only in the text
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None or isinstance(error, OSError):
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
    seam("after", name, Path(path))


def write(path: str | Path, data: str | bytes) -> None:
    """Replace the file at `path` atomically: a reader, also after a crash, finds the old content or the new."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained(path):
        try:
            write_and_sync(temporary, data)
            rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                remove(temporary)
            raise
        sync_folder(path.parent)


def write_and_sync(path: str | Path, data: str | bytes) -> None:
    """Write a file and sync it to the disk, not atomically: for a name that nobody reads yet. Raises: OSError."""
    # A lone surrogate in some text must not prevent the file from being written.
    content = data if isinstance(data, bytes) else data.encode("utf-8", errors="replace")
    with operation("write", path):
        Path(path).unlink(missing_ok=True)  # in an untrusted folder, it may be a link to any file of this user
        with open(path, "xb") as file:
            file.write(content)
    sync(path)


def sync(path: str | Path) -> None:
    """Sync a file to the disk. Raises: OSError."""
    with operation("fsync", path), open(path, "r+b") as file:
        os.fsync(file.fileno())


def sync_folder(folder: str | Path) -> None:
    """Sync a folder's names to the disk, without which a power cut may undo a rename. Raises: OSError."""
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
    """Create a folder and its missing parents, and sync their names to the disk. Raises: OSError."""
    path = Path(path)
    if exist_ok and path.is_dir():
        return
    if not path.parent.is_dir():
        mkdir(path.parent)
    with operation("mkdir", path):
        path.mkdir(exist_ok=exist_ok)
    sync_folder(path.parent)


def rename(source: str | Path, target: str | Path) -> None:
    """Rename a file or folder; a file at `target` is replaced. Raises: OSError."""
    with operation("rename", target):
        os.replace(source, target)


def remove(path: str | Path) -> None:
    """Delete a file, if there is one. Raises: OSError."""
    if Path(path).exists() or Path(path).is_symlink():
        with operation("remove", path):
            Path(path).unlink(missing_ok=True)


def remove_tree(path: str | Path) -> None:
    """Delete a folder and its content, or a file, if there is one; of a link, only the link. Raises: OSError."""
    if Path(path).is_symlink() or not Path(path).is_dir():
        remove(path)
        return
    with operation("remove_tree", path):
        shutil.rmtree(path)


def replace_folder(source: str | Path, path: str | Path) -> None:
    """Rename the complete folder `source` to `path`; until then, an older folder is `path.old`. Raises: OSError."""
    path = Path(path)
    old = path.with_name(f"{path.name}.old")
    if path.exists():
        remove_tree(old)
        rename(path, old)
    try:
        rename(source, path)
    except OSError:
        if old.exists():
            with suppress(OSError):
                rename(old, path)
        raise
    sync_folder(path.parent)
    remove_tree(old)


def truncate(path: str | Path, size: int) -> None:
    """Truncate a file to its first `size` bytes, and sync it. Raises: OSError."""
    with operation("truncate", path):
        os.truncate(path, size)
    sync(path)


def strict_json(record: Mapping[str, object]) -> str:
    """A record as one line of standard JSON. NaN and infinity, which JSON lacks, become null."""
    return json.dumps({key: _number(value) for key, value in record.items()}, allow_nan=False, ensure_ascii=False)


def _number(value: object) -> object:
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, Mapping):
        return {key: _number(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_number(inner) for inner in value]
    number = float(value)  # takes 0-dimensional tensors and numpy scalars too
    return number if math.isfinite(number) else None


def append_text(path: str | Path, text: str) -> None:
    """Append text to a file. It is handed to the system, so killing this process loses nothing."""
    with explained(path), operation("append", path), open(path, "a", encoding="utf-8", errors="replace") as file:
        file.write(text)


def write_rows(path: str | Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows as lines of JSON, as `write` does."""
    write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def records(path: str | Path, length: int | None = None) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object per line, or of its first `length` bytes. A last line that a crash cut
    off is left out."""
    path = Path(path)
    if not path.exists():
        return []
    with explained(path, "read"):
        lines = path.read_bytes()[:length].decode("utf-8", errors="replace").split("\n")
    lines = lines[:-1] if lines[-1] == "" else lines
    found = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise OperantError(f"{path}, line {number} is not JSON ({error}); delete that line") from error
            continue
        if not isinstance(record, dict) or type(record.get("step", 0)) is not int:
            raise OperantError(f"{path}, line {number} is not the record of a step; delete that line")
        found.append(record)
    return found


def step_name(step: int, before: str = "step") -> str:
    """`step-00012`: the order of these names as text is the order of the steps."""
    return f"{before}-{step:05d}"


def step_of(path: str | Path, before: str = "step") -> int | None:
    """The step in a name made by `step_name`, with any suffix; None for any other name."""
    found = re.match(rf"{before}-(\d{{1,18}})(\.\w+)?$", Path(path).name)
    return int(found[1]) if found else None
