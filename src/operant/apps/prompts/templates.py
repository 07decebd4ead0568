"""The text around a prompt: `PromptTemplate("{sentence} {prompt} {mask} .")`."""

import re
from dataclasses import dataclass, replace

from operant.types import OperantError, shown

SLOTS = ("sentence", "prompt", "mask")
"""What may stand in braces."""


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

    @property
    def sentence_first(self) -> bool:
        """Whether the prompt stands behind the sentence, so that a causal model reads equal sentences equally."""
        return self.text.index("{sentence}") < self.text.index("{prompt}")

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
        return [("", self.lead)] + [
            (piece, filled[piece]) if i % 2 else ("", piece) for i, piece in enumerate(split) if piece
        ]

    def render(self, prompt: str, sentence: str, mask: str = "") -> str:
        """The filled template: what the task model reads."""
        return "".join(text for _, text in self.pieces(prompt, sentence, mask))

    def before(self, slot: str, prompt: str, sentence: str, mask: str = "") -> str:
        """The filled template as far as a slot that it has."""
        pieces = self.pieces(prompt, sentence, mask)
        return "".join(text for _, text in pieces[: [name for name, _ in pieces].index(slot)])
