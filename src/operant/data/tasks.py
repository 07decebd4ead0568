"""Rows become tasks: filtered, their text made into ids once, queries cut from the ids.

load_tasks("reviews.jsonl", tokenizer, DataOptions(text_field="review", min_chars=200, query_tokens="2-8"))
load_tasks(["The film", "My brother"], tokenizer)
load_tasks("builtin:openings/train", tokenizer)
"""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from operant.data.given import given_task
from operant.data.order import permutation
from operant.data.sources import read
from operant.sampling import check_ids, counter
from operant.types import OperantError, Task, shown

CHUNK = 512
"""Texts that are encoded at a time."""
LONGEST_ID = 1000
"""Characters of a task's name, which stands in every file of a run."""
MARGIN = 16
"""Tokens that must follow a query for its ids to be sure to be those of the whole text."""


@dataclass(frozen=True)
class DataOptions:
    """How rows become tasks."""

    text_field: str = "text"
    """The field that holds the prompt: text, chat messages or ids."""
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
    reply_field: str | None = None
    """Of given replies: the field that holds them, with prompts in `text_field`; none: the row's own form decides."""
    loss_on: str = "replies"
    """Of given replies: train on the replies alone, or on all, prompts too."""
    max_length: int | None = None
    """Of given replies: the longest row, prompt and reply, beyond which it is cut; none: a row too long is refused."""

    def __post_init__(self) -> None:
        low, high = self.query_range() or (1, 1)
        checks = [
            ("min_chars", self.min_chars >= 0, "at least 0"),
            ("max_chars", self.max_chars is None or self.max_chars >= max(self.min_chars, 1), "at least min_chars"),
            ("query_tokens", 1 <= low <= high, "a number from 1, or a range such as 2-8"),
            ("loss_on", self.loss_on in ("replies", "all"), "replies or all"),
            ("max_length", self.max_length is None or self.max_length >= 2, "at least 2"),
            ("limit", self.limit is None or self.limit >= 1, "at least 1"),
        ]
        for name, good, rule in checks:
            if not good:
                raise OperantError(f"data.{name}={shown(getattr(self, name))}: it must be {rule}")

    def query_range(self) -> tuple[int, int] | None:
        """Fewest and most tokens of a query; None where the whole text is the prompt."""
        if self.query_tokens is None:
            return None
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", str(self.query_tokens))
        return (int(match[1]), int(match[2] or match[1])) if match else (0, 0)


def load_tasks(
    source: Any,
    tokenizer: Any = None,
    options: DataOptions | None = None,
    seed: int = 0,
    context: int | None = None,
    max_new: int = 0,
    vocabulary: int | None = None,
    given: bool = False,
) -> list[Task]:
    """The tasks of `source`: tasks, texts, rows, a function that returns any of these, a file, or a name.

    Files are .jsonl, .json, .csv, .parquet or .txt (a text a line), also with .gz behind. Names are `builtin:openings`
    (with /train or /held-out) and data sets of the Hub ("imdb", "owner/name:split"). With a tokenizer, prompts become
    ids; what is a `Task` already stays as it is unless a query is cut from it. `context` and `max_new`, in tokens,
    bound the prompts, `vocabulary` their ids. A function that never ends needs `limit`. `given`: the rows hold replies
    to learn from (see `data/given.py`); their texts stay texts.

    Raises: OperantError for a source that cannot be read, a missing field, no task left, or a prompt that is too long.
    """
    options = options or DataOptions()
    if given and options.query_range():
        raise OperantError(f"data.query_tokens={options.query_tokens!r}: given replies stand behind whole prompts")
    if options.query_range() and tokenizer is None:
        raise OperantError(f"data.query_tokens={options.query_tokens!r} needs a tokenizer")
    name, rows = read(source)
    if options.shuffle:
        listed = list(rows)
        rows = (listed[i] for i in permutation(len(listed), seed, "rows"))
    passed: Counter[str] = Counter()
    wanted = _tasks(rows, name, options, passed, given)
    made = (task for task, _ in wanted) if given else _encoded(wanted, tokenizer, options, seed, passed)
    tasks = list(islice(made, options.limit))
    if not tasks:
        raise OperantError(_nothing_left(name, passed, options))
    twice = [task_id for task_id, times in Counter(t.id for t in tasks).items() if times > 1]
    if twice:
        raise OperantError(f"tasks of {name}: the id {twice[0]!r} stands twice; give every task an id of its own")
    if not given:
        _check_prompts(tasks, tokenizer, context, max_new, vocabulary)
    return tasks


