"""ROUGE by rouge-score, with a tokenizer of the user's choice."""

import re
from collections.abc import Sequence
from functools import partial
from statistics import fmean
from types import SimpleNamespace

from operant.apps.text.nltk import stemmer as porter
from operant.import_by_name import extra
from operant.rewards.text_scores import Score, of_several
from operant.rewards.words import tokenizer as tokenizer_of
from operant.types import Rollout, require, shown

TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
MEASURES = {"f": "fmeasure", "precision": "precision", "recall": "recall"}


class Rouge(Score):
    """ROUGE (Lin, 2004), 0 to 1: the n-grams, or the longest common subsequence, that reply and reference share.

    which: `rouge1` to `rouge9`, `rougeL`, `rougeLsum` (line by line), or `combined`, the mean of ROUGE-1, -2 and -L.
    None: as a reward `combined`, as a metric ROUGE-1, -2, -L and -Lsum each. tokenizer: `words` (Unicode), `rouge`
    (rouge-score's own, which drops what is not ASCII), another of `words.TOKENIZERS`, or `module:function`. stemmer:
    compare Porter's stems of words of more than three letters. measure: `f`, `precision` or `recall`. several: of
    several references, `max` or `mean`, by itself for each type.
    """

    __name__ = "rouge"

    def __init__(
        self,
        which: str | None = None,
        *,
        tokenizer: str = "words",
        stemmer: bool = False,
        measure: str = "f",
        several: str = "max",
    ):
        with extra("'rouge' needs a package", "metrics"):
            from rouge_score.rouge_scorer import RougeScorer
        known = which is None or re.fullmatch(r"rouge([1-9]|L|Lsum)|combined", which)
        require(known, f"rouge: which={shown(which)} is unknown: give rouge1 to rouge9, rougeL, rougeLsum or combined")
        require(measure in MEASURES, f"rouge: measure={shown(measure)}: it must be f, precision or recall")
        split = tokenizer_of(tokenizer)
        if stemmer:
            bare, stem = split, porter().stem
            split = lambda text: [stem(word) if len(word) > 3 else word for word in bare(text)]  # noqa: E731
        self.which, self.measure, self.several = which, MEASURES[measure], of_several(self.__name__, several)
        self.scorer = partial(RougeScorer, tokenizer=SimpleNamespace(tokenize=split))

    def of(self, reply: str, references: Sequence[str]) -> float:
        types = TYPES[:3] if self.which in (None, "combined") else (self.which,)
        return fmean(self.numbers(reply, references, types).values())

    def numbers(self, reply: str, references: Sequence[str], types: Sequence[str]) -> dict[str, float]:
        scorer = self.scorer(types)
        found = [scorer.score(text, reply) for text in references]
        return {name: float(self.several([getattr(score[name], self.measure) for score in found])) for name in types}

    def measured(self, rollouts: list[Rollout]) -> list[float] | dict[str, list[float]]:
        """The list of `which`, or one list for each type by name."""
        if self.which is not None:
            return self(rollouts)
        found = [self.numbers(r.reply, self.references(r.task), TYPES) for r in rollouts]
        return {name: [numbers[name] for numbers in found] for name in TYPES}


def tokens(text: str) -> list[str]:
    """The words of rouge-score's own tokenizer: lower-cased runs of ASCII letters and digits."""
    with extra("tokenizer 'rouge' needs a package", "metrics"):
        from rouge_score.tokenize import tokenize
    return tokenize(text, None)
