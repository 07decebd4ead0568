"""The database of items and labels: one SQLite file, for the server, for programs, and for several of each at once.

    store = Store("replies.labels.sqlite", kind="pick")
    store.add_items([Item("12", "2 + 2 =", ("4", "5"))])
    store.wait(["12"], timeout=600)      # {"12": [Label(labeller="anna", answer={"best": 0}, ...)]}

A label is on the disk before `add_label` returns. Rows of labels are only ever added: a second label of the same
labeller replaces the first, and an undo withdraws it, but both stay in the history.
"""

import hashlib
import json
import os
import random
import secrets
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from operant.tools.labels.items import IMPORT, KINDS, Item, checked_answer, name_of_labeller, now
from operant.tools.report.diagnosis.history import counted
from operant.types import OperantError, require, shown

VERSION = 1
APPLICATION = 0x6F706C62
"""Marks a database as one of labels, among all SQLite files."""
BUSY_SECONDS = 30.0
"""How long a write waits for another process that is writing."""
SHOWN_SECONDS = 300.0
"""How long an item that a labeller sees counts as if it were labelled, so that others get another one."""
SCHEMA, FREE = ((Path(__file__).parent / name).read_text(encoding="utf-8") for name in ("schema.sql", "free.sql"))
"""The tables; and before a query, the items `free` for a labeller: open, not labelled or skipped by them, and with less
than `overlap` other labellers."""


@dataclass(frozen=True)
class Label:
    """One answer of one labeller to one item, in the order of the item's replies."""

    number: int
    item: str
    """The id of the item."""
    labeller: str
    answer: Mapping[str, Any]
    """One of `best`, `ranks`, `ratings` and `good`, and maybe `all_bad` and `comment` (`labels.items`)."""
    time: float
    """Unix time in seconds."""
    seconds: float | None = None
    """How long the labeller looked at the item; None: not known."""
    action: str = "label"
    """`label`, or in the history also `skip` and `undo`, whose answers are empty."""


@dataclass(frozen=True)
class LabellerProgress:
    """How far a labeller has come."""

    done: int
    left: int
    seconds_left: float | None
    """The time that the rest will take by the median of the last 20 labels, in seconds; None: not known yet."""


class BusyError(OperantError):
    """The database cannot be used now, such as on a full disk; the same may succeed later."""


