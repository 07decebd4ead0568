"""Rows as public data sets publish them, written by hand, and tiny models for the tests of the road."""

import json
from pathlib import Path

from toys import letters, lm

ROWS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Rows of each set by the name of its form and recipe, with the fields of the published one."""


def write(folder: Path, name: str) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]), encoding="utf-8")
    return str(path)


def models(folder: Path) -> dict[str, str]:
    """Folders of a tiny causal model and a tiny T5, with a tokenizer of letters."""
    made = {"causal": lm("llama", vocab=37, spread=0.1, max_position_embeddings=256), "t5": lm("t5", vocab=37)}
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
