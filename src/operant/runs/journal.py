"""Appends lines to a file, on a disk that may refuse writes for a while.

journal = Journal(path)
journal.add(line)      # raises if the disk refuses; the line then waits, and is written before the next one
"""

from pathlib import Path

from operant.storage import atomic_io
from operant.types import OperantError

MOST = 64 << 20
"""The most characters that wait; above that, the oldest lines are dropped."""


class Journal:
    """Appends lines to a file, complete and in order, even if writes fail in between."""

    def __init__(self, path: Path):
        self.path = path
        self.waiting: list[str] = []
        """Lines that could not be written yet."""
        self._good: int | None = None
        """The size of the file before a write that failed, which may have left half a line."""

    def add(self, line: str) -> None:
        """Write the waiting lines and this one. Raises: OperantError if the disk refuses; all of them then wait."""
        self.waiting.append(line)
        self.flush()

    def flush(self) -> None:
        """Write the waiting lines. Raises: OperantError if the disk refuses."""
        if not self.waiting:
            return
        try:
            if self._good is not None and self.size() > self._good:  # a failed write has left half a line
                with atomic_io.explained(self.path):
                    atomic_io.truncate(self.path, self._good)
            self._good = self.size()
            atomic_io.append_text(self.path, "".join(self.waiting))
        except OperantError:
            while sum(map(len, self.waiting)) > MOST:
                self.waiting.pop(0)
            raise
        self.waiting.clear()
        self._good = None

    def size(self) -> int:
        """Size of the file in bytes; 0 if it does not exist."""
        return self.path.stat().st_size if self.path.exists() else 0