# --- rows to tasks ----------------------------------------------------------------------------------------------------


def _tasks(
    rows: Iterable[tuple[int, Any]], name: str, options: DataOptions, passed: Counter[str], replies: bool
) -> Iterator[tuple[Task, bool]]:
    """(task, whether it was a task already), filtered by length. `passed` counts what came through each filter."""
    for number, row in rows:
        passed["read"] += 1
        given = isinstance(row, Task)
        task: Task = row if isinstance(row, Task) else _task(row, number, name, options, replies)
        _check_texts(task, f"{name}, row {number}")
        if replies and not task.replies:
            raise OperantError(f"{name}, row {number}: the task {task.id!r} has no replies to learn from")
        text = _whole_text(task) if replies else task.prompt if isinstance(task.prompt, str) else None
        if not (task.replies or task.prompt if text is None else text.strip()):
            continue
        passed["not empty"] += 1
        if text is not None and not given and not options.min_chars <= len(text) <= (options.max_chars or len(text)):
            continue
        passed["length in characters"] += 1
        yield task, given


def _whole_text(task: Task) -> str | None:
    """Prompt and reply; None where either is no text."""
    parts = [task.prompt, *task.replies]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else None


def _task(row: Any, number: int, name: str, options: DataOptions, replies: bool = False) -> Task:
    where = f"{name}, row {number}"
    fields = row if isinstance(row, Mapping) else {options.text_field: row}
    named = _field(fields, options.id_field, where) if options.id_field else f"{name}/{number}"
    target = _field(fields, options.target_field, where) if options.target_field else None
    if replies:
        task = replace(given_task(row, str(named), options.text_field, options.reply_field, where), target=target)
        return task if options.template is None else replace(task, prompt=_filled(options.template, fields, where))
    if options.template is not None:
        return Task(str(named), _filled(options.template, fields, where), target)
    prompt = _field(fields, options.text_field, where)
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and _alike(prompt)):
        raise OperantError(
            f"{where}: the field {options.text_field!r} is a {type(prompt).__name__}, not text, messages or ids"
        )
    return Task(str(named), prompt, target)


def _filled(template: str, fields: Mapping[str, Any], where: str) -> str:
    try:
        return template.format_map(fields)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise OperantError(f"{where}: data.template needs {error}; fields: {', '.join(map(str, fields))}") from error


def _alike(prompt: list[Any]) -> bool:
    """Whether a list holds nothing but ids, or nothing but messages."""
    kinds = {type(part) for part in prompt}
    return kinds <= {int} or kinds <= {dict}


