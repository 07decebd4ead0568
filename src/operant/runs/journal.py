"""A file of lines on a disk that may refuse for a while.

journal = Journal(path)
journal.add(line)      # raises where the disk refuses; the line waits, and is written before the next one
"""

from pathlib import Path

from operant.storage import atomic_io
from operant.types import OperantError

MOST = 64 << 20
"""Characters that wait at most; past it the oldest lines are given up."""


class Journal:
    """Lines at the end of a file, whole and in order, whatever the disk does in between."""

    def __init__(self, path: Path):
        self.path = path
        self.waiting: list[str] = []
        """Lines that the disk has not taken yet."""
        self._good: int | None = None
        """Where the last whole line ends, after a write that may have left half of one."""

    def add(self, line: str) -> None:
        """Write what waits and this line. Raises: OperantError where the disk refuses; both wait then."""
        self.waiting.append(line)
        self.flush()

    def flush(self) -> None:
        """Write what waits. Raises: OperantError as `add`."""
        if not self.waiting:
            return
        try:
            self._cut()
            self._good = self.size()
            atomic_io.append_text(self.path, "".join(self.waiting))
        except OperantError:
            self._give_up()
            raise
        self.waiting.clear()
        self._good = None

    def size(self) -> int:
        """Bytes of the file; 0 where there is none."""
        return self.path.stat().st_size if self.path.exists() else 0

    def _cut(self) -> None:
        """Take away the half line that a refused write left."""
        if self._good is not None and self.size() > self._good:
            with atomic_io.explained(self.path):
                atomic_io.truncate(self.path, self._good)

    def _give_up(self) -> None:
        while sum(map(len, self.waiting)) > MOST:
            self.waiting.pop(0)
