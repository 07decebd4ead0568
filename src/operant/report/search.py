"""Every reply of a run in memory, without its tokens' numbers: searched, sorted and cut into pages.

    index = Index("runs/sentiment")
    index.find(search="great", sort="reward", limit=20)["rows"]

Each question first looks which files are new, changed or gone, so the answers follow a run that goes on.
"""

import threading
from pathlib import Path
from typing import Any

from operant.report import parquet
from operant.report.replies import Reader, plain
from operant.types import OperantError

SORTS = ("step", "reward", "kl", "reply_tokens", "end")
MOST = 500
"""Rows of an answer."""
_SHOWN = ("step", "row", "query", "reply", "reward", "kl", "reply_tokens", "end")


class Index:
    """The replies below `folder/rollouts`. Many threads may ask at once."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder) / "rollouts"
        self._lock = threading.Lock()
        self._stamps: dict[int, parquet.Stamp] = {}
        self._tables: dict[int, Any] = {}
        self._notes: dict[int, list[str]] = {}
        self._whole: Any = None

    def find(
        self,
        search: str = "",
        sort: str = "step",
        descending: bool = True,
        step: int | None = None,
        offset: int = 0,
        limit: int = 50,
    ) -> dict[str, Any]:
        """Replies whose query or reply holds `search` in any case; rows without a number come last in either order.

        `total`: how many were found; `exist`: steps and replies that there are; `steps`: which; `rows`: from `offset`,
        one mapping a reply; `notes`: files that could not be read. Raises: OperantError for a sort or limit it lacks.
        """
        if sort not in SORTS:
            raise OperantError(f"sort={sort!r}: it must be one of {', '.join(SORTS)}")
        if offset < 0 or not 1 <= limit <= MOST:
            raise OperantError(f"offset={offset}, limit={limit}: offset must be at least 0, limit 1 to {MOST}")
        whole, steps, notes = self._now()
        found = None if whole is None else _matching(whole, search, step)
        order = [] if found is None else _order(found, sort, descending)
        return {
            "total": len(order),
            "exist": {"steps": len(steps), "replies": 0 if whole is None else whole.num_rows},
            "steps": steps,
            "rows": [] if found is None else _page(found.take(order[offset : offset + limit])),
            "notes": notes,
        }

    def _now(self) -> tuple[Any, list[int], list[str]]:
        """Everything as one table, its steps and what could not be read, as the folder stands now."""
        with self._lock:
            if self._refresh():
                self._whole = _joined(self._tables)
            return self._whole, list(self._tables), [note for notes in self._notes.values() for note in notes]

    def _refresh(self) -> bool:
        """Read what is new or changed, forget what is gone. Returns whether there was anything."""
        paths = parquet.steps(self._folder)
        stamps = {step: stamp for step, path in paths.items() if (stamp := parquet.stamp(path)) is not None}
        gone = self._stamps.keys() - stamps.keys()
        new = [step for step, stamp in stamps.items() if self._stamps.get(step) != stamp]
        for step in (*gone, *new):
            self._tables.pop(step, None)
            self._notes.pop(step, None)
        for step in new:
            read = Reader()
            if (table := read(parquet.lines, paths[step])) is not None:
                self._tables[step] = table
            self._notes[step] = read.notes
        self._stamps = stamps
        self._tables = dict(sorted(self._tables.items()))
        return bool(gone or new)


def _joined(tables: dict[int, Any]) -> Any:
    import pyarrow as pa

    pc = parquet.compute()
    parts = []
    for step, table in tables.items():
        text = pc.utf8_lower(pc.binary_join_element_wise(table["query"], table["reply"], "\n", null_handling="replace"))
        steps = pa.array([step] * table.num_rows, pa.int64())
        parts.append(table.append_column("step", steps).append_column("text", text))
    return pa.concat_tables(parts, promote_options="default").combine_chunks() if parts else None


def _matching(whole: Any, search: str, step: int | None) -> Any:
    pc = parquet.compute()
    if step is not None:
        whole = whole.filter(pc.equal(whole["step"], step))
    if search:
        whole = whole.filter(pc.match_substring(whole["text"], search.lower()))
    return whole


def _order(found: Any, sort: str, descending: bool) -> Any:
    """Places in order: by the column, then the newest step, then as they came."""
    way = "descending" if descending else "ascending"
    keys = [(sort, way), *([("step", "descending")] if sort != "step" else []), ("row", "ascending")]
    return parquet.compute().sort_indices(found, sort_keys=keys)  # nulls come last


def _page(rows: Any) -> list[dict[str, Any]]:
    parts = sorted(name for name in rows.column_names if name.startswith("reward/"))
    names = [*_SHOWN, *(parts if len(parts) > 1 else ())]
    return [{name: plain(value) for name, value in row.items()} for row in rows.select(names).to_pylist()]