class Store:
    """The items and labels of one database file, which is created if there is none.

    kind: pick, rank, rate or good; overlap: how many people label an item. None: as the file says, else pick and 2.
    The methods may be called from any thread.
    """

    def __init__(self, path: str | Path, *, kind: str | None = None, overlap: int | None = None, create: bool = True):
        self.path, self._lock = Path(path), threading.RLock()
        require(kind is None or kind in KINDS, f"kind={shown(kind)}: it must be {', '.join(KINDS)}")
        if overlap is not None and overlap < 1:
            raise OperantError(f"overlap={overlap}: it must be at least 1, the number of people who label an item")
        if not self.path.exists():
            how = "operant label replies.jsonl makes one, and --kind pick an empty one that a run fills"
            require(create, f"there is no database {self.path}; {how}")
            try:  # readable by its owner alone: it will hold the token of the page
                with suppress(FileExistsError):
                    os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
            except OSError as error:
                why = (error.strerror or str(error)).lower()
                raise OperantError(f"cannot write {self.path}: {why}; choose another place for the database") from error
        with self._explained():
            self._connection = sqlite3.connect(
                self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare(kind, overlap)
            except BaseException:
                self._connection.close()
                raise

    def _prepare(self, kind: str | None, overlap: int | None) -> None:
        self._connection.execute("PRAGMA foreign_keys = ON")
        self._connection.execute("PRAGMA synchronous = FULL")
        version, application = (self._value(f"PRAGMA {name}") for name in ("user_version", "application_id"))
        tables = self._value("SELECT count(*) FROM sqlite_master")
        if tables and application != APPLICATION:
            raise OperantError(f"{self.path} is a database of something else; choose another file")
        if tables and version != VERSION:
            other = f"a database of labels of version {version}, and this operant reads version {VERSION}"
            how = "use the operant that wrote it, or export its labels there and import them here"
            raise OperantError(f"{self.path} is {other}: {how}")
        self._connection.execute("PRAGMA journal_mode = WAL")
        with self._writing():
            if not self._value("SELECT count(*) FROM sqlite_master"):
                for statement in SCHEMA.strip().split(";\n"):
                    self._connection.execute(statement.rstrip(";"))
                self._connection.execute(f"PRAGMA user_version = {VERSION}")
                self._connection.execute(f"PRAGMA application_id = {APPLICATION}")
                defaults = {"kind": "pick", "overlap": "2", "token": secrets.token_urlsafe(18), "port": "0"}
                self._connection.executemany("INSERT INTO settings VALUES (?, ?)", defaults.items())
            people = self._value(f"SELECT count(*) FROM labels WHERE action = 'label' AND labeller != '{IMPORT}'")
            if kind not in (None, self.setting("kind")) and people:
                held = f"{counted(people, 'label')} of kind {self.setting('kind')}"
                raise OperantError(f"{self.path} holds {held}, so kind {kind} needs another file")
            for name, value in (("kind", kind), ("overlap", overlap)):
                if value is not None:
                    self.set(name, str(value))

    @property
    def kind(self) -> str:
        return self.setting("kind")

    def setting(self, name: str) -> str:
        return self._value("SELECT value FROM settings WHERE name = ?", name)

    def set(self, name: str, value: str) -> None:
        with self._writing():
            self._connection.execute("UPDATE settings SET value = ? WHERE name = ?", (value, name))

    def add_items(self, items: Iterable[Item], *, gold: bool = False) -> int:
        """Add items with the labels that came with them, all or none; returns how many are new.

        Items that are there already stay as they are. gold: the label of each item is its known answer, and every
        labeller gets all of them among the others.
        """
        new = 0
        with self._writing():
            for item in items:
                if len(item.replies) < 2 and self.kind in ("pick", "rank"):
                    raise OperantError(f"item {shown(item.id)} has one reply, and --kind {self.kind} needs two; "
                                       "use --kind good or rate")  # fmt: skip
                one = f"one of {', '.join(KINDS.values())}, or chosen and rejected"
                require(not gold or item.given, f"gold item {shown(item.id)} has no answer: give it {one}")
                row = self._row("SELECT number, content FROM items WHERE id = ?", item.id)
                if row is not None and row["content"] != item.content():
                    how = "give the new ones another id, or choose another file"
                    raise OperantError(f"the id {shown(item.id)} has other replies in {self.path}; {how}")
                if row is not None:  # it is added again because labels are wanted
                    self._connection.execute("UPDATE items SET closed = NULL WHERE id = ?", (item.id,))
                else:
                    new += 1
                    values = (item.id, item.content(), json.dumps(item.sources), now())
                    self._connection.execute("INSERT INTO items (id, content, sources, added) VALUES (?,?,?,?)", values)
                if gold:
                    known = json.dumps(item.given[-1].answer)
                    self._connection.execute("UPDATE items SET gold = ? WHERE id = ?", (known, item.id))
                for label in () if gold else item.given:  # once, however often a file is read
                    content = json.dumps([item.id, asdict(label)], sort_keys=True)
                    key = "import " + hashlib.sha256(content.encode()).hexdigest()
                    self.add_label(item.id, label.labeller, label.answer, key=key, at=label.time)
        return new

    def item(self, item_id: str) -> Item:
        row = self._row("SELECT * FROM items WHERE id = ?", item_id)
        require(row is not None, f"{self.path} has no item {shown(item_id)}; add it with add_items")
        prompt, replies = json.loads(row["content"])
        return Item(item_id, prompt, tuple(replies), tuple(json.loads(row["sources"])))

    def number_of(self, item_id: str) -> int:
        return self._value("SELECT number FROM items WHERE id = ?", item_id)

    def item_of(self, number: object) -> Item:
        found = self._value("SELECT id FROM items WHERE number = ?", number if type(number) is int else -1)
        require(found is not None, f"{self.path} has no item number {shown(number)}; load the page again")
        return self.item(found)

    def counts(self) -> dict[str, int]:
        query = f"""SELECT (SELECT count(*) FROM items) AS items,
          (SELECT count(*) FROM items WHERE gold IS NOT NULL) AS gold,
          (SELECT count(*) FROM current WHERE action = 'label') AS labels,
          (SELECT count(DISTINCT labeller) FROM current WHERE labeller != '{IMPORT}') AS labellers"""
        return dict(self._row(query) or {})

    def close_items(self, ids: Iterable[str]) -> None:
        """Show these items to nobody any more. A label that is already being given is still accepted."""
        with self._writing():
            rows = [(now(), item_id) for item_id in ids]
            self._connection.executemany("UPDATE items SET closed = ? WHERE id = ? AND closed IS NULL", rows)

    def gold(self) -> dict[str, Mapping[str, object]]:
        rows = self._rows("SELECT id, gold FROM items WHERE gold IS NOT NULL")
        return {row["id"]: json.loads(row["gold"]) for row in rows}

    def add_label(
        self,
        item_id: str,
        labeller: str,
        answer: Mapping[str, object] | None,
        *,
        seconds: float | None = None,
        key: str | None = None,
        at: float | None = None,
    ) -> Label:
        """Store an answer, or with None a skip; it is on the disk when this returns.

        An earlier label of the same labeller is replaced. key: a text that no other label has; a label that arrives
        twice with one key is stored once. at: its Unix time in seconds, of now by default.
        Raises: OperantError for an unknown item, a wrong name, or an answer that does not fit the replies.
        """
        labeller, count = name_of_labeller(labeller), len(self.item(item_id).replies)
        text = None if answer is None else json.dumps(checked_answer(answer, count, f"item {shown(item_id)}"))
        key = key or secrets.token_hex(16)
        with self._writing():
            self._connection.execute(
                "INSERT INTO labels (item, labeller, action, answer, seconds, time, key) "
                "SELECT number, ?, ?, ?, ?, ?, ? FROM items WHERE id = ? ON CONFLICT (key) DO NOTHING",
                (labeller, "skip" if answer is None else "label", text, seconds, at or now(), key, item_id),
            )
            return self._labels("SELECT * FROM labels", "key = ?", key)[0]

    def undo(self, labeller: str, number: int) -> str | None:
        """Withdraw a label or skip by its number; returns the id of its item, None if it counts no longer anyway."""
        with self._writing():
            found = self._labels("SELECT * FROM current", "number = ? AND labeller = ?", number, labeller)
            for label in found:
                self._connection.execute(
                    "INSERT INTO labels (item, labeller, action, undoes, time, key) "
                    "SELECT item, labeller, 'undo', number, ?, ? FROM labels WHERE number = ?",
                    (now(), secrets.token_hex(16), label.number),
                )
        return found[0].item if found else None

    def last(self, labeller: str) -> Label | None:
        found = self._labels("SELECT * FROM current", "labeller = ? ORDER BY number DESC LIMIT 1", labeller)
        return found[0] if found else None

    def labels(self) -> list[Label]:
        """Every label that counts: of each labeller of an item the last one, if it is not withdrawn."""
        return self._labels("SELECT * FROM current", "action = 'label' ORDER BY number")

    def labels_of(self, item_id: str) -> list[Label]:
        number = "(SELECT number FROM items WHERE id = ?)"
        newest = f"(SELECT max(number) FROM labels WHERE item = {number} GROUP BY labeller)"
        return self._labels("SELECT * FROM labels", f"number IN {newest} AND action = 'label' ORDER BY number", item_id)

    def skipped(self) -> list[Label]:
        return self._labels("SELECT * FROM current", "action = 'skip' ORDER BY number")

    def history(self) -> list[Label]:
        """Everything that labellers did, in order: also labels that were replaced or withdrawn, skips and undos."""
        return self._labels("SELECT * FROM labels", "1 ORDER BY number")

    def wait(
        self, ids: Collection[str], *, count: int = 1, timeout: float | None = None, poll: float = 0.3
    ) -> dict[str, list[Label]]:
        """Wait until `count` people have labelled or skipped each item, or `timeout` seconds; returns what there is.

        The labels may come from a server in this process or another one. poll: seconds between two looks.
        """
        end, seen = None if timeout is None else time.monotonic() + timeout, None
        while True:
            version = (self._value("PRAGMA data_version"), self._connection.total_changes)
            if version != seen:
                seen, found = version, {item_id: self.labels_of(item_id) for item_id in ids}
                if not self.lacking(ids, count):
                    return found
            if end is not None and time.monotonic() >= end:
                return found
            time.sleep(poll if end is None else max(0.0, min(poll, end - time.monotonic())))

    def lacking(self, ids: Collection[str], count: int) -> list[str]:
        skips = Counter(label.item for label in self.skipped())
        return [item_id for item_id in ids if len(self.labels_of(item_id)) + skips[item_id] < count]

    def next_item(self, labeller: str) -> str | None:
        """The id of the item that a labeller should see now, which is then reserved for five minutes; None: no item.

        It is the one that they saw last, if they have not answered it; else the first of the file that needs another
        labeller. Gold items come in between, spread evenly, at places of the labeller's own.
        """
        with self._writing():
            about = self._about(labeller)
            free = f"{FREE} SELECT s.item FROM shown s JOIN items i ON s.item = i.number WHERE s.labeller = :name AND "
            free += "s.time > :since AND i.closed IS NULL AND s.item NOT IN (SELECT item FROM mine) AND "
            free += "(i.gold IS NOT NULL OR s.item IN (SELECT number FROM free)) ORDER BY s.time DESC LIMIT 1"
            first = f"{FREE} SELECT min(number) FROM free"
            number = self._value(free, about) or self.due_gold(labeller) or self._value(first, about)
            if number is None:
                return None
            self._connection.execute("INSERT OR REPLACE INTO shown VALUES (?, ?, ?)", (number, labeller, now()))
            return self._value("SELECT id FROM items WHERE number = ?", number)

    def show(self, item_id: str, labeller: str) -> None:
        with self._writing():
            values = (labeller, now(), item_id)
            self._connection.execute("INSERT OR REPLACE INTO shown SELECT number, ?, ? FROM items WHERE id = ?", values)

    def _about(self, labeller: str) -> dict[str, object]:
        return {"name": labeller, "since": now() - SHOWN_SECONDS, "overlap": int(self.setting("overlap"))}

    def due_gold(self, labeller: str) -> int | None:
        """The number of a gold item, if so much of the others is done that the next one should come."""
        query = "SELECT number, number IN (SELECT item FROM current WHERE labeller = ?) AS done FROM items WHERE gold "
        gold = self._rows(query + "IS NOT NULL AND closed IS NULL ORDER BY number", labeller)
        waiting = [row["number"] for row in gold if not row["done"]]
        if not waiting:
            return None
        others = (
            "SELECT count(*) FROM current WHERE labeller = ? AND item IN (SELECT number FROM items WHERE gold IS NULL)"
        )
        done, behind = self._value(others, labeller), len(gold) - len(waiting)
        left = self._value(f"{FREE} SELECT count(*) FROM free", self._about(labeller))
        chance = random.Random(f"{labeller}/{behind}")
        due = (behind + chance.random()) * (done + left) / len(gold)
        return chance.choice(waiting) if due <= done or not left else None

    def progress(self, labeller: str) -> LabellerProgress:
        """How many items a labeller has answered or skipped, how many are left for them, and the time these take."""
        done = self._value("SELECT count(*) FROM current WHERE labeller = ?", labeller)
        gold = "SELECT count(*) FROM items WHERE gold IS NOT NULL AND closed IS NULL "
        gold += "AND number NOT IN (SELECT item FROM mine)"
        left = self._value(f"{FREE} SELECT (SELECT count(*) FROM free) + ({gold})", self._about(labeller))
        newest = "SELECT seconds FROM current WHERE labeller = ? AND seconds IS NOT NULL ORDER BY number DESC LIMIT 20"
        rows = self._rows(newest, labeller)
        seconds = median(row["seconds"] for row in rows) * left if rows else None
        return LabellerProgress(done, left, seconds)

    def close(self) -> None:
        with self._lock, suppress(sqlite3.Error):
            self._connection.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise BusyError(
                f"{self.path} cannot be used ({error}): another process may be writing to it, or the disk is full or "
                "read-only; nothing that was stored is lost"
            ) from error
        except sqlite3.DatabaseError as error:
            raise OperantError(f"{self.path} is no database of labels ({error}); choose another file") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction, also around others; at its end everything is on the disk, or nothing after an error."""
        with self._lock, self._explained():
            if self._connection.in_transaction:
                yield
                return
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise

    def _rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        """The rows of a query, whose values are given one by one, or by name as one dict."""
        given = values[0] if len(values) == 1 and isinstance(values[0], dict) else values
        with self._lock, self._explained(), closing(self._connection.cursor()) as cursor:
            cursor.row_factory = sqlite3.Row
            return cursor.execute(query, given).fetchall()

    def _row(self, query: str, *values: object) -> sqlite3.Row | None:
        return next(iter(self._rows(query, *values)), None)

    def _value(self, query: str, *values: object) -> Any:
        row = self._row(query, *values)
        return None if row is None else row[0]

    def _labels(self, select: str, where: str, *values: object) -> list[Label]:
        query = f"SELECT l.*, i.id FROM ({select} WHERE {where}) l JOIN items i ON l.item = i.number ORDER BY l.number"
        names: Sequence[str] = ("number", "labeller", "time", "seconds", "action")
        return [
            Label(item=row["id"], answer=json.loads(row["answer"] or "{}"), **{name: row[name] for name in names})
            for row in self._rows(query, *values)
        ]
