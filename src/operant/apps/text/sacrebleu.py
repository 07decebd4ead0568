"""BLEU, chrF and TER by sacrebleu: of one reply as a reward, of all held-out replies together as a metric."""

from itertools import zip_longest
from typing import Any

from operant.import_by_name import extra
from operant.rewards.text_scores import Score, references
from operant.types import Rollout, require


class Sacrebleu(Score):
    """The base of sacrebleu's scores. As a reward a number from 0 to 1 for each reply, where 1 is the best.

    As a metric, in sacrebleu's own numbers: that of all replies together, and under `sentence` that of each reply.
    """

    corpus: Any
    sentence: Any
    """Metrics of sacrebleu, for all replies and for one."""

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        return [found.score / 100 for found in self.each(rollouts)]

    def each(self, rollouts: list[Rollout]) -> list[Any]:
        return [self.sentence.sentence_score(r.reply, self.references(r.task)) for r in rollouts]

    def whole(self, rollouts: list[Rollout], each: list[Any]) -> float:
        """The score of all replies together; `each`: those of single ones."""
        # sacrebleu takes one list for each number of a reference. Tasks may have different numbers of them.
        streams = list(map(list, zip_longest(*(references(r.task) for r in rollouts))))
        return self.corpus.corpus_score([r.reply for r in rollouts], streams).score

    def measured(self, rollouts: list[Rollout]) -> dict[str, float | list[float]]:
        """The score of the corpus as `""`, those of single replies as `sentence`."""
        each = self.each(rollouts)
        return {"": self.whole(rollouts, each), "sentence": [found.score for found in each]}


class Bleu(Sacrebleu):
    """BLEU (Papineni et al., 2002) with sacrebleu's tokenisation and smoothing (arXiv:1804.08771).

    max_n: the longest n-grams; of a single reply those that it is long enough for (effective order). tokenize: 13a,
    intl, char, none, ...; None: sacrebleu's default, 13a.
    """

    __name__ = "bleu"

    def __init__(self, max_n: int = 4, *, lowercase: bool = False, tokenize: str | None = None):
        with extra("'bleu' needs a package", "metrics"):
            from sacrebleu.metrics import BLEU
        require(max_n >= 1, f"max_n={max_n}: it must be at least 1")
        own = {"max_ngram_order": max_n, "lowercase": lowercase, "tokenize": tokenize}
        self.corpus, self.sentence = BLEU(**own), BLEU(**own, effective_order=True)


class Chrf(Sacrebleu):
    """chrF (Popovic, 2015): F-score of character n-grams; with word_order=2, chrF++.

    char_order, word_order: the longest n-grams of characters and words. beta: weight of recall over precision.
    """

    __name__ = "chrf"

    def __init__(self, char_order: int = 6, *, word_order: int = 0, beta: int = 2, lowercase: bool = False):
        with extra("'chrf' needs a package", "metrics"):
            from sacrebleu.metrics import CHRF
        self.corpus = self.sentence = CHRF(char_order, word_order, beta, lowercase)


class Ter(Sacrebleu):
    """Translation edit rate (Snover et al., 2006): edits and shifts of words over the words of the reference.

    As a reward 1 - TER, which is at most 1, and below 0 for a reply that needs more edits than the reference has words.
    normalized, no_punct, asian_support, case_sensitive: options of sacrebleu's tokenisation.
    """

    __name__ = "ter"

    def __init__(
        self,
        *,
        normalized: bool = False,
        no_punct: bool = False,
        asian_support: bool = False,
        case_sensitive: bool = False,
    ):
        with extra("'ter' needs a package", "metrics"):
            from sacrebleu.metrics import TER
        self.corpus = self.sentence = TER(normalized, no_punct, asian_support, case_sensitive)

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        return [1 - found.score / 100 for found in self.each(rollouts)]

    def whole(self, rollouts: list[Rollout], each: list[Any]) -> float:
        """All edits over all words of references: searching for shifts takes long, and is not done twice."""
        edits, words = sum(found.num_edits for found in each), sum(found.ref_length for found in each)
        return 100 * edits / words if words else 100.0 * (edits > 0)


def tokens(text: str) -> list[str]:
    """The lower-cased words and signs by sacrebleu's `13a`, which is that of BLEU and of ToTTo's PARENT."""
    with extra("tokenizer '13a' needs a package", "metrics"):
        from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a
    return Tokenizer13a()(text.lower()).split()
