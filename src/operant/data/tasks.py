"""From rows to tasks: rows are filtered, their text is encoded once, and queries are cut from the token ids.

load_tasks("reviews.jsonl", tokenizer, DataOptions(text_field="review", min_chars=200, query_tokens="2-8"))
load_tasks(["The film", "My brother"], tokenizer)
load_tasks("builtin:openings/train", tokenizer)
"""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from operant.bounds import bounded, check_bounds
from operant.data.forms import Form, FormedRow, formed, names_in, place_of
from operant.data.order import permutation
from operant.data.replies import labelled_task, task_with_reply
from operant.data.sources import read
from operant.sampling import PlainTokenizer, check_ids, counter, encode_more, encode_prompt, template_of
from operant.types import OperantError, Task, Tokenizer, name_of, require, shown, with_defaults

CHUNK = 512
"""Number of texts that are encoded together."""
MAX_ID = 1000
"""Characters of the longest task id, which is written to every file of a run."""
EVERY = "*"
"""As `target_field`, all fields."""
MARGIN = 16
"""Number of tokens that must follow a query, so that its ids are surely those of the whole text."""


def _range(tokens: int | str) -> tuple[int, int] | None:
    match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", str(tokens))
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    return (low, high) if 1 <= low <= high else None


@dataclass(frozen=True)
class DataOptions:
    """How rows become tasks."""

    text_field: str = "text"
    """The field that holds the prompt: text, chat messages or ids. A row without `text` may have it in `prompt`."""
    min_chars: int = bounded(0, at_least=0)
    """Leave out texts with fewer characters."""
    max_chars: int | None = None
    """Leave out texts with more characters."""
    query_tokens: int | str | None = bounded(None, fits=_range, rule="a number from 1, or a range such as 2-8")
    """The prompt is this many first tokens of the text: 5, or "2-8" for a random number per task."""
    prompt_tokens: int | None = bounded(None, at_least=2)
    """Longer prompts are cut to this many tokens. Special tokens, and what a form puts around the text, are kept. Of a
    chat, the text of the last message is cut, so that the chat template makes this many tokens of all messages."""
    prompt_keeps: str = bounded("start", choices=("start", "end"))
    """The side of such a prompt that is kept: start or end."""
    template: str | None = None
    """The prompt as a pattern with the row's fields in braces: "Review: {text} Summary:"."""
    chat: bool = False
    """Make each prompt that is a text the message of a user, which the policy's chat template is given."""
    limit: int | None = bounded(None, at_least=1)
    """Maximal number of tasks."""
    shuffle: bool = False
    """Shuffle the rows before `limit` cuts them."""
    id_field: str | None = None
    """The field with the id of the task; by default, the id is made of the source and the row's number."""
    target_field: str | None = None
    """The field that becomes `Task.target`, for rewards; of several, separated by commas, a mapping of them does, and
    with * one of all but the prompt. None: no field; but a reward of TRL's form gets all fields, by name."""
    reference_field: str | None = None
    """The field that becomes `Task.references`, a text or a list of texts, for rewards and metrics."""
    reply_field: str | None = None
    """Of demonstrations: the field of the replies, with prompts in `text_field`; none: the row's form decides."""
    loss_on: str = bounded("replies", choices=("replies", "all"))
    """Of demonstrations: train on the replies alone, or on `all`, prompts too."""
    max_length: int | None = bounded(None, at_least=2)
    """Of demonstrations: longer rows (prompt and reply, in tokens) are cut; none: rows too long are an error."""

    def __post_init__(self) -> None:
        check_bounds(self, "data")
        if self.max_chars is not None and self.max_chars < max(self.min_chars, 1):
            raise OperantError(f"data.max_chars={self.max_chars}: it must be at least min_chars")

    def check_beside(self, form: object) -> None:
        """Raises: OperantError for an option whose work the form does, if there is one."""
        done = ("text_field", "query_tokens", "template", "reference_field", "reply_field")
        if form is not None and (changed := [name for name in done if getattr(self, name) != getattr(BARE, name)]):
            named = form if isinstance(form, str) else name_of(form)
            raise OperantError(f"data.{changed[0]} beside form={named}: the form reads the fields itself; leave it out")

    def query_range(self) -> tuple[int, int] | None:
        """Fewest and most tokens of a query; None if the whole text is the prompt."""
        return None if self.query_tokens is None else _range(self.query_tokens)


