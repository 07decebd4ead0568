"""Every mistake of the table gets a sentence, no traceback, and docs/mistakes.md has it."""

import re
from pathlib import Path

import mistakes
import pytest

PAGE = (Path(__file__).parents[1] / "docs/mistakes.md").read_text(encoding="utf-8")
ROWS = [typed for part in mistakes.TABLE.values() for typed in part]
NEEDLESS = r"Traceback|Error\(|object is not|unexpected keyword|\bNoneType\b"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("me")
    return folder, mistakes.prepare(folder)


@pytest.mark.parametrize("typed", ROWS)
def test_a_mistake_gets_the_sentence_of_the_page(typed, place, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder, space = place
    answer = mistakes.said(typed, folder, space)
    assert not re.search(NEEDLESS, answer) and len(answer) < 500
    assert mistakes.row(typed, answer) in PAGE, f"run `make docs`; now it says: {answer}"


def test_the_page_has_no_other_rows():
    assert PAGE.count("\n| `") == len(ROWS) == len(set(ROWS))
