"""The parquet files of a run, read column by column: what one line of a table needs, and what one reply's tokens need.

A file may be replaced, removed or damaged while it is read: the run goes on, and so does the reader.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from operant.storage import atomic_io
from operant.types import OperantError

PER_TOKEN = ("logprobs", "ref_logprobs", "values", "advantages")
"""What colours a token; `tokens` are the pieces of text that carry the colours."""
_TEXTS, _NUMBERS, _COUNTS = ("task", "query", "reply", "end"), ("reward",), ("rollout", "turn", "reply_tokens")
_DECIMALS = 3

Stamp = tuple[int, int, int]


@contextmanager
def sound(folder: str | Path) -> Iterator[None]:
    """The block reads files of runs, which somebody else may have written: what is no record of a run is told so."""
    try:
        yield
    except OperantError:
        raise
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        why = f"{type(error).__name__}: {_first(error)}"
        raise OperantError(f"{folder} holds something that no run has written ({why}): is it whole?") from error


def steps(folder: Path) -> dict[int, Path]:
    """The files of a folder by step, in the order of steps; none where there is no folder yet."""
    found = {atomic_io.step_of(path): path for path in folder.glob("step-*.parquet")}
    return {step: found[step] for step in sorted(step for step in found if step is not None)}


def stamp(path: Path) -> Stamp | None:
    """What changes when the file is replaced or written to; None where it is not there."""
    try:
        known = path.stat()
    except OSError:
        return None
    return known.st_mtime_ns, known.st_size, known.st_ino


def lines(path: Path) -> Any:
    """One line a reply, as a `pyarrow.Table`: task, query, reply, end, reward, `reward/<part>`, rollout, turn,
    reply_tokens, kl (nats: its log-prob minus the reference's) and row, its place in the file.

    A column that the file lacks is null. Raises: OperantError where the file is damaged; FileNotFoundError where it
    was removed meanwhile.
    """
    import numpy as np
    import pyarrow as pa

    table = _read(path, [*_TEXTS, *_NUMBERS, *_COUNTS, "logprobs", "ref_logprobs"], parts=True)
    kinds = dict.fromkeys(_TEXTS, pa.string()) | dict.fromkeys(_COUNTS, pa.int64())
    kinds |= {name: pa.float64() for name in table.column_names if name.startswith("reward/")}
    kinds |= dict.fromkeys(_NUMBERS, pa.float64())
    made = {name: _column(table, name, kind) for name, kind in kinds.items()}
    made |= {"kl": _kl(table), "row": np.arange(table.num_rows)}
    return pa.table(made)


def tokens(path: Path, rows: Sequence[int]) -> list[dict[str, list | None]]:
    """Pieces and numbers of every token of the replies at these places of a file, one mapping a reply; None: unknown.

    Raises: OperantError and FileNotFoundError as `lines`; IndexError where the file has no such row.
    """
    import pyarrow as pa

    table = _read(path, ["tokens", *PER_TOKEN])
    if any(row >= table.num_rows for row in rows):
        raise IndexError(f"{path} has {table.num_rows} rows")
    names = [name for name in ("tokens", *PER_TOKEN) if name in table.column_names]
    picked = table.select(names).take(pa.array(rows, pa.int64())).to_pylist()
    return [{name: _rounded(row.get(name)) for name in ("tokens", *PER_TOKEN)} for row in picked]


def count(path: Path) -> int:
    """How many rows a file has. Raises as `lines`."""
    with _opened(path) as file:
        return file.metadata.num_rows


def rounded(number: float | None) -> float | None:
    """To three decimals; None where it is not finite, which JSON cannot say."""
    if number is None or not math.isfinite(number):
        return None
    return round(number, _DECIMALS) + 0.0  # no -0.0


def _rounded(column: list | None) -> list | None:
    return None if column is None else [x if isinstance(x, str) else rounded(x) for x in column]


def _read(path: Path, names: Sequence[str], parts: bool = False) -> Any:
    with _opened(path) as file:
        have = file.schema_arrow.names
        wanted = [name for name in have if name in names or (parts and name.startswith("reward/"))]
        return file.read(columns=wanted, use_threads=False)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file, held open: a replacement cannot come between its footer and its columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open(path, "rb") as file:
            yield pq.ParquetFile(file)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise OperantError(f"{path.parent.name}/{path.name} cannot be read and is left out: {_first(error)}") from error


def _first(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:160]


def _column(table: Any, name: str, kind: Any) -> Any:
    import pyarrow as pa

    pc = compute()
    if name not in table.column_names:
        return pa.nulls(table.num_rows, kind)
    column = table[name].cast(kind).combine_chunks()
    return pc.if_else(pc.is_finite(column), column, None) if pa.types.is_floating(kind) else column


def _kl(table: Any) -> Any:
    """[rows] sums over each reply; null where either model's log-probs are unknown."""
    import numpy as np
    import pyarrow as pa

    pc = compute()
    sums = np.full(table.num_rows, np.nan)
    pair = [table[n].combine_chunks() for n in ("logprobs", "ref_logprobs") if n in table.column_names]
    if len(pair) == 2 and all(pa.types.is_list(column.type) for column in pair):
        own, reference = (pc.list_value_length(column).fill_null(-1).to_numpy() for column in pair)
        known = (own == reference) & (own >= 0)
        flat = [column.filter(pa.array(known)).flatten().cast(pa.float64()).to_numpy(False) for column in pair]
        place = np.repeat(np.arange(known.sum()), own[known])
        sums[known] = np.bincount(place, weights=flat[0] - flat[1], minlength=known.sum())
    return pa.array(np.where(np.isfinite(sums), sums, np.nan), from_pandas=True)


def compute() -> Any:
    """`pyarrow.compute`, whose functions are made when it is imported, so that a type checker knows none."""
    import pyarrow.compute as module

    return module