BARE = DataOptions()


def load_tasks(
    source: object,
    tokenizer: Tokenizer | None = None,
    options: DataOptions | None = None,
    seed: int = 0,
    context: int | None = None,
    max_new: int = 0,
    vocabulary: int | None = None,
    with_replies: bool = False,
    labelled: bool = False,
    form: Form | None = None,
    cue: bool = True,
    passed: Counter[str] | None = None,
) -> list[Task]:
    """The tasks of `source`: tasks, texts, rows, a function that returns any of these, a file, or a name.

    Files are .jsonl, .json, .csv, .parquet or .txt (one text per line), also compressed as .gz. Names are
    `builtin:openings` (with /train or /held-out) and data sets of the Hub ("imdb", "owner/name:split"). With a
    tokenizer, prompts become ids; rows that are a `Task` already stay unchanged, unless a query is cut from them.
    `context` and `max_new`, in tokens, bound the prompts, `vocabulary` their ids. A generator without end needs
    `limit`. `with_replies`: the rows are demonstrations (see `data/replies.py`); their texts are not encoded here.
    `labelled`: these have labels (see there). `form`: makes the rows of tasks of those that a data set
    publishes (see `data/forms.py`). `cue`: whether the policy continues its prompts, and so reads the form's cue.
    `passed`: is given the numbers of rows that were `read`, and of those that are left out because they have `no text`.

    Raises: OperantError for a source that cannot be read, a missing field, no task left, or a prompt that is too long.
    """
    options = options or BARE
    options.check_beside(form)
    if with_replies and options.query_range():
        raise OperantError(f"data.query_tokens={options.query_tokens!r}: demonstrations need their whole prompts")
    if options.query_range() and tokenizer is None:
        raise OperantError(f"data.query_tokens={options.query_tokens!r} needs a tokenizer")
    name, rows = read(source)
    source_name = source if isinstance(source, str) else name  # errors name a file as it was given
    if getattr(form, "whole", False):
        whole = {"rows": [row for _, row in rows], "source": source if isinstance(source, str) else name}
        rows = iter([(0, whole)] if whole["rows"] else [])
    rows = rows if form is None else formed(rows, form, source_name, skip_empty=options.min_chars > 0)
    if options.shuffle:
        listed = list(rows)
        rows = (listed[i] for i in permutation(len(listed), seed, "rows"))
    passed = Counter() if passed is None else passed
    filtered = _filtered(rows, name, source_name, options, passed, with_replies, labelled, cue)
    if with_replies and options.prompt_tokens is None:  # prompt and reply are encoded together, later
        encoded = (task for task, _, _ in filtered)
    else:
        encoded = _encoded(filtered, tokenizer, options, seed, passed)
    tasks = list(islice(encoded, options.limit))
    if not tasks:
        raise OperantError(_nothing_left(source_name, passed, options))
    if options.target_field == EVERY:
        # A target that is missing or a mapping gets the columns of all of them: None where its row has none.
        names = dict.fromkeys(name for task in tasks if isinstance(task.target, Mapping) for name in task.target)
        for i, own in enumerate([{} if task.target is None else task.target for task in tasks]):
            if isinstance(own, Mapping) and len(own) < len(names):
                tasks[i] = replace(tasks[i], target=names | own)
    twice = next((task_id for task_id, times in Counter(t.id for t in tasks).items() if times > 1), None)
    require(twice is None, f"tasks of {source_name}: the id {twice!r} occurs twice; give every task an id of its own")
    if not with_replies and (context is not None or vocabulary is not None):
        _check_prompts(tasks, tokenizer, context, max_new, vocabulary)
    return tasks


