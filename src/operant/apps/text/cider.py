"""CIDEr-D (Vedantam et al., 2015, arXiv:1411.5726) with frozen document frequencies."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from operant.data.sources import read
from operant.rewards.text_scores import Score, references
from operant.rewards.words import ngrams
from operant.rewards.words import tokenizer as tokenizer_of
from operant.types import OperantError, Task, require, shown


class Cider(Score):
    """CIDEr-D, 0 to 10: cosine of the tf-idf of n-grams of reply and reference, n = 1 to `n`, mean over references.

    Counts of the reply are clipped to those of the reference, and each cosine is multiplied by
    exp(-(difference of the lengths in words)^2 / (2 sigma^2)). A document is the references of one task together, and
    its n-grams weigh log(documents / documents that have it). The frequencies are frozen before the first reply, so no
    score depends on the other replies: on `documents`, a file of rows whose `field` has the references of one task, or
    by default on the tasks of the run: those of training for a reward, the held-out ones for a metric.
    """

    __name__ = "cider"

    def __init__(
        self,
        documents: str | None = None,
        *,
        field: str = "references",
        n: int = 4,
        sigma: float = 6.0,
        tokenizer: str = "words",
    ):
        require(n >= 1 and sigma > 0, f"cider: n={n}, sigma={sigma}: n must be at least 1, and sigma above 0")
        self.documents, self.field, self.n, self.sigma = documents, field, n, sigma
        self.tokens = tokenizer_of(tokenizer)
        self._frequencies: Counter[tuple[str, ...]] | None = None
        self._count = 0

    def check(self) -> None:
        """Read the file of documents. Raises: OperantError for a row without texts, or for fewer than two rows."""
        if self.documents is not None and self._frequencies is None:
            self.freeze([self._texts(row) for _, row in read(self.documents)[1]], shown(self.documents))

    def read_tasks(self, tasks: Sequence[Task]) -> None:
        """Freeze the frequencies on the references of tasks, unless a file is named."""
        if self.documents is None:
            self.freeze([references(task) for task in tasks], "the tasks")

    def freeze(self, documents: Sequence[Sequence[str]], source: str = "the list") -> None:
        """Count in how many documents each n-gram occurs."""
        if len(documents) < 2:
            raise OperantError(
                f"cider: {source} has {len(documents)} document: every n-gram would weigh log(1) = 0, and every score "
                "be 0; give the references of more tasks, as cider.documents=FILE"
            )
        self._count, self._frequencies = len(documents), Counter()
        for texts in documents:
            self._frequencies.update(set().union(*(gram for text in texts for gram in self._counts(text))))

    def of(self, reply: str, references: Sequence[str]) -> float:
        if self._frequencies is None:
            raise OperantError(
                "cider has no document frequencies yet: a run takes them from its tasks; elsewhere call "
                "read_tasks(tasks), or set cider.documents=FILE"
            )
        mine, similarities = self._counts(reply), list[float]()
        for other in map(self._counts, references):
            cosines = list[float]()
            for grams, theirs in zip(mine, other, strict=True):
                idf = {gram: math.log(self._count / max(1, self._frequencies[gram])) for gram in {*grams, *theirs}}
                product = math.fsum(min(grams[g], count) * count * idf[g] ** 2 for g, count in theirs.items())
                norms = [math.fsum((count * idf[g]) ** 2 for g, count in side.items()) for side in (grams, theirs)]
                cosines.append(product / math.sqrt(norms[0] * norms[1]) if all(norms) else 0.0)
            gap = mine[0].total() - other[0].total()
            similarities.append(fmean(cosines) * math.exp(-(gap**2) / (2 * self.sigma**2)))
        return 10 * fmean(similarities)

    def _texts(self, row: object) -> list[str]:
        texts = row.get(self.field) if isinstance(row, Mapping) else row
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(text, str) for text in texts):
            raise OperantError(
                f"cider: a row of {shown(self.documents)} has {shown(texts)} as {self.field!r}: it must be a text or "
                "a list of texts; name the field, cider.field=NAME"
            )
        return list(texts)

    def _counts(self, text: str) -> list[Counter[tuple[str, ...]]]:
        words = self.tokens(text)
        return [ngrams(words, n) for n in range(1, self.n + 1)]
