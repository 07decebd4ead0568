"""Tasks from anything, and the order in which they are attempted.

    load_tasks("reviews.jsonl", tokenizer, DataOptions(text_field="review", min_chars=200, query_tokens="2-8"))
    load_tasks(["The film", "My brother"], tokenizer)
    load_tasks("builtin:openings/train", tokenizer)

Text becomes ids here, once. A query is the first ids of a longer text, and is never encoded again.
"""

import csv
import difflib
import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from operant.hub import BUILTIN, reach
from operant.sampling import counter, uniforms
from operant.types import OperantError, Task

HELD_OUT = 256
"""The last lines of `builtin:openings` are for evaluation."""
ALIASES = {"imdb": "stanfordnlp/imdb"}
CHUNK = 512
"""Texts that are encoded at a time."""


@dataclass(frozen=True)
class DataOptions:
    """How rows become tasks."""

    text_field: str = "text"
    """The field that holds the prompt: text, or chat messages."""
    min_chars: int = 0
    """Leave out texts with fewer characters."""
    max_chars: int | None = None
    """Leave out texts with more characters."""
    query_tokens: int | str | None = None
    """The prompt is the first so many tokens of the text: 5, or "2-8" for a number drawn for each task."""
    template: str | None = None
    """The prompt as a pattern with the row's fields in braces: "Review: {text} Summary:"."""
    limit: int | None = None
    """At most so many tasks."""
    shuffle: bool = False
    """Shuffle the rows before `limit` cuts them."""
    id_field: str | None = None
    """The field that names the task; otherwise the source and the row's number do."""
    target_field: str | None = None
    """The field that becomes `Task.target`, for rewards."""

    def __post_init__(self) -> None:
        low, high = self.query_range() or (1, 1)
        most = self.max_chars if self.max_chars is not None else self.min_chars
        checks = [
            ("min_chars", self.min_chars >= 0, "at least 0"),
            ("max_chars", most >= max(self.min_chars, 0), "at least min_chars"),
            ("query_tokens", 1 <= low <= high, "a number from 1, or a range such as 2-8"),
            ("limit", self.limit is None or self.limit >= 1, "at least 1"),
        ]
        for name, good, rule in checks:
            if not good:
                raise OperantError(f"data.{name}={getattr(self, name)!r}: it must be {rule}")

    def query_range(self) -> tuple[int, int] | None:
        """Fewest and most tokens of a query; None where the whole text is the prompt."""
        if self.query_tokens is None:
            return None
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", str(self.query_tokens))
        return (int(match[1]), int(match[2] or match[1])) if match else (0, 0)


Source = str | Path | Iterable[Any] | Callable[[], Iterable[Any]]


def load_tasks(
    source: Source,
    tokenizer: Any = None,
    options: DataOptions | None = None,
    seed: int = 0,
    *,
    context: int | None = None,
    max_new: int = 0,
) -> list[Task]:
    """The tasks of `source`: tasks, texts, rows, a function that returns any of these, a file, or a name.

    Files are .jsonl, .json, .csv, .parquet or .txt (a text a line), also with .gz behind. Names are `builtin:openings`
    (with /train or /held-out) and data sets of the Hub ("imdb", "owner/name:split"). With a tokenizer prompts become
    ids; tasks that are `Task` already stay as they are. `context` and `max_new` (both in tokens) bound the prompts.

    Raises: OperantError for a source that cannot be read, a missing field, no task left, or a prompt that is too long.
    """
    options = options or DataOptions()
    if options.query_range() and tokenizer is None:
        raise OperantError(f"data.query_tokens={options.query_tokens!r} needs a tokenizer")
    name, rows = _read(source, options)
    numbered: Iterable[tuple[int, Any]] = enumerate(rows)
    if options.shuffle:
        listed = list(numbered)
        numbered = (listed[i] for i in _permutation(len(listed), seed, "rows", 0))
    kept: dict[str, int] = {}
    made = _prompts(_tasks(numbered, name, options, kept), tokenizer, options, seed, kept)
    tasks = list(islice(made, options.limit))
    if not tasks:
        raise OperantError(_nothing_left(name, kept, options))
    _check_ids(tasks, name)
    _check_context(tasks, tokenizer, context, max_new)
    return tasks


# --- rows to tasks ----------------------------------------------------------------------------------------------------


def _tasks(rows: Iterable[tuple[int, Any]], name: str, options: DataOptions, kept: dict[str, int]) -> Iterator[Task]:
    """Tasks with text, messages or ids, filtered by length. `kept` counts what passed each filter."""
    for number, row in rows:
        _count(kept, "read")
        if isinstance(row, Task):
            task = row
        else:
            fields = row if isinstance(row, Mapping) else {options.text_field: row}
            where = f"{name}, row {number}"
            prompt = _prompt(fields, options, where)
            named = _field(fields, options.id_field, where) if options.id_field else f"{name}/{number}"
            target = _field(fields, options.target_field, where) if options.target_field else None
            task = Task(str(named), prompt, target)
        if not task.prompt or (isinstance(task.prompt, str) and not task.prompt.strip()):
            continue
        _count(kept, "not empty")
        if isinstance(task.prompt, str) and not isinstance(row, Task):
            if not options.min_chars <= len(task.prompt) <= (options.max_chars or len(task.prompt)):
                continue
        _count(kept, "length in characters")
        yield task


def _prompt(fields: Mapping[str, Any], options: DataOptions, where: str) -> Any:
    if options.template is not None:
        try:
            return options.template.format_map(fields)
        except (KeyError, IndexError, ValueError) as error:
            raise OperantError(f"{where}: data.template needs {error}; the fields are {', '.join(fields)}") from error
    value = _field(fields, options.text_field, where)
    listed = isinstance(value, list) and all(isinstance(v, (int, Mapping)) for v in value)
    if not isinstance(value, str) and not listed:
        raise OperantError(f"{where}: field {options.text_field!r} is a {type(value).__name__}, not text or messages")
    return value


def _field(fields: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in fields:
        near = difflib.get_close_matches(name, map(str, fields), 1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise OperantError(f"{where}: no field {name!r}{hint} (fields: {', '.join(map(str, fields)) or 'none'})")
    return fields[name]


def _prompts(
    tasks: Iterator[Task], tokenizer: Any, options: DataOptions, seed: int, kept: dict[str, int]
) -> Iterator[Task]:
    """Text as ids, and queries cut. Messages and ids stay."""
    while chunk := list(islice(tasks, CHUNK)):
        ids = iter(_encode([t.prompt for t in chunk if isinstance(t.prompt, str)], tokenizer, options))
        for task in chunk:
            if isinstance(task.prompt, str) and tokenizer is not None:
                task = Task(task.id, next(ids), task.target)
            span = options.query_range()
            if span and task.prompt and isinstance(task.prompt[0], int):
                task = Task(task.id, _query(task, span, tokenizer, seed), task.target)  # type: ignore[arg-type]
            if task.prompt:
                _count(kept, "length in tokens")
                yield task
