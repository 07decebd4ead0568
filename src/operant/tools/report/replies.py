"""Selects the replies that a report embeds, and finds any of them for the live page.

    data = embedded("runs/sentiment")
    data["summary"]    "50 of 128 replies per step are embedded; `operant report runs/sentiment --serve` shows all."
    Index("runs/sentiment").find(search="great", sort="reward", limit=20)["rows"]

Embedded are the probes, and of the others at most 50 replies per step and 5,000 in all, evenly over the steps, always
with the first and the newest step. Their JSON stays under a budget of bytes: where replies are long, fewer are
embedded, and the newest have priority for the numbers of their tokens.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, TypeVar

from operant.tools.report import parquet
from operant.tools.report.downsample import short
from operant.tools.report.html import fitting, size, spread
from operant.types import OperantError, require

if TYPE_CHECKING:
    import pyarrow as pa

MOST_PER_STEP, MOST_IN_ALL = 50, 5_000
FEWEST_PER_STEP = 10
"""Rather than embed fewer replies of each step, steps are left out."""
BUDGET = 5_000_000
"""Bytes of JSON."""
MOST_NOTES = 20
_TEXT_SHARE = 0.3
"""Share of the budget for the texts of the probes, and the same for those of the other replies."""
_COLUMNS = ("row", "query", "reply", "reward", "kl", "reply_tokens", "end")

SORTS = ("step", "reward", "kl", "reply_tokens", "end", "outcome")
MOST_FOUND = 500
"""Most rows of one answer."""
_SHOWN = ("step", "row", "query", "reply", "reward", "kl", "reply_tokens", "end", "outcome", "message")

Found = TypeVar("Found")
Columns = dict[str, list]


class Reader:
    """Reads files of a run and collects a note about each file that it cannot read."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def __call__(self, read: Callable[..., Found], path: Path, *arguments: object) -> Found | None:
        """Return `read(path, *arguments)`; None where the file is damaged or has been removed."""
        try:
            return read(path, *arguments)
        except (FileNotFoundError, IndexError):
            return None
        except OperantError as error:
            if str(error) not in self.notes and len(self.notes) < MOST_NOTES:
                self.notes.append(str(error))
            return None


