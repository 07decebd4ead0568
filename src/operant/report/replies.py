"""What a report embeds of the replies: the probes, and a sample of the rest that keeps the page small.

    data = embedded("runs/sentiment")
    data["says"]    "50 of 128 replies a step are embedded; `operant report runs/sentiment --serve` reads all"

At most 50 replies a step and 5,000 in all, evenly over the steps, the first and the newest always among them. Their
JSON stays under a budget of bytes: where replies are long, fewer are taken, and the newest keep their tokens' numbers.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from operant.report import parquet
from operant.report.html import as_json
from operant.types import OperantError

A_STEP, IN_ALL, FEWEST = 50, 5_000, 10
"""Replies of a step; replies of a page; fewer than this of a step, and steps are left out instead."""
BUDGET = 5_000_000
"""Bytes of JSON."""
NOTES = 20
_TEXTS = 0.3
"""Share of the budget that the texts of the probes may take, and those of the replies."""
_LINE = ("row", "query", "reply", "reward", "kl", "reply_tokens", "end")

Columns = dict[str, list]


class Reader:
    """Reads files of a run and keeps a sentence about each that it cannot read."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def __call__(self, read: Callable, path: Path, *arguments: Any) -> Any:
        """What `read` makes of the file; None where it is damaged or was removed meanwhile."""
        try:
            return read(path, *arguments)
        except (FileNotFoundError, IndexError):
            return None
        except OperantError as error:
            if str(error) not in self.notes and len(self.notes) < NOTES:
                self.notes.append(str(error))
            return None


