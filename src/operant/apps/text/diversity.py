"""Diversity of all replies together: how many different words and n-grams they use."""

import math
from collections import Counter
from statistics import fmean

from operant.text_scores.words import ngrams
from operant.text_scores.words import tokenizer as tokenizer_of
from operant.types import OperantError, Rollout


class Diversity:
    """Numbers of all replies by name, of their words as `tokenizer` finds them; n-grams do not cross replies.

    `msttr`: mean share of different words in segments of `segment` words of the replies one after the other, without
    the rest (Johnson, 1944); absent if there is no whole segment. For each k from 1 to `n`: `distinct_k`, different
    k-grams over all (arXiv:1510.03055); `entropy_k`, the entropy of their distribution in bits; `unique_k`, how many
    occur once. `mean_length`: words of a reply.
    """

    def __init__(self, *, n: int = 3, segment: int = 100, tokenizer: str = "words"):
        if n < 1 or segment < 1:
            raise OperantError(f"diversity: n={n}, segment={segment}: both must be at least 1")
        self.n, self.segment, self.tokens = n, segment, tokenizer_of(tokenizer)

    def __call__(self, rollouts: list[Rollout]) -> dict[str, float | None]:
        replies = [self.tokens(rollout.reply) for rollout in rollouts]
        flat = [word for reply in replies for word in reply]
        segments = [flat[i : i + self.segment] for i in range(0, len(flat) - self.segment + 1, self.segment)]
        found: dict[str, float | None] = {
            "mean_length": len(flat) / len(replies),
            "msttr": fmean(len(set(words)) / len(words) for words in segments) if segments else None,
        }
        for k in range(1, self.n + 1):
            counts = Counter[tuple[str, ...]]()
            for reply in replies:
                counts.update(ngrams(reply, k))
            total = counts.total()
            found |= {
                f"distinct_{k}": len(counts) / total if total else None,
                f"entropy_{k}": -math.fsum(c / total * math.log2(c / total) for c in counts.values()) + 0.0,
                f"unique_{k}": float(sum(count == 1 for count in counts.values())),
            }
        return found