def _field(fields: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in fields:
        known = [str(field) for field in fields]
        near = difflib.get_close_matches(name[:100], known, 1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        there = shown(", ".join(known) or "none", 300)[1:-1]
        raise OperantError(f"{where}: there is no field {shown(name)}{hint} (fields: {there})")
    return fields[name]


# --- text to ids ------------------------------------------------------------------------------------------------------


def _encoded(
    tasks: Iterator[tuple[Task, bool]], tokenizer: Any, options: DataOptions, seed: int, passed: Counter[str]
) -> Iterator[Task]:
    """Prompts as ids, cut to queries where that is asked for. Messages stay."""
    span = options.query_range()
    special: set[int] = set(getattr(tokenizer, "all_special_ids", ()))
    while chunk := list(islice(tasks, CHUNK)):
        wanted = [isinstance(t.prompt, str) and tokenizer is not None and bool(span or not g) for t, g in chunk]
        ids = iter(_ids([str(task.prompt) for (task, _), w in zip(chunk, wanted) if w], tokenizer, span))
        for (task, _), text in zip(chunk, wanted):
            prompt: Any = next(ids) if text else task.prompt
            if span and isinstance(prompt, list) and isinstance(prompt[0], int):
                prompt = _query(prompt, span, special, counter(seed, "query", task.id))
            if prompt:
                passed["length in tokens"] += 1
                yield task if prompt is task.prompt else replace(task, prompt=prompt)


def _ids(texts: list[str], tokenizer: Any, span: tuple[int, int] | None) -> list[list[int]]:
    if not texts or span is None:
        return _encode(texts, tokenizer) if texts else []
    # A query needs the first words of a long review: encode a piece that ends at a space well behind them.
    limit = 8 * (span[1] + MARGIN)
    start = limit // 2
    pieces = [t[: t.rfind(" ", start, limit)] if " " in t[start:limit] and t[limit:] else t for t in texts]
    ids = _encode(pieces, tokenizer)
    for i, (text, piece) in enumerate(zip(texts, pieces)):
        if len(piece) < len(text) and len(ids[i]) < span[1] + MARGIN:
            ids[i] = tokenizer(text).input_ids
    return ids


def _encode(texts: list[str], tokenizer: Any) -> list[list[int]]:
    try:
        return tokenizer(texts).input_ids
    except Exception as error:  # the rules of a tokenizer are somebody's, and what it raises has no type of its own
        reason = " ".join(str(error).split())[:200]
        raise OperantError(f"tasks: the tokenizer cannot encode {shown(texts[0])} or what follows: {reason}") from error


def _query(ids: list[int], span: tuple[int, int], special: set[int], number: int) -> list[int]:
    """The first n ids and the special ones before them; n lies in `span` and is drawn by `number`. Empty: too short."""
    lead = next((i for i, token in enumerate(ids) if token not in special), len(ids))
    length = span[0] + number % (span[1] - span[0] + 1)
    body = [*ids[lead:]]
    while body and body[-1] in special:  # an end-of-text token that the tokenizer adds is no part of a query
        body.pop()
    return ids[:lead] + body[:length] if len(body) >= span[0] else []


# --- what is refused --------------------------------------------------------------------------------------------------


def _nothing_left(name: str, passed: Counter[str], options: DataOptions) -> str:
    if not passed["read"]:
        return f"tasks of {name}: there are none to read; an empty list of tasks trains nothing"
    settings = {
        "not empty": f"the field {options.text_field!r} is empty everywhere",
        "length in characters": f"min_chars={options.min_chars}, max_chars={options.max_chars}",
        "length in tokens": f"query_tokens={options.query_tokens}: every text is shorter",
    }
    guilty = next(step for step in settings if not passed[step])
    left = ", ".join(f"{passed[step]} after {step!r}" for step in settings)
    return f"tasks of {name}: none is left of {passed['read']} read ({left}); loosen {settings[guilty]}"


def _check_texts(task: Task, where: str) -> None:
    """What no file of the run could hold: it would be found out after hours of training."""
    if not isinstance(task.id, (str, int)) or len(str(task.id)) > LONGEST_ID:
        raise OperantError(
            f"{where}: the id {shown(task.id)} is no name: ids are texts of at most {LONGEST_ID} characters"
        )
    for what, text in (("id", task.id), ("prompt", task.prompt)):
        if isinstance(text, str) and not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                near = shown(text[max(0, error.start - 20) : error.start + 20])
                raise OperantError(
                    f"{where}: the {what} holds half a surrogate pair, near {near}: mend it where the text was cut"
                ) from error


def _check_prompts(
    tasks: list[Task], tokenizer: Any, context: int | None, max_new: int, vocabulary: int | None
) -> None:
    if context is None and vocabulary is None:
        return
    for task in tasks:
        prompt = task.prompt
        if isinstance(prompt, str) and tokenizer is not None:
            prompt = tokenizer(prompt).input_ids
        if not (isinstance(prompt, list) and isinstance(prompt[0], int)):
            continue
        if vocabulary is not None:
            check_ids(prompt, vocabulary, f"task {task.id!r}: its prompt")
        if context is not None and len(prompt) + max_new > context:
            raise OperantError(
                f"task {task.id!r}: its prompt of {len(prompt)} tokens and {max_new} new ones are more than "
                f"the model's context of {context}; shorten it (query_tokens, max_chars) or lower sampling.max_tokens"
            )
