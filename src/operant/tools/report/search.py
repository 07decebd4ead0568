"""Keeps every reply of a run in memory, without its tokens, to search, sort and page through them.

    index = Index("runs/sentiment")
    index.find(search="great", sort="reward", limit=20)["rows"]

Each query first reads the files that are new or have changed, so the answers follow a run in progress.
"""

import threading
from pathlib import Path
from typing import Any

from operant.tools.report import parquet
from operant.tools.report.parquet import plain
from operant.tools.report.replies import Reader
from operant.types import OperantError

SORTS = ("step", "reward", "kl", "reply_tokens", "end", "outcome")
MOST = 500
"""Most rows of one answer."""
_SHOWN = ("step", "row", "query", "reply", "reward", "kl", "reply_tokens", "end", "outcome", "message")


class Index:
    """The replies below `folder/rollouts`. It may be queried from several threads."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder) / "rollouts"
        self._lock = threading.Lock()
        self._files: dict[int, tuple[parquet.Stamp, Any, list[str]]] = {}
        """By step: the stamp of the file, its table (None where it cannot be read), and notes about it."""
        self._joined: Any = None

    def find(
        self,
        search: str = "",
        sort: str = "step",
        descending: bool = True,
        step: int | None = None,
        offset: int = 0,
        limit: int = 50,
        outcome: str | None = None,
    ) -> dict[str, Any]:
        """Find the replies whose query, reply or message contains `search`, ignoring case, with this outcome class.

        Equal rows are ordered by step, newest first, then as in the file; rows without a value of `sort` come last.
        Returns `total`: number of replies found; `available`: numbers of steps and replies of the run; `steps`: the
        steps; `outcomes`: the outcome classes of the run; `rows`: one mapping per reply, from `offset`; `notes`: files
        that could not be read.
        Raises: OperantError for a sort, offset or limit that is not allowed.
        """
        if sort not in SORTS:
            raise OperantError(f"sort={sort!r}: it must be one of {', '.join(SORTS)}")
        if offset < 0 or not 1 <= limit <= MOST:
            raise OperantError(f"offset={offset}, limit={limit}: offset must be at least 0, limit 1 to {MOST}")
        with self._lock:
            self._refresh()
            found, files = self._joined, self._files
        steps = [step for step, (_, table, _) in files.items() if table is not None]
        notes = [note for _, _, notes in files.values() for note in notes]
        available = {"steps": len(steps), "replies": 0 if found is None else found.num_rows}
        answer = {"total": 0, "available": available, "steps": steps, "rows": [], "notes": notes, "outcomes": []}
        if found is None:
            return answer
        pc = parquet.compute()
        answer["outcomes"] = sorted(pc.unique(found["outcome"]).drop_null().to_pylist())
        if outcome is not None:
            found = found.filter(pc.equal(found["outcome"], outcome))
        if step is not None:
            found = found.filter(pc.equal(found["step"], step))
        if search:
            found = found.filter(pc.match_substring(found["text"], search.lower()))
        keys = [(sort, "descending" if descending else "ascending"), ("step", "descending"), ("row", "ascending")]
        order = pc.sort_indices(found, sort_keys=keys)  # nulls come last; a repeated "step" changes nothing
        parts = sorted(name for name in found.column_names if name.startswith("reward/"))
        columns = [*_SHOWN, *(parts if len(parts) > 1 else ())]
        page = found.select(columns).take(order[offset : offset + limit]).to_pylist()
        rows = [{name: plain(value) for name, value in row.items()} for row in page]
        return answer | {"total": found.num_rows, "rows": rows}

    def _refresh(self) -> None:
        """Read the files that are new or have changed, and drop those that are gone."""
        files = {}
        for step, path in parquet.steps(self._folder).items():
            stamp, file = parquet.stamp(path), self._files.get(step)
            if stamp is None:  # removed meanwhile
                continue
            if file is None or file[0] != stamp:
                read = Reader()
                file = stamp, read(parquet.lines, path), read.notes
            files[step] = file
        if {step: file[0] for step, file in files.items()} != {step: file[0] for step, file in self._files.items()}:
            self._joined = _joined({step: table for step, (_, table, _) in files.items() if table is not None})
        self._files = files


def _joined(tables: dict[int, Any]) -> Any:
    """All replies as one table, with their step and the lower-case text to search in; None without replies."""
    import pyarrow as pa

    pc = parquet.compute()
    parts = []
    for step, table in tables.items():
        texts = [table[name] for name in ("query", "reply", "message")]
        text = pc.utf8_lower(pc.binary_join_element_wise(*texts, "\n", null_handling="replace"))
        steps = pa.array([step] * table.num_rows, pa.int64())
        parts.append(table.append_column("step", steps).append_column("text", text))
    return pa.concat_tables(parts, promote_options="default").combine_chunks() if parts else None
