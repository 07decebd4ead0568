"""Labels as files for training: pairs of the community's form, or one row for each label (docs/rlhf.md).

Pairs with an empty reply are left out, because nothing can be trained on it, and so are gold items, whose labels say
something about the labellers. Rows of labels can be read back by `operant label`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from operant.storage import atomic_io
from operant.tools.labels.items import Content, Item, ordered_pairs, ranks
from operant.tools.labels.store import Label, Store
from operant.types import OperantError, require, shown

FORMS = {"pick": "pairs", "rank": "pairs", "rate": "ratings", "good": "good"}
"""The form of each kind, unless another one is asked for."""


def export(store: Store, path: str | Path, form: str | None = None, *, skips: bool = False) -> int:
    """Write the labels that count to a new file of JSON lines; returns the number of rows.

    form: pairs, ranked, ratings or good; None: the one that suits the kind. skips: rows with `"skip": true`, too.
    """
    form = form or FORMS[store.kind]
    require(form in {*FORMS.values(), "ranked"}, f"--form {shown(form)}: it must be pairs, ranked, ratings or good")
    if form in ("ratings", "good") and form != FORMS[store.kind]:
        raise OperantError(f"--form {form}: these labels are of kind {store.kind}; export them as pairs or ranked")
    require(not skips or form != "pairs", "--skips: a skip gives no pair; export with --form ranked, ratings or good")
    require(not Path(path).exists(), f"--export {path}: the file exists; choose another name")
    exported = [*rows(store, form, skips)]
    if not exported:
        raise OperantError(f"{store.path} has no labels to export as {form}: {store.counts()['labels']} labels in all")
    atomic_io.write_rows(path, exported)
    return len(exported)


def rows(store: Store, form: str, skips: bool = False) -> Iterator[dict[str, object]]:
    gold, items = store.gold(), dict[str, Item]()
    labels = store.labels() + (store.skipped() if skips else [])
    for label in sorted(labels, key=lambda label: label.number):
        if label.item in gold:
            continue
        item = items.setdefault(label.item, store.item(label.item))
        if form == "pairs":
            for better, worse in ordered_pairs(label.answer, len(item.replies)):
                chosen, rejected = item.replies[better], item.replies[worse]
                if not is_empty(chosen) and not is_empty(rejected):
                    yield {"prompt": item.prompt, "chosen": chosen, "rejected": rejected}
        elif (fields := answer_as(form, label, len(item.replies))) is not None:
            content = {"id": item.id, "prompt": item.prompt, "replies": list(item.replies)}
            yield content | {"labeller": label.labeller, "time": label.time} | fields


def is_empty(reply: Content) -> bool:
    return not reply or (isinstance(reply, str) and not reply.strip())


def answer_as(form: str, label: Label, count: int) -> Mapping[str, object] | None:
    """The fields of a label in a form; None if it has none there."""
    if label.action == "skip":
        return {"skip": True}
    fields = {name: value for name, value in label.answer.items() if name in ("best", form)}
    if form == "ranked" and not fields:
        fields = {"ranks": ranks(label.answer, count)}
    if form == "good" and not fields and label.answer.get("all_bad"):
        fields = {"good": [False] * count}
    beside = {name: label.answer[name] for name in ("all_bad", "comment") if name in label.answer}
    return fields | beside if fields or "all_bad" in beside else None
