"""People as a reward: training waits until somebody has labelled the replies of a step at the page.

operant label labels.sqlite --kind pick                                # in one terminal: the page
operant train ... --samples 4 --reward humans:labels.sqlite            # in another: PPO waits for picks
operant train ... --reward '{humans:labels.sqlite: {weight: 1, minutes: 10}, length:<=40: 0.2}'
"""

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from operant import distributed
from operant.data.replies import scores_of
from operant.machine import beat, stop_asked
from operant.tools.labels.items import MOST, Item
from operant.tools.labels.store import Label, Store
from operant.types import OperantError, RewardFn, Rollout, StoppedError, require

POLL = 1.0
"""Seconds between two looks into the database."""


class Humans:
    """The mean score that labellers gave each reply, between 0 and 1; None (abstain) where nobody did in time.

    database: the file of `operant label`, which is made if there is none. kind: pick (the best of the replies to one
    prompt gets 1, the others 0), rank (the best 1, the last 0), rate (1 to 5 stars become 0 to 1), good (1 or 0); None:
    that of the file, else pick. labellers: how many people label an item. minutes: how long a step waits; then what
    has no label is closed and left out. The items of a step have ids made of their texts: a resumed run asks the same
    again, and finds what was answered in between. If nobody has labelled anything, the run ends, saved.
    """

    def __init__(self, database: str, *, kind: str | None = None, labellers: int = 1, minutes: float = 60.0):
        if labellers < 1 or minutes <= 0:
            raise OperantError(f"humans:{database}: labellers={labellers} and minutes={minutes:g} must be above 0")
        self.path, self.wanted, self.labellers, self.minutes = Path(database), kind, labellers, minutes
        self.__name__ = "humans"
        self._store: Store | None = None

    def check(self) -> None:
        self._open()

    def for_held_out(self) -> RewardFn:
        """People judge the replies of steps alone: it abstains from held-out ones and from probes."""
        return lambda rollouts: [None] * len(rollouts)

    def _open(self) -> Store:
        if self._store is None:
            self._store = Store(self.path, kind=self.wanted, overlap=self.labellers)
        return self._store

    def __call__(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        store, found = self._open(), list[float | None]([None] * len(rollouts))
        why = "people read a prompt and one reply, and here an episode has several turns: take another reward"
        require(all(len(rollout.turns) < 2 for rollout in rollouts), f"humans:{self.path}: {why}")
        groups: dict[Any, list[int]] = defaultdict(list)
        together = store.kind in ("pick", "rank")
        for place, rollout in enumerate(rollouts):
            groups[rollout.task.id if together else place].append(place)
        items = dict[str, tuple[Item, list[tuple[int, int]]]]()
        for places in groups.values():
            different = list(dict.fromkeys(rollouts[place].reply for place in places))
            if together and len(different) < 2:
                continue  # equal replies: there is nothing to prefer
            require(len(different) <= MOST, f"humans:{self.path}: a page shows {MOST} replies a prompt: lower samples")
            asked = (first := rollouts[places[0]]).task.prompt
            prompt = first.query if isinstance(asked, list) and all(isinstance(t, int) for t in asked) else asked
            content = json.dumps([prompt, different], ensure_ascii=False)
            item = Item(hashlib.sha256(content.encode(errors="replace")).hexdigest()[:20], prompt, tuple(different))
            judged = items.setdefault(item.id, (item, []))[1]  # equal replies to equal prompts are one item
            judged += [(place, different.index(rollouts[place].reply)) for place in places]
        if together and all(len(places) == 1 for places in groups.values()):
            alone = f"humans:{self.path} of kind {store.kind} compares replies to one prompt, and there is one of each"
            raise OperantError(f"{alone}: set samples to 2 or more, or kind to rate or good")
        store.add_items([item for item, _ in items.values()])
        given = self._wait(store, list(items))
        if items and not any(given.values()):
            why = f"nobody labelled any of {len(items)} items within {self.minutes:g} minutes"
            skips = [skip for skip in store.skipped() if skip.item in items]
            if min(map([skip.item for skip in skips].count, items)) >= self.labellers:
                why = f"all of {len(items)} items were skipped"
            for skip in skips:  # else nobody would see them again
                store.undo(skip.labeller, skip.number)
            how = f"open the page (operant label {self.path}) and resume the run, which asks for them again"
            require(distributed.world() > 1, f"{why}: {how}")
            print(f"{why}; another rank may have labels, else the step fails: {how}", file=sys.stderr)
        for name, (item, places) in items.items():
            answers = [_between(label.answer, len(item.replies)) for label in given[name]]
            for place, number in places:
                known = [x for answer in answers if (x := answer[number]) is not None]
                found[place] = fmean(known) if known else None
        return found

    def _wait(self, store: Store, ids: list[str]) -> dict[str, list[Label]]:
        """The labels of the items, as far as there are any in time; items without enough are closed."""
        left = 60 * self.minutes
        if store.lacking(ids, self.labellers):
            print(f"{len(ids)} items wait for labels: operant label {self.path}", file=sys.stderr)
        while left > 0 and (lacking := store.lacking(ids, self.labellers)):
            if stop_asked.is_set():
                raise StoppedError(f"stopped while {len(lacking)} of {len(ids)} items waited for labels: resume later")
            store.wait(ids, count=self.labellers, timeout=POLL)
            left -= POLL
            beat()  # people are slow, and the run does not hang
        given = store.wait(ids, count=self.labellers, timeout=0)
        store.close_items(name for name, labels in given.items() if len(labels) < self.labellers)
        return given


def _between(answer: Mapping[str, object], count: int) -> list[float | None]:
    """The answer as numbers from 0 to 1; all bad: 0 each."""
    if answer.get("all_bad"):
        return [0.0] * count
    known = scores_of(answer, count)
    if "ratings" in answer:
        return [None if x is None else (x - 1) / 4 for x in known]
    numbers = [x for x in known if x is not None]
    if "ranks" not in answer or not numbers:
        return known
    low, high = min(numbers), max(numbers)
    return [None if x is None else (x - low) / (high - low) if high > low else 0.5 for x in known]
