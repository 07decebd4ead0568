"""A stand-in for people: a labeller that prefers film reviews with praise, of moderate length, that repeat nothing.

    Labeller(noise=0.5).label(store)       # answers every open item of the database, as somebody at the page would
    operant train ... --reward operant.tools.labels.stand_in:taste        # what it truly prefers, without noise

It is for tests, demonstrations and measurements: its true preference is known, so that one can see what a reward model
has learnt of it, and where a policy exploits the reward model. It is no substitute for people.
"""

import math
import random
import re
from collections.abc import Sequence

from operant.tools.labels.items import as_text
from operant.tools.labels.store import Store
from operant.types import Rollout, require

PRAISE = frozenset(
    "good great excellent wonderful best love loved beautiful perfect amazing enjoyed enjoy fun funny brilliant superb "
    "favorite fantastic well nice interesting recommend recommended classic better fine masterpiece touching gem "
    "entertaining worth hilarious".split()
)
BLAME = frozenset(
    "bad worst boring awful terrible poor waste stupid horrible worse dull hate hated annoying ridiculous lame weak "
    "disappointing disappointed mess crap unfortunately nothing cheap pointless wasted silly avoid fails predictable "
    "garbage".split()
)
MOST, LENGTH = 3, 14
"""Praise beyond three words counts no more; the best length, in words."""


def preference(reply: str) -> float:
    """How much it likes a reply, without noise: praise less blame, a penalty of repetition, and one of length.

    clip(praise - blame, -3, 3) - 4 * (share of words that occurred before) - 0.1 * |words - 14|. An empty reply: -5.
    """
    words = re.findall(r"[a-z']+", reply.lower())
    if not words:
        return -5.0
    tone = sum(word in PRAISE for word in words) - sum(word in BLAME for word in words)
    repeated = 1 - len(set(words)) / len(words)
    return max(-MOST, min(MOST, tone)) - 4 * repeated - 0.1 * abs(len(words) - LENGTH)


def taste(rollouts: Sequence[Rollout]) -> list[float]:
    return [preference(rollout.reply) for rollout in rollouts]


class Labeller:
    """Labels the items of a database.

    noise: it compares `preference / noise` + a draw from the standard Gumbel distribution, so that the probability of
    its pick is a softmax; 0: none. shuffled: its draws have nothing to do with the replies, as a control.
    """

    def __init__(self, noise: float = 0.5, *, seed: int = 0, shuffled: bool = False, name: str = "stand-in"):
        require(noise >= 0, f"noise={noise:g}: it must be at least 0")
        self.noise, self.seed, self.shuffled, self.name = noise, seed, shuffled, name

    def label(self, store: Store) -> int:
        """Answer every item that is left for it, by the kind of the database; returns how many."""
        count = 0
        while (item_id := store.next_item(self.name)) is not None:
            item = store.item(item_id)
            store.add_label(item_id, self.name, self.answer(store.kind, item_id, [as_text(r) for r in item.replies]))
            count += 1
        return count

    def answer(self, kind: str, item_id: str, replies: Sequence[str]) -> dict[str, object]:
        chance, felt = random.Random(f"{self.seed}/{self.name}/{item_id}"), list[float]()
        for reply in replies:
            liked = 0.0 if self.shuffled else preference(reply)
            draw = -math.log(-math.log(chance.random() or 1e-300))
            felt.append(liked + (self.noise or float(self.shuffled)) * draw if self.noise or self.shuffled else liked)
        if kind == "pick":
            return {"best": felt.index(max(felt))}
        if kind == "rank":
            return {"ranks": [1 + sum(other > mine for other in felt) for mine in felt]}
        if kind == "rate":
            return {"ratings": [max(1, min(5, round(3 + mine / 2))) for mine in felt]}
        return {"good": [mine > 0 for mine in felt]}
