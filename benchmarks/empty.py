"""What the tables of experiments still lack: `python -m benchmarks.empty`, a second.

`benchmarks/tables.toml` says which rows each table has when it is whole; a row is filled when a committed result has
it. A missing row takes as long as the committed rows of its kind (the first value that the table names) on one core.
`--rows` names the missing rows.
"""

import argparse
import itertools
import json
import statistics
import tomllib
from pathlib import Path
from typing import Any

TABLES, RESULTS = Path(__file__).with_name("tables.toml"), Path(__file__).with_name("results")


def cells(table: dict[str, Any]) -> list[dict[str, Any]]:
    """Every row that the table has when it is whole."""
    grids = [[dict(zip(grid, values)) for values in itertools.product(*grid.values())] for grid in table["cells"]]
    return [cell for grid in grids for cell in grid]


def measured(table: dict[str, Any]) -> list[dict[str, Any]]:
    """The committed rows."""
    path = RESULTS / table.get("results", "none yet")
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return found["rows"] if isinstance(found, dict) else found


def missing(table: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the whole table that no committed row is, told by the values that the table names."""
    return [cell for cell in cells(table) if not any(cell.items() <= _plain(row).items() for row in rows)]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if isinstance(value, (str, int, float))}


def minutes(table: dict[str, Any], rows: list[dict[str, Any]], cell: dict[str, Any]) -> float:
    """Minutes that a missing row takes: those of the rows of its kind, else of all rows, else what the table says."""
    taken = [(row, row.get("minutes", row.get("seconds"))) for row in rows]
    taken = [(row, t if "minutes" in row else t / 60) for row, t in taken if isinstance(t, (int, float))]
    kind = [t for row, t in taken if row.get(next(iter(cell))) == next(iter(cell.values()))]
    return statistics.mean(kind or [t for _, t in taken] or [table["minutes"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="name each missing row")
    shows_rows = parser.parse_args().rows
    empty, hours = 0, 0.0
    for table in tomllib.loads(TABLES.read_text(encoding="utf-8"))["table"]:
        lacking = missing(table, rows := measured(table))
        needs = sum(minutes(table, rows, cell) for cell in lacking) / 60
        empty, hours = empty + len(lacking), hours + needs
        count = len(cells(table))
        print(f"{count - len(lacking):4} of {count:3} rows, {needs:5.1f} h to go: {table['name']}")
        if lacking:
            print(f"{'':27}{table.get('command', 'no command yet')}")
        for cell in lacking if shows_rows else ():
            print(f"{'':29}{', '.join(f'{name} {value}' for name, value in cell.items())}")
    print(f"{empty} rows are empty; they take about {hours:.0f} hours of one core")


if __name__ == "__main__":
    main()
