"""Sources of rows: files, names, lists and functions. A row is a mapping of fields, a text, or a `Task`.

A share of a run's own tasks can be held out for its evaluation:

    training, held_out = split_off(tasks, share("10%"), seed=0)
"""

import csv
import difflib
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO

from operant.import_by_name import Table, nearest
from operant.sampling import counter
from operant.storage.hub import BUILTIN, CONNECT_SECONDS, found, reach
from operant.types import OperantError, Task, name_of, of_user, require, shown

HELD_OUT = 256
"""Number of lines at the end of built-in tasks that are reserved for evaluation."""
ALIASES = {"imdb": "stanfordnlp/imdb"}
SOURCES = Table(
    "task source",
    "operant.data",
    {
        "arithmetic": "operant.apps.maths.generated:arithmetic",
        "arithmetic/held-out": "operant.apps.maths.generated:arithmetic_held_out",
        "countdown": "operant.apps.maths.generated:countdown",
        "countdown/held-out": "operant.apps.maths.generated:countdown_held_out",
        "dates": "operant.apps.text.concepts:dates",
        "numbers": "operant.apps.text.concepts:numbers",
        "programs": "operant.apps.code.generated:programs",
        "programs/held-out": "operant.apps.code.generated:held_out",
        "outcomes": "operant.apps.code.forms:outcomes",
        "reasoning_gym:": "operant.apps.maths.reasoning_gym:named",
        "verifiers:": "operant.apps.maths.verifiers:named",
    },
)
"""Functions that return rows; their arguments are the options `tasks.*`."""

Rows = Iterator[tuple[int, object]]
"""Rows with their numbers in the source."""


def read(source: object, text_field: str = "text") -> tuple[str, Iterator[tuple[int, Any]]]:
    """The name of a source and its rows, each with its number in the source.

    Raises: OperantError for an unknown source; reading the rows raises it for a broken row.
    """
    if isinstance(source, (str, Path)):
        return _named(str(source), text_field)
    if callable(source):
        with of_user(f"tasks: {name_of(source)} raised "):
            made = source()
        if not isinstance(made, Iterable):
            raise OperantError(f"tasks: {name_of(source)} returned {shown(made)}; return a list of tasks")
        return name_of(source), enumerate(made)
    if isinstance(source, Mapping):
        refuse_splits(source)
    if isinstance(source, Mapping) or not isinstance(source, Iterable) or hasattr(source, "itertuples"):
        kind, rows = type(source).__name__, " (a DataFrame's rows: frame.to_dict('records'))"
        raise OperantError(f"tasks: a {kind} is not a source; give a list{rows}, a function, a file or a name")
    return "tasks", enumerate(source)


def refuse_splits(source: Mapping[str, object]) -> None:
    """Raises: OperantError for a `DatasetDict`, or a mapping like it from names to rows."""
    rows = [part[:1] if isinstance(part, list) else [part] for part in source.values()]
    if rows and all(first and (hasattr(first[0], "column_names") or isinstance(first[0], Mapping)) for first in rows):
        splits = ", ".join(map(str, source))
        raise OperantError(
            f"tasks: a mapping of splits ({splits}), as a DatasetDict is, is not a source: give one of them, as in "
            f"data[{next(iter(source))!r}]"
        )


def _named(name: str, text_field: str) -> tuple[str, Rows]:
    if name in SOURCES:
        return read(SOURCES.find(name), text_field)
    if name.startswith("builtin:"):
        return _builtin(name.removeprefix("builtin:"))
    there = found(name)
    if not there and len(files := name.split(",")) == 2 and all(map(found, files)):
        return parallel(*map(Path, files))
    path = there or Path(name)
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    if there and there.is_dir():
        train = part_of("train", there)
        require(train, f"tasks: {name!r} is a folder without a file train.* ({_endings()}); give one of its files")
        return _named(str(train), text_field)
    if there and not there.is_file():
        raise OperantError(f"tasks: {name!r} is a pipe or device, and reading it may never end; give a file")
    if there or suffix.removesuffix(".gz") in FORMATS or re.match(r"[.~/\\]", name):
        return path.name.removesuffix(".gz").rsplit(".", 1)[0], _file(path, suffix)
    named = re.fullmatch(r"[\w.-]+(/[\w.-]+){0,2}(:[\w.-]+)?", name, re.ASCII)
    good = named and len(name) <= 200 and not re.fullmatch(r"\.[a-z]\w{1,7}", path.suffix)
    require(good, f"tasks: there is no file {shown(name)}, and a data set of the Hub has a name such as owner/name")
    return _hub(name)


