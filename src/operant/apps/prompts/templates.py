"""The text around a prompt, `PromptTemplate("{sentence} {prompt} {mask} .")`, and that of published sets.

These are the few-shot classification sets of RLPrompt (arXiv:2205.12548), and the built-in one.
"""

import re
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import NamedTuple

from operant.types import OperantError, shown

SLOTS = ("sentence", "prompt", "mask")
"""What may stand in braces."""
MASKED = "{sentence} {prompt} {mask} ."
"""The template of a model that fills a mask."""
CAUSAL = "{sentence} {prompt}"
"""The template of a model that goes on after the text; a black-box model has it too."""


@dataclass(frozen=True)
class PromptTemplate:
    """Where sentence, prompt and mask stand; everything else is text as it is.

    Raises: OperantError for a template without `{sentence}` or `{prompt}`, with a slot twice, or with an unknown one.
    """

    text: str
    """With each slot in braces."""
    lead: str = ""
    """Text before it all, in which braces mean nothing: examples for in-context learning."""

    def __post_init__(self) -> None:
        slots = re.findall(r"\{(\w*)\}", self.text)
        wrong = (
            [f"{{{slot}}} is no slot" for slot in slots if slot not in SLOTS]
            + [f"{{{slot}}} is missing" for slot in ("sentence", "prompt") if slot not in slots]
            + [f"{{{slot}}} stands there twice" for slot in SLOTS if slots.count(slot) > 1]
        )
        if wrong:
            raise OperantError(
                f"template {shown(self.text)}: {wrong[0]}; write {{sentence}} and {{prompt}} once each, and {{mask}} "
                "for a model that fills one: '{sentence} {prompt} {mask} .'"
            )

    @property
    def has_mask(self) -> bool:
        """Whether it has a slot for the mask."""
        return "{mask}" in self.text

    def behind(self, lead: str) -> "PromptTemplate":
        """The same template behind a text."""
        return replace(self, lead=lead + self.lead)

    def pieces(self, prompt: str, sentence: str, mask: str = "") -> list[tuple[str, str]]:
        """The filled template as (slot, text) in order; of text between slots, the slot is empty.

        An empty prompt takes one of the spaces beside it along.
        """
        text = self.text
        if not prompt:
            text = re.sub(r" \{prompt\}|\{prompt\} ", "{prompt}", text, count=1)
        filled = {"sentence": sentence, "prompt": prompt, "mask": mask}
        split = re.split(r"\{(\w+)\}", text)  # text and slots in turn
        pieces = [(piece, filled[piece]) if i % 2 else ("", piece) for i, piece in enumerate(split) if piece]
        return [("", self.lead), *pieces]

    def render(self, prompt: str, sentence: str, mask: str = "") -> str:
        """The filled template: what the task model reads."""
        return "".join(text for _, text in self.pieces(prompt, sentence, mask))

    def before(self, slot: str, prompt: str, sentence: str, mask: str = "") -> str:
        """The filled template as far as a slot that it has."""
        pieces = self.pieces(prompt, sentence, mask)
        return "".join(text for _, text in pieces[: [name for name, _ in pieces].index(slot)])


class ClassificationSet(NamedTuple):
    """A set of labelled texts: label i is written as `words[i]`."""

    name: str
    words: tuple[str, ...]
    masked: str = MASKED
    """The template of a masked model."""
    causal: str = CAUSAL
    """The template of a causal model."""


_TABLE = """
sst-2 yelp-2 mr cr opinions | terrible great
sst-5 yelp-5 | terrible bad okay good great
agnews | World Sports Business Tech
subj | subjective objective
trec | Description Entity Expression Human Location Number
yahoo | culture science health education computer sports business music family politics
dbpedia | Company Education Artist Sports Office Transportation Building Natural Village Animal Plant Album Film Written
"""
SETS = {
    name: ClassificationSet(name, tuple(words.split()))
    for names, words in (line.split(" | ") for line in _TABLE.strip().splitlines())
    for name in names.split()
}
"""By name."""
SETS["opinions"] = SETS["opinions"]._replace(causal="{sentence}{prompt}")  # builtin:opinions
SETS["agnews"] = SETS["agnews"]._replace(masked="{mask} {prompt} {sentence}")
_ALIASES = {"ag-news": "agnews", "yelp-p": "yelp-2", "yelp-polarity": "yelp-2", "yahoo-answers": "yahoo"}


def set_named(name: str) -> ClassificationSet | None:
    """The set of a name or alias, or of a path with one, `sst-2`, `ag_news`, `data/SST2/16-100/train.tsv`; or None."""
    for part in reversed(PurePath(name.strip().lower().removeprefix("builtin:").replace("_", "-")).parts):
        wanted = _ALIASES.get(stem := part.partition(".")[0], stem)
        for key, found in SETS.items():
            if wanted in (key, key.replace("-", "")):
                return found
    return None
