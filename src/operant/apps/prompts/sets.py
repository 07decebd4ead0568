"""The few-shot classification sets of RLPrompt (arXiv:2205.12548), and the built-in one: words and templates."""

from pathlib import PurePath
from typing import NamedTuple

MASKED = "{sentence} {prompt} {mask} ."
"""The template of a model that fills a mask."""
CAUSAL = "{sentence} {prompt}"
"""The template of a model that goes on after the text; a black-box model has it too."""


class ClassificationSet(NamedTuple):
    """A set of labelled texts: label i is written as `words[i]`."""

    name: str
    words: tuple[str, ...]
    masked: str = MASKED
    """The template of a masked model."""
    causal: str = CAUSAL
    """The template of a causal model."""


_POLARITY = ("terrible", "great")
_STARS = ("terrible", "bad", "okay", "good", "great")
_FIRST = "{mask} {prompt} {sentence}"
SETS = {
    found.name: found
    for found in (
        ClassificationSet("opinions", _POLARITY, causal="{sentence}{prompt}"),  # builtin:opinions
        ClassificationSet("sst-2", _POLARITY),
        ClassificationSet("yelp-2", _POLARITY),
        ClassificationSet("mr", _POLARITY),
        ClassificationSet("cr", _POLARITY),
        ClassificationSet("sst-5", _STARS),
        ClassificationSet("yelp-5", _STARS),
        ClassificationSet("agnews", ("World", "Sports", "Business", "Tech"), _FIRST),
        ClassificationSet("subj", ("subjective", "objective")),
        ClassificationSet("trec", ("Description", "Entity", "Expression", "Human", "Location", "Number")),
        ClassificationSet(
            "yahoo",
            (
                *("culture", "science", "health", "education", "computer"),
                *("sports", "business", "music", "family", "politics"),
            ),
        ),
        ClassificationSet(
            "dbpedia",
            (
                *("Company", "Education", "Artist", "Sports", "Office", "Transportation", "Building"),
                *("Natural", "Village", "Animal", "Plant", "Album", "Film", "Written"),
            ),
        ),
    )
}
"""By name."""
_ALIASES = {"ag-news": "agnews", "yelp-p": "yelp-2", "yelp-polarity": "yelp-2", "yahoo-answers": "yahoo"}


def set_named(name: str) -> ClassificationSet | None:
    """The set of a name or alias, or of a path with one, `sst-2`, `ag_news`, `data/SST2/16-100/train.tsv`; or None."""
    for part in reversed(PurePath(name.strip().lower().removeprefix("builtin:").replace("_", "-")).parts):
        wanted = _ALIASES.get(part, part).partition(".")[0]
        for key, found in SETS.items():
            if wanted in (key, key.replace("-", "")):
                return found
    return None
