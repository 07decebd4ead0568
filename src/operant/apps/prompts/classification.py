"""Labelled texts as tasks whose replies are prompts: the row form `prompt`."""

from collections.abc import Mapping
from typing import Any

from operant.data.forms import found_in, place_of, text_of
from operant.types import OperantError

TEXTS, LABELS = ("text", "sentence", "review", "content"), ("label", "labels", "class")


def prompt(rows: Mapping[str, Any], *, start: str = "Prompt:", conditioned: bool = False) -> list[dict[str, Any]]:
    """All rows of a source, {"rows": [...], "source": its name}, as one task, whose reply is a prompt for all texts.

    Rows have a text and a label, the number of its class. The task's target has the name of the set and `examples`, the
    pairs of text and label. start: what the policy reads. conditioned: one task for each row instead, of which the
    policy reads the text, and writes a prompt for it alone.
    """
    pairs = [_pair(row, number) for number, row in enumerate(rows["rows"])]
    if pairs and len({label for _, label in pairs}) < 2:
        raise OperantError(
            f"all {len(pairs)} rows have the label {pairs[0][1]}: there is nothing to tell apart; give rows of two "
            "classes at least"
        )
    target = {"name": rows["source"]}
    if conditioned:
        return [{"prompt": text, "target": target | {"examples": [[text, label]]}} for text, label in pairs]
    return [{"prompt": start, "target": target | {"examples": [list(pair) for pair in pairs]}}]


prompt.whole = True  # type: ignore[attr-defined]
"""It reads all rows of a source at once (`data.forms.formed`)."""


def _pair(row: Any, number: int) -> tuple[str, int]:
    """The text and the label of a row. Raises: OperantError with its number if it has none."""
    try:
        if not isinstance(row, Mapping):
            raise OperantError(f"it is of type {type(row).__name__} and no mapping with a text and a label")
        text, label = text_of(found_in(row, TEXTS), "the text"), found_in(row, LABELS)
        if isinstance(label, bool) or not str(label).strip().isdecimal():
            raise OperantError(f"the label is {label!r}; it must be the number of a class: 0, 1, ...")
        if not text.strip():
            raise OperantError("the text is empty; leave the row out")
        return text, int(label)
    except OperantError as error:
        raise OperantError(f"{place_of(number)}: {error}") from error
