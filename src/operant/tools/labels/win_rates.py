"""How often people prefer the replies of each source, such as a model, to those of another one."""

from collections import defaultdict
from statistics import fmean

from operant.data.replies import scores_of
from operant.tools.diagnosis.history import percent
from operant.tools.diagnosis.intervals import wilson
from operant.tools.labels.store import Store
from operant.types import OperantError


def win_rates(store: Store) -> list[dict[str, str]]:
    """A table: each source against the first one, over the items where somebody compared both.

    A comparison is 1, 0, or 1/2 where both are equal; two that were not picked are not compared. Those of an item, by
    several labellers or of several replies, are averaged first. The interval is Wilson's, 95 %, over items.
    Raises: OperantError if the items do not name at least two sources, or nobody has compared any.
    """
    compared: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    sources: dict[str, None] = {}
    for label in store.labels():
        item = store.item(label.item)
        sources |= dict.fromkeys(source for source in item.sources if source is not None)
        first, known = next(iter(sources), None), scores_of(label.answer, len(item.replies))
        mine = [x for x, source in zip(known, item.sources) if source == first and x is not None]
        picked = "best" in label.answer  # which says nothing of two others
        for x, source in zip(known, item.sources):
            if source is not None and source != first and x is not None:
                compared[source][item.id] += [(x > y) + 0.5 * (x == y) for y in mine if not (picked and x == y)]
    if not any(any(of_item.values()) for of_item in compared.values()):
        raise OperantError(
            f"{store.path} has no comparison of two sources: label rows with `sources`, as `operant eval --label` and "
            "`operant generate --out` write them, by --kind pick, rank or rate"
        )
    table = [{"source": next(iter(sources)), "preferred to the first": "", "95 %": "", "prompts": ""}]
    for source, of_items in compared.items():
        shares = [fmean(known) for known in of_items.values() if known]
        if shares:
            low, high = wilson(fmean(shares), len(shares))
            interval = f"{percent(low)} to {percent(high)}"
            values = (source, percent(fmean(shares)), interval, str(len(shares)))
            table.append(dict(zip(table[0], values, strict=True)))
    return table
