"""Reads the metrics that other programs have logged: rows of numbers by name, in the order of their steps.

    read_log("wandb/offline-run-1/run-1.wandb")   # or a file of TensorBoard, trainer_state.json, CSV, JSON lines

Text is the output of a console: verl's `step:12 - actor/entropy:0.3 - ...`, or lines with a mapping, as transformers'
trainers and OpenRLHF print them.
"""

import ast
import csv
import io
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from operant.import_by_name import extra
from operant.storage import atomic_io
from operant.types import OperantError, require, shown

STEPS = ("train/global_step", "training/global_step", "global_step", "step", "Step", "iteration", "_step")
"""Names of the step, the first of which counts. W&B's own, the last one, counts calls."""
BLOCK, HEADER = 32768, struct.Struct("<IHB")
"""Of W&B's files: records are cut into pieces, each with a checksum, its size and its kind, which fill blocks."""
PATTERNS = "trainer_state.json *.wandb *tfevents* **/*.wandb **/*tfevents* **/trainer_state.json".split()
"""Names of the log in a folder, the first of which counts."""
LOGS = "trainer_state.json, run-*.wandb, *tfevents*, .csv, .jsonl, or what was printed"

Row = dict[str, float]


def read_log(path: str | Path) -> list[Row]:
    """The rows of a log, each with its `step`; those of one step are one row. NaN and infinity stay as they are.

    Raises: OperantError for what cannot be read as a log, and for a package that is missing.
    """
    file, rows = _file(Path(path)), dict[float, Row]()
    kinds = {".wandb": _wandb, ".csv": _csv, ".tsv": _csv, ".json": _json, ".jsonl": _jsonl, ".ndjson": _jsonl}
    reader = kinds.get(file.suffix, _text)
    if "tfevents" in file.name and reader is not _wandb:
        reader = _tensorboard
    for number, record in enumerate(reader(file), 1):
        numbers = {name: x for name, value in _flat(record) if (x := _number(value)) is not None}
        step = next((numbers[name] for name in STEPS if name in numbers), float(number))
        if any(name not in STEPS for name in numbers):
            rows.setdefault(step, {"step": step}).update({k: x for k, x in numbers.items() if k not in STEPS})
    require(rows, f"{file} has no metrics that can be read: give the log of a training, one of {LOGS}")
    return [rows[step] for step in sorted(rows)]


def _file(path: Path) -> Path:
    if path.is_dir():
        for pattern in PATTERNS:
            if found := sorted(path.glob(pattern), key=lambda file: file.stat().st_mtime):
                return found[-1]
        require(not (path / "config.yaml").is_file(), f"{path} has logged no step yet: wait, or resume that run")
        raise OperantError(f"{path} is a folder without a log: there is none of {LOGS}")
    require(path.is_file(), f"there is no file {path}: give a run folder, or the log of a training")
    return path


def _flat(record: Mapping[str, object], before: str = "") -> Iterator[tuple[str, object]]:
    """Numbers by name; of nested mappings, by names with slashes. verl's files have them in `data`."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, before if not before and name == "data" else f"{before}{name}/")
        else:
            yield f"{before}{name}", value


def _number(value: object) -> float | None:
    if isinstance(value, str):
        value = re.sub(r"^np\.\w+\((.*)\)$", r"\1", value.strip())
    with suppress(TypeError, ValueError):
        return None if isinstance(value, bool) or value is None or value == "" else float(value)
    return None


def _read(file: Path) -> str:
    with atomic_io.explained(file, "read"):
        data = file.read_bytes()
    require(b"\0" not in data[:4096], f"{file} is no text, and its name is none of a log: give one of {LOGS}")
    return data.decode("utf-8-sig", errors="replace")  # spreadsheets write a byte-order mark


def _json(file: Path) -> Iterable[Mapping[str, object]]:
    try:
        whole = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise OperantError(f"{file} is not valid JSON ({error}): is it complete?") from error
    rows = whole.get("log_history") if isinstance(whole, dict) else whole
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise OperantError(f"{file} has no log_history, as trainer_state.json does, and is no list of objects")
    return rows


def _jsonl(file: Path) -> Iterator[Mapping[str, object]]:
    lines = [*io.StringIO(_read(file))]  # `splitlines` ends lines within texts, too
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # it is being written
                return
            raise OperantError(f"{file}, line {number}: invalid JSON ({error}); repair or remove it") from error
        if not isinstance(row, dict):
            raise OperantError(f"{file}, line {number} is {shown(row)}; it must be an object of numbers by name")
        yield row


def _csv(file: Path) -> Iterator[Mapping[str, object]]:
    """The columns by name; those that W&B exports have the run before it, and the smallest and largest beside it."""
    table = csv.reader(io.StringIO(_read(file)), delimiter="\t" if file.suffix == ".tsv" else ",")
    try:
        header, *rows = table
    except (ValueError, csv.Error) as error:
        raise OperantError(f"{file} is no table: its first line must name the columns") from error
    names = [name.rpartition(" - ")[2].strip() for name in header]
    twice = next((name for name in names if name and names.count(name) > 1), None)
    require(twice is None, f"{file} has several columns of {twice}: give those of one run")
    for row in rows:
        yield {name: cell for name, cell in zip(names, row) if not name.endswith(("__MIN", "__MAX"))}


def _text(file: Path) -> Iterator[Mapping[str, object]]:
    for line in _read(file).splitlines():
        if (verl := re.search(r"\bstep:\d+ - .*", line)) is not None:
            yield {name: value for name, _, value in (part.partition(":") for part in verl[0].split(" - "))}
        elif (printed := re.search(r"(?:global step (\d+)\D*)?(\{.*\})", line, re.IGNORECASE)) is not None:
            plain = re.sub(r"np\.\w+\(([^()]*)\)", r"\1", printed[2])
            bare = re.sub(r"(?<=[:\s(])(nan|-?inf)(?=[,}\s)])", r"'\1'", plain)
            with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                if isinstance(row := ast.literal_eval(bare), dict):
                    yield {str(name): x for name, x in row.items()} | ({"step": printed[1]} if printed[1] else {})


def _wandb(file: Path) -> Iterator[Mapping[str, object]]:
    with extra(f"reading {file} needs wandb", "wandb"):
        from wandb.proto import wandb_internal_pb2
    data, place, whole = file.read_bytes(), 7, b""
    require(data.startswith(b":W&B"), f"{file} does not begin as a file of W&B: is it complete?")
    while place + HEADER.size <= len(data):
        if BLOCK - place % BLOCK < HEADER.size:  # what is left of the block holds no piece
            place += BLOCK - place % BLOCK
            continue
        _, size, kind = HEADER.unpack_from(data, place)
        place, whole = place + HEADER.size + size, whole + data[place + HEADER.size : place + HEADER.size + size]
        if kind not in (1, 4):  # the record goes on
            continue
        try:
            record, whole = vars(wandb_internal_pb2)["Record"].FromString(whole), b""
        except Exception as error:  # protobuf's own
            raise OperantError(f"{file} is broken at byte {place} ({type(error).__name__})") from error
        if record.history.item:
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            yield {"_step": record.history.step.num, **row}


def _tensorboard(file: Path) -> Iterator[Mapping[str, object]]:
    with extra(f"reading {file} needs tensorboard", "tensorboard"):
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util import tensor_util
    if file.stat().st_size and not file.read_bytes()[:64].strip(b"\0"):
        raise OperantError(f"{file} holds zeros alone: was it cut off?")
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            with suppress(TypeError, ValueError):  # a text, an image
                yield {"step": event.step, value.tag: float(tensor_util.make_ndarray(value.tensor))}