def left_out(passed: Mapping[str, int], source: object) -> list[str]:
    """A sentence on the rows without text that `load_tasks` has counted, if there are any."""
    of = f" of {source}" if isinstance(source, str) else ""
    n, ends = passed["no text"], "has no text and is" if passed["no text"] == 1 else "have no text and are"
    return [f"{n} of {passed['read']} rows{of} {ends} left out"] if n else []


# --- rows to tasks ----------------------------------------------------------------------------------------------------


def _filtered(
    rows: Iterable[tuple[int | str, object]],
    name: str,
    source_name: str,
    options: DataOptions,
    passed: Counter[str],
    with_replies: bool,
    labelled: bool,
    cue: bool,
) -> Iterator[tuple[Task, bool, tuple[str, str]]]:
    """Tasks that pass the filters, each with whether its row was a task already, and what its form puts before and
    behind the prompt. `passed` counts them per filter."""
    for number, row in rows:
        passed["read"] += 1
        was_task = isinstance(row, Task)
        where = f"{source_name}, {place_of(number)}"
        task = row if isinstance(row, Task) else _task(row, f"{name}/{number}", where, options, with_replies, labelled)
        if options.reference_field and not was_task:
            fields, named = row if isinstance(row, Mapping) else {options.text_field: row}, options.reference_field
            texts = [given] if isinstance(given := _field(fields, named, where, "reference_field"), str) else given
            if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(text, str) for text in texts):
                why = f"the reference in {named!r} is {shown(given)}; it must be a text or a list of texts"
                raise OperantError(f"{where}: {why}")
            task = replace(task, references=tuple(texts))
        check_texts(task, where)
        if labelled and not task.replies and not was_task:  # none of them has a label
            passed["no label"] += 1
            continue
        require(task.replies or not with_replies, f"{where}: the task {task.id!r} has no replies to learn from")
        paired = not labelled or len(task.scores) == len(task.replies)
        require(paired, f"{where}: the task {task.id!r} has {len(task.replies)} replies, {len(task.scores)} labels")
        parts = [task.prompt, *task.replies] if with_replies else [task.prompt]
        text = "".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else None
        around = (row.before, row.behind + row.cue * cue) if isinstance(row, FormedRow) else ("", "")
        if not (task.replies or task.prompt if text is None else text.strip()):
            passed["no text"] += 1
            continue
        passed["not empty"] += 1
        if text is not None and not was_task and not options.min_chars <= len(text) <= (options.max_chars or len(text)):
            continue
        passed["length in characters"] += 1
        task = replace(task, prompt=around[0] + task.prompt + around[1]) if any(around) else task
        good = not (options.chat and task.prompt and isinstance(task.prompt[0], int))
        require(good, f"{where}: data.chat=true, and its prompt is token ids, which are read as they are: leave it out")
        if options.chat and isinstance(task.prompt, str):
            task = replace(task, prompt=[{"role": "user", "content": task.prompt}])
        passed["texts"] += isinstance(task.prompt, str)
        yield task, was_task, around