def embedded(folder: str | Path, budget: int = BUDGET) -> Mapping[str, object]:
    """Select the replies that the page of a run folder embeds, in at most `budget` bytes of JSON.

    `probes`: as `probes` returns them, with `token_columns` on the sides that fit. `replies`: `rows`, one list per
    column in the order of steps, and `token_chunks`, each with the `token_columns` of consecutive rows from row
    `first`. `available`: numbers of steps and replies in the folder. `summary`: a sentence about how many of them are
    embedded. `notes`: files that could not be read.
    """
    folder, read = Path(folder), Reader()
    paths = parquet.steps(folder / "rollouts")
    tables = {step: read(parquet.lines, paths[step]) for step in spread(list(paths), MOST_IN_ALL // FEWEST_PER_STEP)}
    tables = {step: table for step, table in tables.items() if table is not None}
    text_budget = budget * _TEXT_SHARE
    found_probes = fitting(lambda n: probes(folder, read, n), len(parquet.steps(folder / "probes")), text_budget)
    rows = fitting(lambda n: _sample(tables, n), MOST_IN_ALL, text_budget)
    counts = [tables[step].num_rows if step in tables else read(parquet.count, path) for step, path in paths.items()]
    available = {"steps": len(paths), "replies": sum(filter(None, counts))}
    data = {"probes": found_probes, "replies": {"rows": rows, "token_chunks": []}, "available": available}
    data |= {"summary": "", "notes": read.notes}
    with_tokens = _add_tokens(data, folder, read, budget - 2_000)
    data["summary"] = _summary(data, with_tokens, quote(str(folder)))
    return data


def probes(folder: Path, read: Reader, most: int | None = None) -> dict[str, Any] | None:
    """Collect the answers to the probe prompts by the policy at several steps and by the reference model.

    `queries`: task and query of each. `steps`, and `policy`: one side per step. `reference`: a side, or None. A side
    has one list per column with one entry per query, None where it has no answer.
    most: number of steps, evenly spaced; None: all. Returns None where the policy has not answered any probes.
    """
    paths = parquet.steps(folder / "probes")
    selected = list(paths) if most is None else spread(list(paths), most)
    tables = {step: table for step in selected if (table := read(parquet.lines, paths[step])) is not None}
    reference_table = read(parquet.lines, folder / "probes" / "reference.parquet")
    if not tables:
        return None
    answers = {step: last_replies(table) for step, table in tables.items()}
    reference = None if reference_table is None else last_replies(reference_table)
    queries = {task: row["query"] for side in (*answers.values(), reference or {}) for task, row in side.items()}
    return {
        "queries": [{"task": task, "query": query} for task, query in queries.items()],
        "steps": list(answers),
        "policy": [_side(side, list(queries)) for side in answers.values()],
        "reference": None if reference is None else _side(reference, list(queries)),
    }


def last_replies(table: "pa.Table") -> dict[str, dict[str, object]]:
    answers: dict[str, dict[str, object]] = {}
    for row in table.to_pylist():
        known = answers.get(row["task"])
        if known is None or known["rollout"] == row["rollout"]:
            answers[row["task"]] = row
    return answers


def _side(answers: Mapping[str, Mapping[str, object]], tasks: Sequence[str]) -> Columns:
    names = [name for name in _COLUMNS if name != "query"]
    return {name: [short(answers[task][name]) if task in answers else None for task in tasks] for name in names}


def _sample(tables: Mapping[int, "pa.Table"], most: int) -> Columns:
    steps = spread(list(tables), max(min(most, 2), most // FEWEST_PER_STEP))
    per_step = min(MOST_PER_STEP, most // len(steps)) if steps else 0
    parts = sorted({name for step in steps for name in tables[step].column_names if name.startswith("reward/")})
    columns = [(name, tables[step][name]) for name in ("outcome", "message") for step in steps]
    said = dict.fromkeys(name for name, column in columns if column.null_count < len(column))
    rows: Columns = {name: [] for name in ("step", *_COLUMNS, *said, *(parts if len(parts) > 1 else ()))}
    for step in steps:
        table = tables[step]
        n = min(per_step, table.num_rows)
        for row in table.take([i * table.num_rows // n for i in range(n)]).to_pylist():
            for name, column in rows.items():
                column.append(step if name == "step" else short(row.get(name)))
    return rows


def _add_tokens(data: dict[str, Any], folder: Path, read: Reader, budget: int) -> int:
    """Embed the tokens that fit into the budget of bytes; returns how many rows of `replies` have them."""
    budget -= size(data)
    # (Probe side or chunk of replies to add tokens to, its file, rows of the file): first the newest probes and the
    # reference's, then the newest and the first replies, then the others.
    found, replies, sides, chunks = data["probes"], data["replies"]["rows"], [], []
    if found:
        paths = parquet.steps(folder / "probes")
        sides = [(side, paths[step], side["row"]) for step, side in zip(found["steps"], found["policy"])][::-1]
        if found["reference"]:
            sides.insert(1, (found["reference"], folder / "probes" / "reference.parquet", found["reference"]["row"]))
    paths = parquet.steps(folder / "rollouts")
    for step in dict.fromkeys(reversed(replies["step"])):
        first, n = replies["step"].index(step), replies["step"].count(step)
        chunks.append(({"first": first}, paths.get(step, folder), replies["row"][first : first + n]))
    targets = [*sides[:2], *chunks[:1], *chunks[-1:][: len(chunks) - 1], *sides[2:], *chunks[1:-1]]
    for target, path, rows in targets:
        known = read(parquet.tokens, path, [row for row in rows if row is not None])
        if known is None or not any(row["tokens"] for row in known):
            continue
        remaining = iter(known)
        aligned = [None if row is None else next(remaining) for row in rows]
        columns = {n: [r and r[n] for r in aligned] for n in known[0] if any(row[n] is not None for row in known)}
        budget -= size(columns) + 40
        if budget < 0:
            break
        target["token_columns"] = columns
    filled = [chunk for chunk, _, _ in chunks if "token_columns" in chunk]
    data["replies"]["token_chunks"] = sorted(filled, key=lambda chunk: chunk["first"])
    return sum(len(chunk["token_columns"]["tokens"]) for chunk in filled)


def _summary(data: dict[str, Any], with_tokens: int, run: str) -> str:
    """Say how many of the run's replies the page embeds, and how many of those have the numbers of their tokens."""
    rows, available = data["replies"]["rows"]["step"], data["available"]
    if not available["replies"]:
        return "No replies have been recorded yet."
    steps = len(set(rows))
    if len(rows) == available["replies"]:
        text = f"All {len(rows):,} replies are embedded" if len(rows) > 1 else "The only reply is embedded"
    elif steps == available["steps"] and not len(rows) % steps and not available["replies"] % steps:
        text = f"{len(rows) // steps} of {available['replies'] // steps} replies per step are embedded"
    else:
        text = f"{len(rows):,} of {available['replies']:,} replies are embedded, "
        text += f"from {steps:,} of {available['steps']:,} steps"
    if 0 < with_tokens < len(rows):
        text += f", {with_tokens:,} of them with the numbers of every token"
    complete = len(rows) == available["replies"] and with_tokens in (0, len(rows))
    return text + ("." if complete else f"; `operant report {run} --serve` shows all.")


class Index:
    """Every reply of a run in memory, without its tokens, to search, sort and page through them.

    Each query first reads the files that are new or have changed, so the answers follow a run in progress. It may be
    queried from several threads.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder) / "rollouts"
        self._lock = threading.Lock()
        self._files: dict[int, tuple[parquet.Stamp, pa.Table | None, list[str]]] = {}
        """By step: the stamp of the file, its table (None where it cannot be read), and notes about it."""
        self._joined: pa.Table | None = None

    def find(
        self,
        search: str = "",
        sort: str = "step",
        descending: bool = True,
        step: int | None = None,
        offset: int = 0,
        limit: int = 50,
        outcome: str | None = None,
    ) -> dict[str, object]:
        """Find the replies whose query, reply or message contains `search`, ignoring case, with this outcome class.

        Equal rows are ordered by step, newest first, then as in the file; rows without a value of `sort` come last.
        Returns `total`: number of replies found; `available`: numbers of steps and replies of the run; `steps`: the
        steps; `outcomes`: the outcome classes of the run; `rows`: one mapping per reply, from `offset`; `notes`: files
        that could not be read.
        """
        require(sort in SORTS, f"sort={sort!r}: it must be one of {', '.join(SORTS)}")
        if offset < 0 or not 1 <= limit <= MOST_FOUND:
            raise OperantError(f"offset={offset}, limit={limit}: offset must be at least 0, limit 1 to {MOST_FOUND}")
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
        rows = [{name: short(value) for name, value in row.items()} for row in page]
        return answer | {"total": found.num_rows, "rows": rows}

    def _refresh(self) -> None:
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


def _joined(tables: Mapping[int, "pa.Table"]) -> "pa.Table | None":
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