def parallel(one: Path, other: Path) -> tuple[str, Rows]:
    """Rows of two files whose lines are translations of each other: {"translation": {"de": ..., "en": ...}}.

    The languages are the endings of the files, or their names where the endings are equal.
    """
    bare = [Path(path.name.removesuffix(".gz")) for path in (one, other)]
    named = [path.suffix[1:] for path in bare]
    languages = named if len({*named, ""}) == 3 else [path.stem for path in bare]
    if len(set(languages)) < 2:
        raise OperantError(f"tasks: {one} and {other} have one name: name two files of texts, such as test.de,test.en")

    def rows() -> Rows:
        texts = [_explained(path, _txt(path)) for path in (one, other)]
        for number, pair in enumerate(zip_longest(*texts)):
            if None in pair:
                short, more = (one, other) if pair[0] is None else (other, one)
                raise OperantError(
                    f"tasks: {short} has {number} lines, and {more} has more: parallel files have as many lines"
                )
            yield number, {"translation": dict(zip(languages, (text for _, text in pair)))}

    return bare[0].stem, rows()


def part_of(name: str, *folders: Path) -> Path | None:
    """The file that holds a part of a data set, such as `test.tsv.gz`, in the first of the folders that has one."""
    for place in folders:
        paths = [place / f"{name}{suffix}{packed}" for suffix in FORMATS for packed in ("", ".gz")]
        if there := next((path for path in paths if path.is_file()), None):
            return there
    return None


def held_out_of(source: object) -> str | None:
    """The file with the held-out rows of a folder that has a file train.*, or of that file; None for other sources.

    It may stand in the folder above, as few-shot splits share one test file.
    """
    there = found(source) if isinstance(source, str) and not source.startswith("builtin:") else None
    if there is None or part_of("train", folder := there if there.is_dir() else there.parent) is None:
        return None
    if there.is_file() and there != part_of("train", folder):
        return None
    places = folder, folder.resolve().parent
    paths = (part_of(name, *places) for name in ("test", "dev", "validation", "val"))
    return next((str(path) for path in paths if path is not None), None)


def _endings() -> str:
    return " ".join(FORMATS) + ", also followed by .gz"


def _file(path: Path, suffix: str) -> Rows:
    """Numbered rows of a file. Raises: OperantError if it is missing, or its ending unknown."""
    if not found(path):
        parent = found(path.parent)
        others = [p.name for p in parent.iterdir()] if parent and parent.is_dir() else []
        near = difflib.get_close_matches(path.name[:100], others, 1)
        hint = f"did you mean {near[0]!r}?" if near else "check the name"
        raise OperantError(f"tasks: there is no file {shown(str(path), 300)}; {hint}")
    ending = suffix.removesuffix(".gz")
    if ending not in FORMATS:
        raise OperantError(
            f"tasks: {str(path)!r} ends in {suffix or 'nothing'!r}; supported: {_endings()}, or two parallel files "
            "with a comma between them, as train.de,train.en"
        )
    return _explained(path, FORMATS[ending](path))


def _explained(path: Path, rows: Rows) -> Rows:
    try:
        yield from rows
    except UnicodeDecodeError as error:
        raise OperantError(f"tasks: {path} is not UTF-8 ({error.reason} at byte {error.start}); convert it") from error
    except (OSError, EOFError, zlib.error) as error:
        raise OperantError(f"tasks: {path} cannot be read: {' '.join(str(error).split())}; is it complete?") from error


def _open(path: Path) -> TextIO:
    # utf-8-sig: spreadsheets put a byte-order mark before the first field's name.
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return open(path, encoding="utf-8-sig", newline="")


def _lines(path: Path) -> Iterator[str]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if "\0" in line:
                raise OperantError(f"tasks: {path}, line {number} has a NUL: is it UTF-16, or not text? convert it")
            yield line


def _jsonl(path: Path) -> Rows:
    for number, line in enumerate(_lines(path)):
        if line.strip():
            yield number, _parsed(line.rstrip(), f"{path}, line {number + 1}")


def _json(path: Path) -> Rows:
    with _open(path) as file:
        rows = _parsed(file.read(), str(path))
    if not isinstance(rows, list):
        raise OperantError(f"tasks: {path} is of type {type(rows).__name__}; it must be a list of objects or texts")
    yield from enumerate(rows)


