"""Reads the parquet files of a run by column: whole rows without their tokens, and the tokens of single replies.

A file may be replaced, removed or damaged while it is read, because the run may still be in progress.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from operant.storage import atomic_io
from operant.types import OperantError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

PER_TOKEN = ("tokens", "logprobs", "raw_logprobs", "ref_logprobs", "values", "advantages", "passing")
"""Columns with one entry per token: its text, and the numbers that the page colours it by."""
_COLUMNS = {
    **dict.fromkeys(("task", "query", "reply", "end", "outcome", "message"), "string"),
    **dict.fromkeys(("rollout", "turn", "reply_tokens"), "int64"),
    "reward": "float64",
}
"""Columns with one entry per reply, and their Arrow types."""

Stamp = tuple[int, int, int]


@contextmanager
def reading_run(folder: str | Path) -> Iterator[None]:
    """Turn errors that malformed files of a run cause within the block into an OperantError that names the folder."""
    try:
        yield
    except OperantError:
        raise
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise OperantError(f"{folder} has contents that operant did not write ({reason}): is it complete?") from error


def steps(folder: Path) -> dict[int, Path]:
    """Return the `step-*.parquet` files of a folder by step, in ascending order; empty where it does not exist."""
    found = {atomic_io.step_of(path): path for path in folder.glob("step-*.parquet")}
    return {step: found[step] for step in sorted(step for step in found if step is not None)}


def stamp(path: Path) -> Stamp | None:
    """Return modification time, size and inode, which change when the file does; None where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def lines(path: Path) -> "pa.Table":
    """Read one row per reply as a `pyarrow.Table`: task, query, reply, end, outcome, message, reward, `reward/<part>`,
    rollout, turn, reply_tokens, kl (nats, summed log-prob minus reference log-prob) and row (the index in the file).

    A column that the file lacks is null.
    Raises: OperantError where the file is damaged; FileNotFoundError where it has been removed.
    """
    import numpy as np
    import pyarrow as pa

    table = _read(path, [*_COLUMNS, "logprobs", "raw_logprobs", "ref_logprobs"], parts=True)
    types = _COLUMNS | {name: "float64" for name in table.column_names if name.startswith("reward/")}
    columns = {name: _column(table, name, pa.type_for_alias(alias)) for name, alias in types.items()}
    return pa.table(columns | {"kl": _summed_kl(table), "row": np.arange(table.num_rows)})


def tokens(path: Path, rows: Sequence[int]) -> list[dict[str, list | None]]:
    """Read the `PER_TOKEN` columns of the replies at these row indices, one mapping per reply; None where unknown.

    Raises: OperantError and FileNotFoundError as `lines`; IndexError where the file has no such row.
    """
    import pyarrow as pa

    table = _read(path, PER_TOKEN)
    if any(row >= table.num_rows for row in rows):
        raise IndexError(f"{path} has {table.num_rows} rows")
    picked = table.take(pa.array(rows, pa.int64())).to_pylist()
    return [
        {name: None if row.get(name) is None else [plain(entry) for entry in row[name]] for name in PER_TOKEN}
        for row in picked
    ]


def names(path: Path) -> list[str]:
    with _opened(path) as file:
        return file.schema_arrow.names


def games(path: Path) -> list[dict[str, Any]]:
    """Read the transcripts of the episodes in a file, with the reward, and the critic's value before each turn where
    the file has it.

    Raises as `lines`.
    """
    table, values, found = _read(path, ["game", "rollout", "turn", "values", "reward"]), {}, []
    for row in table.to_pylist():
        values[row["rollout"], row["turn"]] = (row.get("values") or [None])[0]
        if row.get("game"):
            game = json.loads(row["game"])
            for number, turn in enumerate(game["turns"]):
                if (value := values.get((row["rollout"], number))) is not None:
                    turn["value"] = value
            found.append(game | {"reward": row.get("reward")})
    return found


def count(path: Path) -> int:
    with _opened(path) as file:
        return file.metadata.num_rows


def plain(value: object) -> object:
    """Convert a cell for JSON: floats are rounded to three decimals, NaN and infinity become None."""
    if not isinstance(value, float):
        return value
    return round(value, 3) + 0.0 if math.isfinite(value) else None  # + 0.0 turns -0.0 into 0.0


def compute() -> Any:
    """Return `pyarrow.compute`, typed as Any because its functions are generated when it is imported."""
    import pyarrow.compute as module

    return module


def _read(path: Path, names: Sequence[str], parts: bool = False) -> "pa.Table":
    """Read the named columns that the file has; parts: also every `reward/<part>`."""
    with _opened(path) as file:
        available = file.schema_arrow.names
        wanted = [name for name in available if name in names or (parts and name.startswith("reward/"))]
        return file.read(columns=wanted, use_threads=False)


@contextmanager
def _opened(path: Path) -> Iterator["pq.ParquetFile"]:
    """Keep the file open, so that it cannot be replaced between reading its footer and its columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open(path, "rb") as file:
            yield pq.ParquetFile(file)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        name = f"{path.parent.name}/{path.name}"
        raise OperantError(f"{name} cannot be read and is left out: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:160]


def _column(table: "pa.Table", name: str, kind: "pa.DataType") -> "pa.Array":
    """Cast a column to an Arrow type, with nulls for NaN, infinity and a column that is missing."""
    import pyarrow as pa

    pc = compute()
    if name not in table.column_names:
        return pa.nulls(table.num_rows, kind)
    column = table[name].cast(kind).combine_chunks()
    return pc.if_else(pc.is_finite(column), column, None) if pa.types.is_floating(kind) else column


def _summed_kl(table: "pa.Table") -> "pa.Array":
    """Return [rows] log-prob minus reference log-prob, summed over each reply; null where either is unknown."""
    import numpy as np
    import pyarrow as pa

    pc = compute()
    sums = np.full(table.num_rows, np.nan)
    own = "raw_logprobs" if "raw_logprobs" in table.column_names else "logprobs"
    pair = [table[n].combine_chunks() for n in (own, "ref_logprobs") if n in table.column_names]
    if len(pair) == 2 and all(pa.types.is_list(column.type) for column in pair):
        own, reference = (pc.list_value_length(column).fill_null(-1).to_numpy() for column in pair)
        known = (own == reference) & (own >= 0)
        flat = [column.filter(pa.array(known)).flatten().cast(pa.float64()).to_numpy(False) for column in pair]
        place = np.repeat(np.arange(known.sum()), own[known])
        sums[known] = np.bincount(place, weights=flat[0] - flat[1], minlength=known.sum())
    return pa.array(np.where(np.isfinite(sums), sums, np.nan), from_pandas=True)