def _task(row: object, task_id: str, where: str, options: DataOptions, with_replies: bool, labelled: bool) -> Task:
    of_form = row if isinstance(row, FormedRow) else None
    fields = row if isinstance(row, Mapping) else {options.text_field: row} if of_form is None else of_form.published
    if of_form is not None and of_form.id:
        task_id = task_id.rpartition("/")[0] + f"/{of_form.id}"
    if options.id_field:
        task_id = str(_field(fields, options.id_field, where, "id_field"))
    target = None
    if options.target_field == EVERY:
        read = {options.text_field, "text" if "text" in fields else "prompt", "completion", "completion_ids"}
        target = {name: value for name, value in fields.items() if name not in read} or None
    elif options.target_field:
        wanted = [options.target_field] if options.target_field in fields else options.target_field.split(",")
        found = {name.strip(): _field(fields, name.strip(), where, "target_field") for name in wanted}
        target = found if len(wanted) > 1 else next(iter(found.values()))
    if of_form is not None:
        if with_replies and not of_form.references:
            raise OperantError(
                f"{where}: the form found no reference in the row, so there is no reply to learn from (fields: "
                f"{names_in(fields)}); form.target names the field where a form has that option"
            )
        target, references = of_form.target if target is None else target, of_form.references
        return Task(task_id, of_form.prompt, target, references if with_replies else (), references=references)
    has_replies = labelled or fields.keys() & ({"completion", "replies"} - {options.text_field})
    if has_replies and options.text_field in fields and options.text_field != BARE.text_field:
        row = {**fields, "prompt": fields[options.text_field]}
    if labelled or with_replies:
        given = (row, task_id, options.text_field, options.reply_field, where)
        task = labelled_task(row, task_id, where) if labelled else task_with_reply(*given)
        task = task if target is None else replace(task, target=target)
        return task if options.template is None else replace(task, prompt=_filled(options.template, fields, where))
    if options.template is not None:
        return Task(task_id, _filled(options.template, fields, where), target)
    is_named_prompt = options.text_field == "text" and "text" not in fields and "prompt" in fields
    of_prompt = "prompt" if is_named_prompt else options.text_field
    prompt = _field(fields, of_prompt, where, "text_field")
    prompt = "" if prompt is None else prompt
    kinds = {type(part) for part in prompt} if isinstance(prompt, list) else {None}
    if not isinstance(prompt, str) and not (kinds <= {int} or kinds <= {dict}):
        kind = type(prompt).__name__
        raise OperantError(f"{where}: the field {of_prompt!r} is of type {kind}, not text, messages or ids")
    return Task(task_id, prompt, target)


def _filled(template: str, fields: Mapping[str, object], where: str) -> str:
    try:
        return template.format_map(fields)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise OperantError(f"{where}: data.template needs {error}; fields: {', '.join(map(str, fields))}") from error


