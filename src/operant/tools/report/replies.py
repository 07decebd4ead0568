"""Selects the replies that a report embeds: the probes, and a sample of the others that keeps the page small.

    data = embedded("runs/sentiment")
    data["summary"]    "50 of 128 replies per step are embedded; `operant report runs/sentiment --serve` shows all."

The sample has at most 50 replies per step and 5,000 in all, evenly over the steps, and always includes the first and
the newest step. Its JSON stays under a budget of bytes: where replies are long, fewer are embedded, and the newest have
priority for the numbers of their tokens.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from operant.tools.report import parquet
from operant.tools.report.html import as_json
from operant.tools.report.parquet import plain
from operant.types import OperantError

MOST_PER_STEP, MOST_IN_ALL = 50, 5_000
FEWEST_PER_STEP = 10
"""Rather than embed fewer replies of each step, steps are left out."""
BUDGET = 5_000_000
"""Bytes of JSON."""
MOST_NOTES = 20
_TEXT_SHARE = 0.3
"""Share of the budget for the texts of the probes, and the same for those of the other replies."""
_COLUMNS = ("row", "query", "reply", "reward", "kl", "reply_tokens", "end")

Columns = dict[str, list]


class Reader:
    """Reads files of a run and collects a note about each file that it cannot read."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def __call__(self, read: Callable, path: Path, *arguments: Any) -> Any:
        """Return `read(path, *arguments)`; None where the file is damaged or has been removed."""
        try:
            return read(path, *arguments)
        except (FileNotFoundError, IndexError):
            return None
        except OperantError as error:
            if str(error) not in self.notes and len(self.notes) < MOST_NOTES:
                self.notes.append(str(error))
            return None


def embedded(folder: str | Path, budget: int = BUDGET) -> dict[str, Any]:
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
    data = {
        "probes": found_probes,
        "replies": {"rows": rows, "token_chunks": []},
        "available": {"steps": len(paths), "replies": sum(filter(None, counts))},
        "summary": "",
        "notes": read.notes,
    }
    with_tokens = _add_tokens(data, folder, read, budget - 2_000)
    data["summary"] = _summary(data, with_tokens, str(folder))
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
    answers = {step: _answers(table) for step, table in tables.items()}
    reference = None if reference_table is None else _answers(reference_table)
    queries = {task: row["query"] for side in (*answers.values(), reference or {}) for task, row in side.items()}
    return {
        "queries": [{"task": task, "query": query} for task, query in queries.items()],
        "steps": list(answers),
        "policy": [_side(side, list(queries)) for side in answers.values()],
        "reference": None if reference is None else _side(reference, list(queries)),
    }


def _answers(table: Any) -> dict[str, dict[str, Any]]:
    """Return by task the last reply of the first attempt."""
    answers: dict[str, dict[str, Any]] = {}
    for row in table.to_pylist():
        known = answers.get(row["task"])
        if known is None or known["rollout"] == row["rollout"]:
            answers[row["task"]] = row
    return answers


def _side(answers: dict[str, dict[str, Any]], tasks: Sequence[str]) -> Columns:
    names = [name for name in _COLUMNS if name != "query"]
    return {name: [plain(answers[task][name]) if task in answers else None for task in tasks] for name in names}


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """Select at most `most` evenly spaced items, with both ends: `spread("abcde", 3) == ["a", "c", "e"]`."""
    if most >= len(items):
        return list(items)
    if most < 2:
        return list(items[len(items) - most :])
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def size(data: Any) -> int:
    """Return the number of bytes that `data` takes on a page."""
    text = as_json(data)
    return len(text.encode("utf-8", errors="replace")) + 5 * text.count("<")


def fitting(make: Callable[[int], Any], most: int, budget: float) -> Any:
    """Return `make(n)` for a large n of at most `most` whose JSON fits into the budget of bytes."""
    made = make(most)
    while most and (bytes_made := size(made)) > budget:
        most = min(most - 1, int(most * budget / bytes_made))
        made = make(most)
    return made


def _sample(tables: dict[int, Any], most: int) -> Columns:
    """Select at most `most` replies, evenly over the steps and over the replies of a step."""
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
                column.append(step if name == "step" else plain(row.get(name)))
    return rows


# --- the numbers of every token ---------------------------------------------------------------------------------------


def _add_tokens(data: dict[str, Any], folder: Path, read: Reader, budget: int) -> int:
    """Embed the tokens that fit into the budget of bytes; returns how many rows of `replies` have them."""
    budget -= size(data)
    targets = _token_targets(data, folder)
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
    chunks = [target for target, _, _ in targets if "first" in target and "token_columns" in target]
    data["replies"]["token_chunks"] = sorted(chunks, key=lambda chunk: chunk["first"])
    return sum(len(chunk["token_columns"]["tokens"]) for chunk in chunks)


def _token_targets(data: dict[str, Any], folder: Path) -> list[tuple[dict[str, Any], Path, list[int | None]]]:
    """List (probe side or chunk of replies to add tokens to, its file, rows of the file) in the order of priority.

    First come the newest probes and the reference's, then the newest and the first replies, then the others.
    """
    found, rows = data["probes"], data["replies"]["rows"]
    sides = []
    if found:
        paths = parquet.steps(folder / "probes")
        sides = [(side, paths[step], side["row"]) for step, side in zip(found["steps"], found["policy"])][::-1]
        if found["reference"]:
            sides.insert(1, (found["reference"], folder / "probes" / "reference.parquet", found["reference"]["row"]))
    paths, chunks = parquet.steps(folder / "rollouts"), []
    for step in dict.fromkeys(reversed(rows["step"])):
        first, n = rows["step"].index(step), rows["step"].count(step)
        chunks.append(({"first": first}, paths.get(step, folder), rows["row"][first : first + n]))
    return [*sides[:2], *chunks[:1], *chunks[-1:][: len(chunks) - 1], *sides[2:], *chunks[1:-1]]


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
