"""What labels say: how far labellers agree, and how often people prefer the replies of one model to another's.

Agreement is Krippendorff's alpha, each labeller against the others and gold items, and circles.

Alpha is 1 for full agreement and 0 for that of chance. It is `1 - observed / expected disagreement`, of all pairs of
values of one unit over all pairs of values (Krippendorff, Computing Krippendorff's Alpha-Reliability, 2011).
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from operant.data.replies import scores_of
from operant.tools.labels.items import IMPORT, KINDS, as_text, ordered_pairs, ranks
from operant.tools.labels.store import Label, Store
from operant.tools.report.diagnosis.history import counted, percent
from operant.tools.report.diagnosis.intervals import wilson
from operant.types import OperantError

LEVELS = {"pick": "nominal", "rank": "ordinal", "rate": "interval", "good": "nominal"}
"""The level of measurement of each kind."""


def alpha(units: Iterable[Sequence[object]], level: str = "nominal") -> float | None:
    """Krippendorff's alpha of the values that each unit got, of any number of labellers.

    level: nominal, ordinal or interval. Units with fewer than two values say nothing. None: undefined, because there is
    no such unit or all values are the same.
    """
    together: Counter[tuple[Any, Any]] = Counter()  # ordered pairs of values within a unit, each unit by its size
    for values in (values for values in units if len(values) > 1):
        counts = Counter(values)
        for a, of_a in counts.items():
            for b, of_b in counts.items():
                together[a, b] += of_a * (of_b - (a == b)) / (len(values) - 1)
    totals: Counter[Any] = Counter()
    for (a, _), weight in together.items():
        totals[a] += weight
    number, places = sum(totals.values()), {value: value for value in totals}
    if level == "ordinal":  # a value's place is how many are below it
        places = dict[Any, Any]()
        for value in sorted(totals):
            places[value] = sum(totals[v] for v in places) + totals[value] / 2

    def distance(a: object, b: object) -> float:
        return float(a != b) if level == "nominal" else float(places[a] - places[b]) ** 2

    observed = sum(weight * distance(a, b) for (a, b), weight in together.items())
    expected = sum(totals[a] * totals[b] * distance(a, b) for a in totals for b in totals)
    return 1 - (number - 1) * observed / expected if expected else None


def units(labels: Sequence[Label], kind: str, counts: Mapping[str, int]) -> list[list[object]]:
    """The values that each unit got: the choice of an item (pick), or the entry of each of its replies.

    counts: the number of replies of each item, by its id.
    """
    found: dict[Hashable, list[Any]] = defaultdict(list)
    for label in labels:
        count = counts[label.item]
        values = [choice(label.answer, count)] if kind == "pick" else entries(label.answer, kind, count)
        for index, value in enumerate(values):
            if value is not None:
                found[label.item, index].append(value)
    return list(found.values())


def entries(answer: Mapping[str, Any], kind: str, count: int) -> Sequence[float | None]:
    """The entry of each reply in an answer of that kind; none in an answer of another, from which only ranks follow."""
    return ranks(answer, count) if kind == "rank" else answer.get(KINDS[kind], ())


def choice(answer: Mapping[str, object], count: int) -> int | str:
    """What was picked: an index, "all bad", or "equal"."""
    best = [i for i, rank in enumerate(ranks(answer, count)) if rank == 1]
    return best[0] if len(best) == 1 else "all bad" if answer.get("all_bad") else "equal"


def agreeing(answer: Mapping[str, object], other: Mapping[str, object], kind: str, count: int) -> tuple[int, int]:
    """In how many comparisons two answers to one item say the same, and how many there are.

    A comparison is the choice (pick), the mark of a reply (good, if both have one), or any two replies of which both
    put one above the other (rank, rate).
    """
    if kind == "pick":
        return int(choice(answer, count) == choice(other, count)), 1
    if kind == "good" and "good" in answer and "good" in other:
        marks = [pair for pair in zip(scores_of(answer, count), scores_of(other, count)) if None not in pair]
        return sum(a == b for a, b in marks), len(marks)
    ours, theirs = set(ordered_pairs(answer, count)), set(ordered_pairs(other, count))
    same, opposite = len(ours & theirs), len({(j, i) for i, j in ours} & theirs)
    return same, same + opposite


def circles(labels: Sequence[Label], store: Store) -> tuple[int, int]:
    """The number of prompts whose replies go in a circle by pairwise majority (a over b over c over a), and of pairs of
    replies that one labeller has put in both orders. Replies are compared by their text, over all items of a prompt."""
    votes: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    by_one: dict[tuple[str, str], set[tuple[str, str]]] = defaultdict(set)
    for label in labels:
        item = store.item(label.item)
        texts = [as_text(reply) for reply in item.replies]
        pairs = {(texts[i], texts[j]) for i, j in ordered_pairs(label.answer, len(texts)) if texts[i] != texts[j]}
        votes[as_text(item.prompt)].update(pairs)
        by_one[label.labeller, as_text(item.prompt)] |= pairs
    circular = 0
    for of_prompt in votes.values():
        above = {(a, b) for (a, b), number in of_prompt.items() if number > of_prompt[b, a]}
        left = {reply for pair in above for reply in pair}
        while best := {reply for reply in left if not any((other, reply) in above for other in left)}:
            left -= best
        circular += bool(left)  # no order of these agrees with all majorities
    return circular, sum((b, a) in pairs for pairs in by_one.values() for a, b in pairs if a < b)


def agreement(store: Store) -> tuple[list[str], list[dict[str, str]]]:
    """Sentences about the labels of a database, and a table with a row for each labeller."""
    kind, labels, gold = store.kind, store.labels(), store.gold()
    skips = Counter(label.labeller for label in store.skipped())
    counts = {item: len(store.item(item).replies) for item in {label.item for label in labels}}
    real = [label for label in labels if label.item not in gold]
    labellers_of = Counter(label.item for label in real)
    several = sum(number > 1 for number in labellers_of.values())
    circular, both = circles(real, store)
    value = alpha(units(real, kind, counts), LEVELS[kind])
    why = "all labels are the same" if several else "no item has labels of two labellers"
    sentences = [
        f"{counted(len(real), 'label')} of {counted(len(labellers_of), 'item')}; {several} with several labellers",
        f"Krippendorff's alpha ({LEVELS[kind]}): {f'undefined: {why}' if value is None else f'{value:.3f}'}",
    ]
    if circular:
        sentences += [f"{counted(circular, 'prompt')} whose majorities go in a circle: no order suits all of them"]
    if both:
        sentences += [f"{counted(both, 'pair')} of replies that one labeller has put in both orders"]
    names = sorted({label.labeller for label in labels} | set(skips), key=lambda name: (name == IMPORT, name))
    rows = [{"labeller": name} | about(name, labels, kind, counts, gold) for name in names]
    return sentences, [row | {"skips": str(skips[row["labeller"]])} for row in rows]


def about(
    name: str, labels: Sequence[Label], kind: str, counts: Mapping[str, int], gold: Mapping[str, Mapping[str, object]]
) -> dict[str, str]:
    without = [label for label in labels if label.labeller != name and label.item not in gold]
    others: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for label in without:
        others[label.item].append(label.answer)
    own = [label for label in labels if label.labeller == name]
    shares = list[str]()
    for answers in (others, {item: [answer] for item, answer in gold.items()}):
        found = [agreeing(x.answer, y, kind, counts[x.item]) for x in own for y in answers.get(x.item, ())]
        same, of = (sum(part) for part in zip(*found)) if found else (0, 0)
        shares.append(f"{same} of {of} ({same / of:.0%})" if of else "-")
    value = alpha(units(without, kind, counts), LEVELS[kind])
    seconds = [label.seconds for label in own if label.seconds is not None]
    return {
        "labels": str(len(own)),
        "same as others": shares[0],
        "same as gold": shares[1],
        "alpha without": "-" if value is None else f"{value:.3f}",
        "seconds": f"{median(seconds):.0f}" if seconds else "-",
    }


def win_rates(store: Store) -> list[dict[str, str]]:
    """A table: each source against the first one, over the items where somebody compared both.

    A comparison is 1, 0, or 1/2 where both are equal, such as one reply of both; two different ones that were not
    picked are not compared. Those of an item, by several labellers or of several replies, are averaged first. The
    interval is Wilson's, 95 %, over items.
    """
    compared: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    sources: dict[str, None] = {}
    for label in store.labels():
        item = store.item(label.item)
        of_replies = [[made_by] if isinstance(made_by, str) else made_by or [] for made_by in item.sources]
        known = enumerate(zip(of_replies, scores_of(label.answer, len(item.replies))))
        judged = [(source, place, x) for place, (made_by, x) in known if x is not None for source in made_by]
        sources |= dict.fromkeys(source for made_by in of_replies for source in made_by)
        first, picked = next(iter(sources), None), "best" in label.answer  # which says nothing of two others
        mine = [(place, x) for source, place, x in judged if source == first]
        for source, place, x in judged:
            if source != first:
                told = [y for at, y in mine if at == place or not (picked and x == y)]
                compared[source][item.id] += [(x > y) + 0.5 * (x == y) for y in told]
    if not any(any(of_item.values()) for of_item in compared.values()):
        how = "label rows with `sources`, as `operant eval --label` and `operant generate --out` write them"
        raise OperantError(f"{store.path} has no comparison of two sources: {how}, by --kind pick, rank or rate")
    table = [{"source": next(iter(sources)), "preferred to the first": "", "95 %": "", "prompts": ""}]
    for source, of_items in compared.items():
        shares = [fmean(known) for known in of_items.values() if known]
        if shares:
            low, high = wilson(fmean(shares), len(shares))
            interval = f"{percent(low)} to {percent(high)}"
            values = (source, percent(fmean(shares)), interval, str(len(shares)))
            table.append(dict(zip(table[0], values, strict=True)))
    return table
