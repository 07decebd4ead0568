"""Words and sentences of a text, n-grams, and a measure of what two texts share. Tokenizers have names."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

from operant.import_by_name import Table
from operant.types import OperantError, of_user, shown

_SENTENCE = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|\n+")


def is_mark(character: str) -> bool:
    """Whether it stands on a letter, as accents and vowel signs do. What chooses between text and emoji does not."""
    return unicodedata.category(character) in ("Mn", "Mc") and character not in "\ufe0e\ufe0f"


def words(text: str) -> list[str]:
    """Return the lower-cased runs of letters, digits and underscores, with the marks that stand on them."""
    text = text.lower()
    marks = "" if text.isascii() else "".join(sorted(filter(is_mark, {*text})))  # those of Unicode are 2,000
    return re.findall(rf"\w[\w{marks}]*", text)


def spaces(text: str) -> list[str]:
    """Return the lower-cased pieces between spaces, for text that is tokenised already."""
    return text.lower().split()


def sentences(text: str) -> list[str]:
    """Return the sentences: pieces that end with . ! ? or … before a space, or at a line break."""
    return [piece.strip() for piece in _SENTENCE.split(text) if piece.strip()]


def ngrams(tokens: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def top_word(texts: Sequence[str]) -> tuple[str, float]:
    """Return the most common word of all texts and its share of their words; ("", 0.0) if there are no words."""
    counts = Counter(word for text in texts for word in words(text))
    [(word, count)] = counts.most_common(1) or [("", 0)]
    return word, count / max(1, counts.total())


TOKENIZERS = Table(
    "tokenizer",
    "operant.tokenizers",
    {
        "words": words,
        "spaces": spaces,
        "rouge": "operant.apps.text.rouge_score:tokens",
        "13a": "operant.apps.text.sacrebleu:tokens",
        "treebank": "operant.apps.text.nltk:tokens",
    },
)
"""Functions from a text to its words, all of which lower-case."""


def tokenizer(name: str) -> Callable[[str], list[str]]:
    """The function of a name, or of `module:function`."""
    found = TOKENIZERS.find(name)
    with of_user(f"tokenizer {name!r} fails on a text: "):
        tried = found("A word.")
    if not isinstance(tried, list) or not all(isinstance(word, str) for word in tried):
        raise OperantError(f"tokenizer {name!r} makes {shown(tried)} of 'A word.': it must return a list of words")
    return found


def f_measure(precision: float, recall: float) -> float:
    """The harmonic mean of precision and recall; 0 if both are 0."""
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0
