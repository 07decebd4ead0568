"""Rows as public data sets publish them, written by hand, and tiny models for the tests of the road."""

import json
from pathlib import Path

from toys import letters, lm


def cell(value, header=False, span=1):
    return {"value": value, "is_header": header, "column_span": span, "row_span": 1}


TABLE = [
    [cell("Year", True), cell("Points", True, 2)],
    [cell("2010", True), cell("15.3"), cell("7")],
    [cell("2011", True), cell("16"), cell("8")],
]
ROWS = {
    "imdb": [
        {"text": "The film was good and my brother liked it a lot", "label": 1},
        {"text": "A dull plot , and nobody cares in the end at all", "label": 0},
    ],
    "summarize": [
        {"id": "1", "article": "A dog ran. It fell into a sea. Then it swam home.", "highlights": "A dog swam home ."},
        {"id": "2", "article": "The sun rose. Birds sang. A cat slept on.", "highlights": "A cat slept ."},
    ],
    "translate": [
        {"translation": {"de": "Ein Hund rennt.", "en": "A dog runs."}},
        {"translation": {"de": "Die Katze ruht.", "en": "The cat rests."}},
    ],
    "commongen": [
        {"concept_set_idx": 0, "concepts": ["dog", "run"], "target": "A dog runs home."},
        {"concept_set_idx": 0, "concepts": ["dog", "run"], "target": "The dog can run."},
        {"concept_set_idx": 1, "concepts": ["cat", "sleep"], "target": "A cat sleeps."},
    ],
    "totto": [
        {
            "table": TABLE,
            "table_page_title": "Ann Lee",
            "table_section_title": "College",
            "table_section_text": "",
            "highlighted_cells": [[1, 1], [2, 2]],
            "example_id": -7,
            "overlap_subset": True,
            "sentence_annotations": [{"original_sentence": "x", "final_sentence": "Ann Lee scored 15.3."}],
        }
    ],
    "narrativeqa": [
        {
            "document": {
                "id": "a",
                "kind": "movie",
                "summary": {"text": "Ann left home.", "tokens": []},
                "text": "Long.",
            },
            "question": {"text": "Who left?", "tokens": ["Who"]},
            "answers": [{"text": "Ann", "tokens": []}, {"text": "Ann did", "tokens": []}],
        }
    ],
    "dialog": [
        {"dialog": ["Hi .", "Hello !", "Tea ?", "Yes ."], "act": [1, 2, 3, 4], "emotion": [0, 0, 0, 4]},
        {"dialog": ["Bye .", "See you ."], "act": [1, 1], "emotion": [0, 0]},
    ],
    "extract": [
        {"paper_id": "p", "title": "Dogs", "source": ["A dog ran.", "It fell.", "It swam."], "target": ["A dog swam."]},
        {"paper_id": "q", "title": "Cats", "source": ["A cat sat.", "It slept."], "target": ["A cat slept."]},
    ],
}
"""Rows of each set by the name of its form and recipe, with the fields of the published one."""


def write(folder: Path, name: str) -> str:
    """The rows of a form as a file; returns its path."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]), encoding="utf-8")
    return str(path)


def models(folder: Path) -> dict[str, str]:
    """Folders of a tiny causal model and a tiny T5, with a tokenizer of letters."""
    wide = {"max_position_embeddings": 256}
    made = {"causal": lm("llama", vocab=37, spread=0.1, **wide), "t5": lm("t5", vocab=37)}
    for name, model in made.items():
        model.save_pretrained(folder / name)
        letters().save_pretrained(folder / name)
    return {name: str(folder / name) for name in made}


def a_model(folder: Path, *, weights: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    if weights:
        (folder / "model.safetensors").write_bytes(b"")
    return folder