def embedded(folder: str | Path, budget: int = BUDGET) -> dict[str, Any]:
    """What the page of a run folder holds of its replies, as JSON's types, in at most `budget` bytes of JSON.

    `probes`: as `probes` makes them, and `of_tokens` on the sides that found room for it. `replies`: `rows`, one list a
    column, in the order of steps, and `of_tokens`, which goes on for some from row `first` with one list a reply.
    `exist`: how many steps and replies there are. `says`: what was left out. `notes`: what could not be read.
    """
    folder, read = Path(folder), Reader()
    paths = parquet.steps(folder / "rollouts")
    tables = {step: read(parquet.lines, paths[step]) for step in spread(list(paths), IN_ALL // FEWEST)}
    tables = {step: table for step, table in tables.items() if table is not None}
    asked = _fitting(lambda n: probes(folder, read, n), len(parquet.steps(folder / "probes")), budget * _TEXTS)
    rows = _fitting(lambda n: _sample(tables, n), IN_ALL, budget * _TEXTS)
    counts = {step: table.num_rows for step, table in tables.items()}
    counts = {step: counts.get(step) or read(parquet.count, path) for step, path in paths.items()}
    exist = {"steps": len(paths), "replies": sum(filter(None, counts.values()))}
    data = {
        "probes": asked,
        "replies": {"rows": rows, "of_tokens": []},
        "exist": exist,
        "says": "",
        "notes": read.notes,
    }
    seen = _add_tokens(data, folder, read, budget - 2_000)
    data["says"] = _sentence(data, seen, str(folder))
    return data


def probes(folder: Path, read: Reader, most: int | None = None) -> dict[str, Any] | None:
    """The same queries, answered by the policy at several steps and by the reference; None where none were asked.

    `queries`: task and query of each. `steps`, and `policy`: one side a step. `reference`: a side, or None. A side has
    one list a column with one entry a query, None where it gave no answer. most: steps, evenly; None: all.
    """
    paths = parquet.steps(folder / "probes")
    kept = list(paths) if most is None else spread(list(paths), most)
    tables = {step: table for step in kept if (table := read(parquet.lines, paths[step])) is not None}
    reference = read(parquet.lines, folder / "probes" / "reference.parquet")
    answers = {step: _answers(table) for step, table in tables.items()}
    other = None if reference is None else _answers(reference)
    queries = {task: row["query"] for side in (*answers.values(), other or {}) for task, row in side.items()}
    if not answers:
        return None
    return {
        "queries": [{"task": task, "query": query} for task, query in queries.items()],
        "steps": list(answers),
        "policy": [_side(side, list(queries)) for side in answers.values()],
        "reference": None if other is None else _side(other, list(queries)),
    }


def _answers(table: Any) -> dict[str, dict[str, Any]]:
    """The last reply of the first attempt at each task."""
    answers: dict[str, dict[str, Any]] = {}
    for row in table.to_pylist():
        known = answers.get(row["task"])
        if known is None or known["rollout"] == row["rollout"]:
            answers[row["task"]] = row
    return answers


def _side(answers: dict[str, dict[str, Any]], tasks: Sequence[str]) -> Columns:
    names = [name for name in _LINE if name != "query"]
    return {name: [plain(answers[task][name]) if task in answers else None for task in tasks] for name in names}


def plain(value: Any) -> Any:
    """A cell as JSON holds it: numbers to three decimals."""
    return parquet.rounded(value) if isinstance(value, float) else value


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, evenly, the last and the first among them: `spread("abcde", 3) == ["a", "c", "e"]`."""
    if most >= len(items):
        return list(items)
    if most < 2:
        return list(items[len(items) - most :])
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def size(data: Any) -> int:
    """Bytes that `data` takes on a page."""
    text = as_json(data)
    return len(text.encode("utf-8", errors="replace")) + 5 * text.count("<")


def _fitting(make: Callable[[int], Any], most: int, room: float) -> Any:
    """`make(n)` with a large n of at most `most` whose JSON fits into so many bytes."""
    made = make(most)
    while most and (took := size(made)) > room:
        most = min(most - 1, int(most * room / took))
        made = make(most)
    return made


def _sample(tables: dict[int, Any], most: int) -> Columns:
    """At most so many replies, evenly over the steps and over the replies of a step."""
    steps = spread(list(tables), max(min(most, 2), most // FEWEST))
    each = min(A_STEP, most // len(steps)) if steps else 0
    parts = sorted({name for step in steps for name in tables[step].column_names if name.startswith("reward/")})
    rows: Columns = {name: [] for name in ("step", *_LINE, *(parts if len(parts) > 1 else ()))}
    for step in steps:
        table = tables[step]
        places = [i * table.num_rows // min(each, table.num_rows) for i in range(min(each, table.num_rows))]
        for row in table.take(places).to_pylist():
            for name, column in rows.items():
                column.append(step if name == "step" else plain(row.get(name)))
    return rows


# --- the numbers of every token ---------------------------------------------------------------------------------------


def _add_tokens(data: dict[str, Any], folder: Path, read: Reader, room: int) -> int:
    """Embed what fits: the newest probes, the newest replies, then earlier ones. Returns how many replies have it."""
    room -= size(data)
    seen = 0
    for place, path, rows in _wanted(data, folder):
        known = read(parquet.tokens, path, [row for row in rows if row is not None])
        if known is None or not any(row["tokens"] for row in known):
            continue
        listed = iter(known)
        aligned = [None if row is None else next(listed) for row in rows]
        columns = {n: [r and r[n] for r in aligned] for n in known[0] if any(row[n] is not None for row in known)}
        room -= size(columns) + 40
        if room < 0:
            break
        seen += _embed(data, place, columns)
    data["replies"]["of_tokens"].sort(key=lambda chunk: chunk["first"])
    return seen


def _embed(data: dict[str, Any], place: Any, columns: Columns) -> int:
    if isinstance(place, int):
        data["replies"]["of_tokens"].append({"first": place} | columns)
        return len(columns["tokens"])
    place["of_tokens"] = columns
    return 0


def _wanted(data: dict[str, Any], folder: Path) -> list[tuple[Any, Path, list[int | None]]]:
    """(the side of a probe, or the first row of a step; its file; rows of the file), the most wanted first."""
    asked, rows = data["probes"], data["replies"]["rows"]
    sides = []
    if asked:
        paths = parquet.steps(folder / "probes")
        sides = [(side, paths[step], side["row"]) for step, side in zip(asked["steps"], asked["policy"])][::-1]
        if asked["reference"]:
            sides.insert(1, (asked["reference"], folder / "probes" / "reference.parquet", asked["reference"]["row"]))
    paths, said = parquet.steps(folder / "rollouts"), []
    for step in dict.fromkeys(reversed(rows["step"])):
        first, many = rows["step"].index(step), rows["step"].count(step)
        said.append((first, paths.get(step, folder), rows["row"][first : first + many]))
    return [*sides[:2], *said[:1], *said[-1:][: len(said) - 1], *sides[2:], *said[1:-1]]


def _sentence(data: dict[str, Any], seen: int, run: str) -> str:
    rows, exist = data["replies"]["rows"]["step"], data["exist"]
    if not exist["replies"]:
        return "No replies are kept yet."
    steps = len(set(rows))
    if len(rows) == exist["replies"]:
        says = f"All {len(rows):,} replies are embedded" if len(rows) > 1 else "The only reply is embedded"
    elif steps == exist["steps"] and not len(rows) % steps and not exist["replies"] % steps:
        says = f"{len(rows) // steps} of {exist['replies'] // steps} replies a step are embedded"
    else:
        says = f"{len(rows):,} of {exist['replies']:,} replies are embedded, from {steps:,} of {exist['steps']:,} steps"
    if 0 < seen < len(rows):
        says += f", {seen:,} of them with the numbers of every token"
    whole = len(rows) == exist["replies"] and seen in (0, len(rows))
    return says + ("." if whole else f"; `operant report {run} --serve` reads all.")