def _parsed(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise OperantError(f"tasks: {where}: invalid JSON ({error.msg}, {line}column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        raise OperantError(f"tasks: {where}: this JSON cannot be read ({error}); repair or remove it") from error


def _csv(path: Path) -> Rows:
    csv.field_size_limit(1 << 30)
    first = next(_lines(path), "")
    own = "\t" if ".tsv" in path.suffixes else ","
    separator = own if own in first else max(f"{own},;\t|", key=first.count)  # ; where a comma is decimal
    reader = csv.reader(_lines(path), strict=True, delimiter=separator)
    try:
        header, number, read = next(reader, []), -1, 1
        if len(set(header)) < len(header):
            raise OperantError(f"tasks: {path} has two columns of one name: {', '.join(header)}; rename one")
        for number, row in enumerate(filter(None, reader)):
            if len(row) != len(header):
                cell = f"put a cell that holds {separator!r} in quotes"
                remedy = cell if len(row) > len(header) else f"an empty cell needs its {separator!r} too"
                raise OperantError(
                    f"tasks: {path}, line {reader.line_num}: {len(row)} cells and {len(header)} columns; {remedy}"
                )
            read = reader.line_num
            yield number, dict(zip(header, row, strict=True))
        require(not header or number >= 0, f"tasks: {path} has a header ({shown(header)}), and has no rows below it")
    except csv.Error as error:
        end = "the end of the file" if "end of data" in str(error) else f"line {reader.line_num} ({error})"
        raise OperantError(
            f"tasks: {path}, line {read + 1}: a quote in the row that begins here is not closed correctly before "
            f"{end}; repair its quotes"
        ) from error


def _parquet(path: Path) -> Rows:
    from pyarrow import ArrowException, parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (ArrowException, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise OperantError(f"tasks: {path} is not a readable Parquet file: {reason}; is it complete?") from error
    yield from enumerate(rows)


def _txt(path: Path) -> Rows:
    yield from enumerate(line.rstrip("\r\n") for line in _lines(path))


FORMATS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".txt": _txt,
}


def _builtin(name: str) -> tuple[str, Rows]:
    """Rows of `NAME`, or of its disjoint parts `NAME/train` and `NAME/held-out`, with their numbers in `NAME`."""
    stem, _, part = name.partition("/")
    there = {path.stem: path for path in sorted(BUILTIN.iterdir()) if path.suffix in FORMATS}
    if part not in ("", "train", "held-out") or stem not in there:
        known = ", ".join(f"builtin:{known}" for known in there) or "none in this install"
        raise OperantError(f"tasks 'builtin:{name}' do not exist; built-in: {known}, each with /train and /held-out")
    rows = list(FORMATS[there[stem].suffix](there[stem]))
    cut = len(rows) - HELD_OUT
    return stem, iter({"": rows, "train": rows[:cut], "held-out": rows[cut:]}[part])


def _hub(name: str) -> tuple[str, Rows]:
    """Rows of a data set of the Hub: `owner/name/part:split`, with one of its parts ("3.0.0", "de-en") if it has
    several; the split is `train` by default."""
    name, _, split = name.partition(":")
    name, part = name.rsplit("/", 1) if name.count("/") == 2 else (name, None)
    dataset_name = ALIASES.get(name, name)
    try:
        import datasets
    except ImportError as error:
        remedy = f"pip install 'operant[hub]', or give a file{nearest(name[:100], SOURCES.names())}"
        raise OperantError(f"tasks: {name!r} is not a file here, and a data set of the Hub needs {remedy}") from error
    from huggingface_hub import HfApi

    unreachable = None
    try:
        reach("dataset", dataset_name, lambda: HfApi().dataset_info(dataset_name, timeout=CONNECT_SECONDS))
    except OperantError as error:
        unreachable = error
        datasets.config.HF_HUB_OFFLINE = True  # load_dataset then searches only the cache
    try:
        rows = datasets.load_dataset(*filter(None, (dataset_name, part)), split=split or "train")
    except Exception as error:
        failed = unreachable or OperantError(f"tasks: data set {dataset_name!r} cannot be loaded: {error}")
        raise OperantError(f"{failed}{nearest(name[:100], SOURCES.names())}") from error
    return name.rsplit("/", 1)[-1], enumerate(rows)


def share(value: object) -> float | None:
    """The part that a percentage names, 0.1 of "10%"; None of anything else.

    Raises: OperantError for an impossible one.
    """
    found = re.fullmatch(r"\s*(-?\d{1,9}(?:\.\d{1,9})?)\s*%\s*", value) if isinstance(value, str) else None
    if found is None:
        return None
    if not 0 < (percent := float(found[1])) < 100:
        raise OperantError(f"evaluate={shown(value)}: a share of the tasks is above 0% and below 100%, such as 10%")
    return percent / 100


def rows_that_decide(part: float) -> int:
    """So many tasks tell whether that part of them leaves any to train on: with more, one is left anyway."""
    return int(0.5 / (1 - part)) + 2


def split_off(tasks: list[Task], part: float, seed: int) -> tuple[list[Task], list[Task]]:
    """The tasks to train on and those that are held out, each in the order of `tasks`.

    Which ones are held out depends on the seed and on their ids alone, so it is the same in a resumed run. Labelled
    replies to one prompt stay together: several rows may show the same ones.
    Raises: OperantError for tasks that are too few.
    """
    count = max(1, round(part * len(tasks)))
    none = f"evaluate={100 * part:g}%: of {len(tasks)} tasks none would be left to train on"
    require(count < len(tasks), f"{none}; give more tasks, or name a file of held-out ones")
    of_prompt: dict[str, list[str]] = {}
    for task in tasks:
        of_prompt.setdefault(str(task.prompt) if task.scores else f"id {task.id}", []).append(task.id)
    groups = list(of_prompt.values()) if len(of_prompt) > 1 else [[task.id] for task in tasks]
    groups.sort(key=lambda ids: counter(seed, "held out", ids[0]))
    chosen = set[str]()
    for ids in groups:
        chosen |= {*ids} if len(chosen) + len(ids) <= count else set()
    chosen = chosen or {*min(groups, key=len)}
    return [task for task in tasks if task.id not in chosen], [task for task in tasks if task.id in chosen]
