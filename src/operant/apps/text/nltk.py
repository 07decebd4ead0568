"""METEOR by nltk, and nltk's tokenizer and stemmer, which need no data."""

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

from operant.import_by_name import extra
from operant.rewards.text_scores import Score, of_several
from operant.rewards.words import tokenizer as tokenizer_of
from operant.types import OperantError

WORDNET = "python -m nltk.downloader wordnet"
"""The command that fetches WordNet's data, which nothing here does by itself."""


class Meteor(Score):
    """METEOR (Lavie and Agarwal, 2007) by nltk, 0 to 1: words match if they are equal, have one stem, or are synonyms.

    F = P R / (alpha P + (1 - alpha) R) of the matched words, times 1 - gamma (chunks / matches)^beta.
    synonyms: those of WordNet, whose data nltk must have; False: equal words and stems alone. tokenizer: `treebank`,
    nltk's own, or another of `words.TOKENIZERS`. several: of several references, `max` (nltk's own) or `mean`.
    """

    __name__ = "meteor"

    def __init__(
        self,
        *,
        synonyms: bool = True,
        alpha: float = 0.9,
        beta: float = 3.0,
        gamma: float = 0.5,
        tokenizer: str = "treebank",
        several: str = "max",
    ):
        self.synonyms, self.weights = synonyms, {"alpha": alpha, "beta": beta, "gamma": gamma}
        self.tokens, self.several = tokenizer_of(tokenizer), of_several(self.__name__, several)
        self._wordnet: Any = None

    def check(self) -> None:
        """Load WordNet."""
        with extra("'meteor' needs a package", "metrics"):
            from nltk.corpus import wordnet
        if not self.synonyms:
            self._wordnet = SimpleNamespace(synsets=lambda word: [])
        elif self._wordnet is None:
            try:
                wordnet.ensure_loaded()
            except LookupError as error:
                raise OperantError(
                    f"'meteor' needs WordNet's data for its synonyms: {WORDNET}; or set synonyms=false, to match equal "
                    "words and stems alone"
                ) from error
            self._wordnet = wordnet

    def of(self, reply: str, references: Sequence[str]) -> float:
        self.check()
        from nltk.translate.meteor_score import single_meteor_score

        words, own = self.tokens(reply), {"wordnet": self._wordnet, **self.weights}
        return self.several([float(single_meteor_score(self.tokens(text), words, **own)) for text in references])


@cache
def stemmer() -> Any:
    with extra("a stemmer needs a package", "metrics"):
        from nltk.stem.porter import PorterStemmer
    return PorterStemmer()


@cache
def treebank() -> Any:
    with extra("tokenizer 'treebank' needs a package", "metrics"):
        from nltk.tokenize.destructive import NLTKWordTokenizer
    return NLTKWordTokenizer()


def tokens(text: str) -> list[str]:
    """The lower-cased words and signs by nltk's `word_tokenize`, of a text that is one sentence."""
    return treebank().tokenize(text.lower())
