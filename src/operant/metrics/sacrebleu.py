"""BLEU and chrF of all held-out replies, by sacrebleu. They need the extra `text-metrics`."""

from itertools import zip_longest
from typing import Any

from operant.metrics.evaluation import references
from operant.types import OperantError, Rollout


def _metrics(name: str) -> Any:
    """The module `sacrebleu.metrics`. Raises: OperantError if the package is missing."""
    try:
        import sacrebleu.metrics
    except ImportError as error:
        raise OperantError(
            f"evaluation metric {name!r} needs a package: pip install 'operant[text-metrics]'"
        ) from error
    return sacrebleu.metrics


def _score(metric: Any, rollouts: list[Rollout]) -> float:
    """The score of the corpus, 0 to 100. Tasks may have different numbers of references."""
    streams = list(map(list, zip_longest(*(references(r.task) for r in rollouts))))
    return metric.corpus_score([r.reply for r in rollouts], streams).score


class Bleu:
    """Corpus BLEU (Papineni et al., 2002) with sacrebleu's tokenisation and smoothing (arXiv:1804.08771), 0 to 100.

    max_n: the longest n-grams. tokenize: 13a, intl, char, none, ...; None: sacrebleu's default, 13a.
    """

    needs_references = True

    def __init__(self, *, max_n: int = 4, lowercase: bool = False, tokenize: str | None = None):
        self.metric = _metrics("bleu").BLEU(max_ngram_order=max_n, lowercase=lowercase, tokenize=tokenize)

    def __call__(self, rollouts: list[Rollout]) -> float:
        return _score(self.metric, rollouts)


class Chrf:
    """Corpus chrF (Popovic, 2015), 0 to 100: F-score of character n-grams; with word_order=2, chrF++.

    char_order, word_order: the longest n-grams of characters and words. beta: weight of recall over precision.
    """

    needs_references = True

    def __init__(self, *, char_order: int = 6, word_order: int = 0, beta: int = 2, lowercase: bool = False):
        self.metric = _metrics("chrf").CHRF(char_order, word_order, beta, lowercase)

    def __call__(self, rollouts: list[Rollout]) -> float:
        return _score(self.metric, rollouts)
