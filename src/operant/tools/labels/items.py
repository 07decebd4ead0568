"""Items to label, and the answers to them: a prompt with its replies, from rows of four forms.

{"id": "12", "prompt": "2 + 2 =", "replies": ["4", "5"], "sources": ["a", "b"]}     # one row a prompt
{"id": "12", "prompt": "2 + 2 =", "reply": "4", "source": "a"}                      # one row a reply
{"prompt": "2 + 2 =", "chosen": "4", "rejected": "5"}                               # a pair: an item with its label
{"prompt": "2 + 2 =", "replies": ["4", "5"], "ranks": [1, 2], "labeller": "anna"}   # a label that was exported

Prompts and replies are texts or chat messages. Ids and sources may be left out: an id is then made of the content.

An answer is a dict with one of `best` (index), `ranks` (1 is best, equal numbers are ties, None is not ranked),
`ratings` (numbers or None) and `good` (true, false or None), one entry for each reply, in the order of the file. It may
have `all_bad: True` and a `comment`.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from operant.data.forms import place_of
from operant.data.replies import pair_of, scores_of
from operant.data.sources import read
from operant.types import OperantError, is_real, require, shown

KINDS = {"pick": "best", "rank": "ranks", "rate": "ratings", "good": "good"}
"""What labellers are asked for, and the field of an answer that holds it."""
SCALE = 5
"""The best rating of the page; the worst is 1."""
MOST = 9
"""Most replies of an item: each has a digit on the keyboard."""
IMPORT = "import"
"""The labeller of labels that a file gives without a name."""

Content = str | Sequence[Mapping[str, str]]
"""A prompt or a reply: a text, or messages with role and content."""


@dataclass(frozen=True)
class GivenLabel:
    """A label that came with a file: who gave it, the answer, and when (Unix time in seconds; None: not known)."""

    labeller: str
    answer: Mapping[str, Any]
    time: float | None = None


@dataclass(frozen=True)
class Item:
    """A prompt and 1 to 9 replies, each a text or a list of messages, and the labels that came with them."""

    id: str
    prompt: Content
    replies: tuple[Content, ...]
    sources: tuple[str | Sequence[str] | None, ...] = ()
    """Where each reply is from, such as the names of its models; empty: not known. A labeller never sees it."""
    given: tuple[GivenLabel, ...] = ()

    def __post_init__(self) -> None:
        where, count = f"item {shown(self.id)}", len(self.replies)
        if not isinstance(self.id, str) or not 0 < len(self.id) <= 1000:
            raise OperantError(f"{where}: an id is a text of 1 to 1,000 characters")
        require(1 <= count <= MOST, f"{where} has {count} replies; a page shows 1 to {MOST}: split it into several")
        if self.sources and len(self.sources) != count:
            raise OperantError(f"{where} has {count} replies and {len(self.sources)} sources: one for each")
        for part in (self.prompt, *self.replies):
            checked_text(part, where)

    def content(self) -> str:
        """Prompt and replies as JSON, the same text for the same content."""
        return json.dumps([self.prompt, list(self.replies)], ensure_ascii=False, sort_keys=True)


def read_items(path: str | Path) -> list[Item]:
    """The items of a file of rows (.jsonl, .json, .csv, .parquet, also .gz), in its order."""
    try:
        rows = list(read(str(path))[1])
    except OperantError as error:
        raise OperantError(str(error).replace("tasks: ", "", 1)) from error
    found = items_of((row, f"{path}, {place_of(number)}") for number, row in rows)
    require(found, f"{path} has no rows; each has a prompt and its replies: docs/rlhf.md shows the forms")
    return found


def items_of(rows: Iterable[tuple[object, str]]) -> list[Item]:
    """The items of rows, each with the place that errors name. Raises: OperantError as `read_items`."""
    whole: dict[str, tuple[Item, str]] = {}
    single: dict[str, list[tuple[Mapping[str, Any], str]]] = {}
    for row, where in rows:
        if not isinstance(row, Mapping):
            raise OperantError(f"{where} is {shown(row)}; it must be an object with a prompt and replies")
        row = {name: value for name, value in row.items() if value is not None}
        if "reply" in row:
            key = f"id {row['id']}" if "id" in row else json.dumps(row.get("prompt"), sort_keys=True)
            single.setdefault(key, []).append((row, where))
        else:
            merge(whole, item_of_row(row, where), where)
    for group in single.values():
        (first, where), prompts = group[0], {json.dumps(row.get("prompt"), sort_keys=True) for row, _ in group}
        why = f"rows of the id {shown(first.get('id'))} have different prompts; correct the ids"
        require(len(prompts) == 1, f"{where}: {why}")
        why = "there is a reply and no prompt; add the prompt, an empty text if there was none"
        require("prompt" in first, f"{where}: {why}")
        prompt, replies = plain(first["prompt"], where), tuple(plain(row["reply"], place) for row, place in group)
        sources = tuple(str(row["source"]) if "source" in row else None for row, _ in group)
        item = Item(_id(first, prompt, replies), prompt, replies, sources if any(sources) else ())
        merge(whole, item, where)
    return [item for item, _ in whole.values()]


def merge(known: dict[str, tuple[Item, str]], item: Item, where: str) -> None:
    other, there = known.setdefault(item.id, (item, where))
    if other is item:
        return
    if other.content() != item.content():
        raise OperantError(f"{where}: the id {shown(item.id)} is that of other replies in {there}; give one another id")
    known[item.id] = replace(other, given=other.given + item.given), there


def item_of_row(row: Mapping[str, object], where: str) -> Item:
    answer = {field: row[field] for field in KINDS.values() if field in row}
    if "chosen" in row and "rejected" in row:
        prompt, replies = pair_of(row, where)
        answer = {"best": 0}
    elif "replies" in row and "prompt" in row:
        prompt, replies = row["prompt"], row["replies"]
        if not isinstance(replies, (list, tuple)):
            raise OperantError(f"{where}: replies is {shown(replies)}; it must be a list of texts or of messages")
    else:
        fields = shown(", ".join(map(str, row)) or "none", 300)[1:-1]
        forms = "prompt and replies, prompt and reply, or prompt, chosen and rejected"
        raise OperantError(f"{where}: the fields are {fields}; a row has {forms}")
    given = []
    if answer or row.get("all_bad"):
        answer |= {field: row[field] for field in ("all_bad", "comment") if row.get(field)}
        when = row.get("time") if isinstance(row.get("time"), int | float) else None
        answer = checked_answer(answer, len(replies), where)
        given = [GivenLabel(name_of_labeller(row.get("labeller", IMPORT)), answer, when)]
    prompt, replies = plain(prompt, where), tuple(plain(reply, where) for reply in replies)
    sources = row.get("sources", ())
    if not isinstance(sources, (list, tuple)):
        raise OperantError(f"{where}: sources is {shown(sources)}; it must be a list with a name for each reply")
    whole = ([str(s) for s in x if s is not None] if isinstance(x, list) else x for x in sources)
    sources = tuple(x if x is None or isinstance(x, list) else str(x) for x in whole)
    return Item(_id(row, prompt, replies), prompt, replies, sources, tuple(given))


def _id(row: Mapping[str, object], prompt: Content, replies: Sequence[Content]) -> str:
    if "id" in row:
        return str(row["id"])
    content = json.dumps([prompt, list(replies)], ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(content.encode("utf-8", errors="replace")).hexdigest()[:16]


def plain(value: Any, where: str) -> Content:
    """A text, or messages with nothing but role and content. Raises: OperantError for anything else."""
    checked_text(value, where)
    if isinstance(value, str):
        return _storable(value)
    return [{part: _storable(message[part]) for part in ("role", "content")} for message in value]


def _storable(text: str) -> str:
    return text.encode("utf-8", errors="replace").decode()  # without lone surrogates


def checked_text(value: object, where: str) -> None:
    """Raises: OperantError for a prompt or reply that is neither a text nor a list of messages."""
    messages = isinstance(value, (list, tuple)) and all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )
    if not isinstance(value, str) and not messages:
        raise OperantError(f"{where}: {shown(value)} is no text and no list of messages with role and content as text")


def as_text(value: Content) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def name_of_labeller(value: object) -> str:
    name = " ".join(value.split()) if isinstance(value, str) else ""
    if not 0 < len(name) <= 60 or not name.isprintable():
        raise OperantError(f"{shown(value)} is no name of a labeller: type 1 to 60 letters")
    return name


def checked_answer(answer: object, count: int, where: str = "the answer") -> dict[str, Any]:
    """An answer to `count` replies in its one form: ranks without gaps, nothing but known fields."""
    if not isinstance(answer, Mapping):
        raise OperantError(f"{where}: {shown(answer)} is no answer; it must be an object")
    fields = [field for field in KINDS.values() if field in answer]
    all_bad, comment = answer.get("all_bad", False) is True, answer.get("comment", "")
    if not fields and all_bad:
        fields, answer = ["ranks"], {**answer, "ranks": [None] * count}
    if len(fields) != 1 or not isinstance(comment, str):
        raise OperantError(f"{where}: {shown(answer, 300)} must have one of {', '.join(KINDS.values())}")
    (field,) = fields
    value = answer[field] if field == "best" else checked_entries(field, answer[field], count, all_bad)
    if field == "best" and not (type(value) is int and 0 <= value < count):
        value = None
    if value is None:
        of_each = "a whole number from 0" if field == "best" else "a list with one entry for each"
        raise OperantError(f"{where}: {field}={shown(answer[field])} of {count} replies; it must be {of_each}")
    kept = {"all_bad": True} if all_bad else {}
    return {field: value} | kept | ({"comment": comment.strip()[:10_000]} if comment.strip() else {})


def checked_entries(field: str, values: object, count: int, all_bad: bool) -> list[float | None] | None:
    """The entries of a list of ranks, ratings or marks; None if one is impossible, or there is none at all."""
    if not isinstance(values, (list, tuple)) or len(values) != count:
        return None
    given = [value for value in values if value is not None]
    possible = {
        "ranks": lambda x: type(x) is int and x >= 1,
        "ratings": lambda x: type(x) in (int, float) and is_real(x),
        "good": lambda x: type(x) is bool,
    }[field]
    if not all(map(possible, given)) or not (given or all_bad):
        return None
    places = sorted(set(given)) if field == "ranks" else []
    return [places.index(x) + 1 if places and x is not None else x for x in values]


def ordered_pairs(answer: Mapping[str, object], count: int) -> list[tuple[int, int]]:
    """(better, worse) for every two replies of which the answer puts one above the other."""
    of = scores_of(answer, count)
    both = [(i, j) for i in range(count) for j in range(count) if of[i] is not None and of[j] is not None]
    return [(i, j) for i, j in both if (of[i] or 0.0) > (of[j] or 0.0)]


def ranks(answer: Mapping[str, object], count: int) -> list[int | None]:
    """The rank of each reply by an answer of any kind: 1 is best, equal numbers are ties, None is not ranked."""
    of = scores_of(answer, count)
    places = sorted({value for value in of if value is not None}, reverse=True)
    return [None if value is None else places.index(value) + 1 for value in of]


def now() -> float:
    return round(time.time(), 3)
