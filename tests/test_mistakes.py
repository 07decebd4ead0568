"""Every mistake of the table gets a sentence, no traceback, and docs/mistakes.md has it."""

import re
from dataclasses import fields
from pathlib import Path

import mistakes
import pytest
from transformers import GenerationConfig, TrainingArguments

from operant import OperantError
from operant import options as other_names
from operant.algorithms import ALGORITHMS
from operant.options import names, resolve
from operant.runs.config import config_schema

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
    answer = mistakes.answer_to(typed, folder, space)
    assert not re.search(NEEDLESS, answer) and len(answer) < 500
    assert mistakes.row(typed, answer) in PAGE, f"run `make docs`; now it says: {answer}"


def test_the_page_has_no_other_rows():
    assert PAGE.count("\n| `") == len(ROWS) == len(set(ROWS))


def test_names_of_other_systems_are_answered_with_options():
    schemas = [config_schema(method) for method in ALGORITHMS]
    ours = {full for schema in schemas for full in names(schema)} | {"out", "resume", "tokenizer"}
    for system in other_names.SYSTEMS.values():
        for name, theirs in system.items():
            assert set(theirs.ours.split(", ")) - {""} <= ours, name
            assert theirs.ours or theirs.note, name
            try:
                resolve(schemas[0], {name: 1})
            except OperantError as error:
                assert other_names.answer(name) in str(error) or "ambiguous" in str(error)


def test_the_names_are_those_of_transformers():
    arguments = {f.name for f in fields(TrainingArguments)} | {"warmup_ratio"}  # until transformers 4
    assert set(other_names.TRANSFORMERS) <= arguments and set(other_names.GENERATION) <= set(vars(GenerationConfig()))