def _field(fields: Mapping[str, object], name: str, where: str, option: str) -> object:
    if name not in fields:
        known = [str(field) for field in fields]
        near = difflib.get_close_matches(name[:100], known, 1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if "messages" in known and option == "text_field":
            hint = "; a chat is read by --data.text-field messages"
        raise OperantError(
            f"{where}: there is no field {shown(name)}{hint} (fields: {names_in(fields)}); set data.{option}, or "
            "name the form of rows of a public data set, as in --form summarize (docs/tasks.md)"
        )
    return fields[name]


# --- text to ids ------------------------------------------------------------------------------------------------------


def _encoded(
    tasks: Iterator[tuple[Task, bool, tuple[str, str]]],
    tokenizer: Tokenizer | None,
    options: DataOptions,
    seed: int,
    passed: Counter[str],
) -> Iterator[Task]:
    """Tasks with prompts as ids, cut to queries or to `prompt_tokens` if `options` ask for it. Messages stay as they
    are, and so do the prompts of demonstrations that are not cut: their ids are made with those of the replies."""
    span, most = options.query_range(), options.prompt_tokens
    cuts = bool(span or most)
    special = {*with_defaults(tokenizer, PlainTokenizer).all_special_ids}
    while chunk := list(islice(tasks, CHUNK)):
        wanted = [isinstance(t.prompt, str) and tokenizer is not None and (cuts or not was) for t, was, _ in chunk]
        ids = iter(_ids([str(task.prompt) for (task, _, _), w in zip(chunk, wanted) if w], tokenizer, span))
        for (task, _, around), text in zip(chunk, wanted):
            prompt: Any = next(ids) if text else task.prompt
            if cuts and tokenizer is not None and prompt and isinstance(prompt[0], dict):
                if span:
                    raise OperantError(
                        f"data.query_tokens={options.query_tokens!r}: the prompt of task {task.id!r} is a chat, whose "
                        "first tokens are those of its template; leave it out, or cut the last message with "
                        "data.prompt_tokens"
                    )
                prompt = shortened_chat(tokenizer, task, most or 0, options.prompt_keeps, around)
            elif span and isinstance(prompt, list) and isinstance(prompt[0], int):
                prompt = _query(prompt, span, special, counter(seed, "query", task.id))
            if most and len(prompt) > most and isinstance(prompt, list) and isinstance(prompt[0], int):
                kept = [tokenizer.encode(part, add_special_tokens=False) if part else [] for part in around]
                prompt = shortened(prompt, most, options.prompt_keeps, kept, special)
            elif task.replies:
                prompt = task.prompt
            if prompt or task.replies:  # a demonstrated text may have no prompt
                passed["length in tokens"] += 1
                yield task if prompt is task.prompt else replace(task, prompt=prompt)


def shortened(ids: list[int], most: int, keeps: str, around: list[list[int]], special: set[int]) -> list[int]:
    """The first `most` ids of a longer prompt, or with keeps="end" the last. The special ids at both its ends stay, and
    so do `around`: the ids of the text before and behind what may be cut.

    shortened([1, 7, 8, 9, 5, 2], 5, "start", [[], [5]], {1, 2}) == [1, 7, 8, 5, 2]
    Raises: OperantError if these alone are too many.
    """
    lead = next((i for i, token in enumerate(ids) if token not in special), 0)
    last = next((i for i, token in enumerate(reversed(ids)) if token not in special), 0)
    before, behind = around
    core, room = ids[lead : len(ids) - last], most - lead - last - len(before) - len(behind)
    if room < 1:
        raise OperantError(
            f"data.prompt_tokens={most}: {most - room} tokens stand around the text of a prompt already; raise it, or "
            "shorten the prefix or the cue of the form"
        )
    core = core[: len(before) + room] + behind if keeps == "start" else before + core[-room - len(behind) :]
    return ids[:lead] + core + ids[len(ids) - last :]


def shortened_chat(
    tokenizer: Tokenizer, task: Task, most: int, keeps: str, around: tuple[str, str] = ("", "")
) -> list[dict[str, str]]:
    """The messages of a chat, the text of the last one cut until the chat template makes `most` tokens of all.

    `keeps`: the side of that text that stays, start or end, between the texts `around` it, which are never cut.
    Raises: OperantError if the messages have more tokens without that text, or if it is none.
    """
    (before, behind), messages = around, list[Any](task.prompt)
    *others, last = messages
    text = last.get("content")
    good = isinstance(text, str)
    require(good, f"data.prompt_tokens={most}: the last message of task {task.id!r} has no text to cut; leave it out")
    core = encode_more(tokenizer, text[len(before) : len(text) - len(behind)])
    while (over := len(encode_prompt(tokenizer, messages)) - most) > 0:
        if over >= len(core):
            raise OperantError(
                f"data.prompt_tokens={most}: the messages of task {task.id!r} have more tokens without the text of the "
                "last one; raise it, or leave messages out"
            )
        core = core[:-over] if keeps == "start" else core[over:]
        cut = tokenizer.decode(core).strip("\ufffd")  # half a character
        messages = [*others, {**last, "content": before + cut + behind}]
    return messages


def _ids(texts: list[str], tokenizer: Tokenizer, span: tuple[int, int] | None) -> list[list[int]]:
    if not texts or span is None:
        return _encode(texts, tokenizer) if texts else []
    # A query needs only the first words of a long text: encode a piece that ends at a space well behind them.
    limit = 8 * (span[1] + MARGIN)
    start = limit // 2
    pieces = [t[: t.rfind(" ", start, limit)] if " " in t[start:limit] and t[limit:] else t for t in texts]
    ids = _encode(pieces, tokenizer)
    for i, (text, piece) in enumerate(zip(texts, pieces)):
        if len(piece) < len(text) and len(ids[i]) < span[1] + MARGIN:
            ids[i] = tokenizer(text).input_ids
    return ids


def _encode(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    try:
        return tokenizer(texts).input_ids
    except Exception as error:  # a tokenizer may raise any type of exception
        reason = " ".join(str(error).split())[:200]
        raise OperantError(f"tasks: the tokenizer cannot encode {shown(texts[0])} or what follows: {reason}") from error


def _query(ids: list[int], span: tuple[int, int], special: set[int], number: int) -> list[int]:
    """The first n ids and the special ones before them; `number` selects n in `span`. Empty if there are too few."""
    lead = next((i for i, token in enumerate(ids) if token not in special), len(ids))
    length = span[0] + number % (span[1] - span[0] + 1)
    body = [*ids[lead:]]
    while body and body[-1] in special:  # an end-of-text token that the tokenizer adds does not belong to a query
        body.pop()
    return ids[:lead] + body[:length] if len(body) >= span[0] else []


def _nothing_left(name: str, passed: Counter[str], options: DataOptions) -> str:
    rows = passed["read"]
    if not rows:
        return f"tasks of {name}: it has no rows"
    if passed["no label"] == rows:
        return f"tasks of {name}: none of {rows} rows has a label; those that are all bad or skipped say nothing"
    settings = {
        "not empty": f"the field {options.text_field!r} is empty everywhere",
        "length in characters": f"loosen min_chars={options.min_chars}, max_chars={options.max_chars}",
        "length in tokens": f"loosen query_tokens={options.query_tokens}: every text is shorter"
        if options.query_tokens is not None
        else "the tokenizer makes no token of these texts: is it that of the model?",
    }
    guilty = next(step for step in settings if not passed[step])
    left = ", ".join(f"{passed[step]} after {step!r}" for step in settings)
    return f"tasks of {name}: none of {rows} rows passes the filters ({left}); {settings[guilty]}"


def check_texts(task: Task, where: str) -> None:
    """Raises: OperantError for what is no prompt, or what no file of the run can hold, before hours of training."""
    if not isinstance(task.id, (str, int)) or len(str(task.id)) > MAX_ID:
        why = f"the id {shown(task.id)} is not valid: ids are texts of at most {MAX_ID} characters"
        raise OperantError(f"{where}: {why}")
    good = task.prompt is None or isinstance(task.prompt, Sequence)
    require(good, f"{where}: the prompt is {shown(task.prompt)}; it must be text, token ids, or a list of messages")
    for what, text in (("id", task.id), ("prompt", task.prompt)):
        if isinstance(text, str) and not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                near = shown(text[max(0, error.start - 20) : error.start + 20])
                raise OperantError(
                    f"{where}: the {what} holds half a surrogate pair, near {near}: repair it where the text was cut"
                ) from error


def _check_prompts(
    tasks: list[Task], tokenizer: Tokenizer | None, context: int | None, max_new: int, vocabulary: int | None
) -> None:
    """Raises: OperantError for a prompt with an unknown token id, or too long to generate `max_new` tokens."""
    for task in tasks:
        prompt = task.prompt
        if isinstance(prompt, str) and tokenizer is not None:
            prompt = tokenizer(prompt).input_ids
        elif prompt and isinstance(prompt[0], dict) and template_of(tokenizer):
            prompt = encode_prompt(tokenizer, prompt)
        if not (isinstance(prompt, list) and isinstance(prompt[0], int)):
            continue
        if vocabulary is not None:
            check_ids(prompt, vocabulary, f"task {task.id!r}: its prompt")
        if context is not None and len(prompt) + max_new > context:
            new, lower = (f" and {max_new} new ones are", " or lower sampling.max_tokens") if max_new else (" is", "")
            raise OperantError(
                f"task {task.id!r}: its prompt of {len(prompt)} tokens{new} more than the model's context of "
                f"{context}; shorten it (prompt_tokens, query_tokens, max_chars){lower}"
            )
