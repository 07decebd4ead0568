"""The tables of the pages are what was measured."""

import json
from pathlib import Path

import pytest
from benchmarks import ahead, carried
from benchmarks.kept import needed, places

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("script", "rows"), [(ahead, 5), (carried, 4)])
def test_the_table_of_the_page_is_what_was_measured(script, rows):
    result = json.loads(script.RESULTS.read_text(encoding="utf-8"))
    page, table = (ROOT / "docs/engines.md").read_text(encoding="utf-8"), script.table(result["rows"])
    assert len(table) == rows and "\n".join(table) in page and result["command"] in page


def test_a_quick_run_leaves_nothing_that_the_real_one_takes(monkeypatch):
    usual = places("bench-a", "a")
    monkeypatch.setattr("sys.argv", ["a", "--quick"])
    assert not {*usual} & {*places("bench-a", "a")}
    with pytest.raises(SystemExit, match=r"none is missing: run python -m benchmarks\.programs first"):
        needed(ROOT / "none", "python -m benchmarks.programs")
