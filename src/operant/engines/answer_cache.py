"""Answers of a model in an SQLite file, under the hashes of their requests: each is asked and paid for once."""

import json
import sqlite3
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from operant.types import OperantError

APPLICATION = 0x6F706172
"""Marks a database as one of answers, among all SQLite files."""
BUSY_SECONDS = 30.0
"""How long a write waits for another process that is writing."""
AT_ONCE = 500
"""Keys of a query: SQLite allows 999 variables in old versions."""


class AnswerCache:
    """Answers by key, in a file that several threads and processes may use at once; path None: in memory.

    The first answer to a request stays: another process that has asked the same meanwhile does not replace it.
    """

    def __init__(self, path: str | Path | None = None):
        self.path, self._lock = path, threading.Lock()
        with self.explained():
            self._connection = sqlite3.connect(
                ":memory:" if path is None else Path(path).expanduser(),
                timeout=BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
            (found,) = self._connection.execute("PRAGMA application_id").fetchone()
            (tables,) = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if tables and found != APPLICATION:
                self._connection.close()
                raise OperantError(f"completions.cache={path}: this is a database of something else; choose another")
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute(f"PRAGMA application_id = {APPLICATION}")
            self._connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")

    def known(self, keys: Collection[str]) -> dict[str, Any]:
        """The answers to those of the requests that have one."""
        listed, found = list(keys), dict[str, Any]()
        with self.explained():
            for begin in range(0, len(listed), AT_ONCE):
                some = listed[begin : begin + AT_ONCE]
                query = f"SELECT key, answer FROM answers WHERE key IN ({','.join('?' * len(some))})"
                found |= {key: json.loads(answer) for key, answer in self._connection.execute(query, some)}
        return found

    def put(self, key: str, answer: object) -> None:
        with self.explained():
            self._connection.execute("INSERT OR IGNORE INTO answers VALUES (?, ?)", (key, json.dumps(answer)))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """One thread at a time, and errors of the database as sentences."""
        try:
            with self._lock:
                yield
        except (sqlite3.Error, OSError) as error:
            raise OperantError(
                f"completions.cache={self.path} cannot be used: {error}; is it a file of this cache, in a folder that "
                "is there, on a disk with room?"
            ) from error
