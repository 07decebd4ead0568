"""Labelled texts that a prompt is scored on, as the target of a task holds them, and as rows: the form `prompt`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from operant.data.forms import Row, found_in, place_of, text_of
from operant.sampling import counter
from operant.types import OperantError, Task, require, said_of, shown

TEXTS, LABELS = ("text", "sentence", "review", "content"), ("label", "labels", "class")


@dataclass(frozen=True)
class Examples:
    """Texts and their labels, 0 and above: `Examples("sst-2", ("a joy", "dull"), (1, 0))`.

    Raises: OperantError if there is none, or if texts and labels are not equally many.
    """

    name: str
    """Of the set, by which its words are found (`prompts.templates`)."""
    texts: tuple[str, ...]
    """What is classified."""
    labels: tuple[int, ...]
    """The class of each text."""

    def __post_init__(self) -> None:
        counts = f"{len(self.texts)} texts with {len(self.labels)} labels"
        good = self.texts and len(self.texts) == len(self.labels)
        require(good, f"examples {self.name!r}: {counts}: give at least one text, and one label for each")

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(zip(self.texts, self.labels, strict=True))

    def at(self, places: Sequence[int]) -> "Examples":
        """The examples at these places, in this order."""
        return Examples(self.name, tuple(self.texts[i] for i in places), tuple(self.labels[i] for i in places))

    def shuffled(self, key: int) -> "Examples":
        """All examples in a random order in which every beginning has the classes in about their proportion.

        `key`: of the random numbers, from `sampling.counter`. Member r of a class of n, in random order, stands at
        (r + u) / n with its own u, uniform in [0, 1); the order is that of these numbers.
        """
        draws = [counter(key, place) / 2.0**64 for place in range(len(self))]
        members: dict[int, list[int]] = {}
        for place in sorted(range(len(self)), key=lambda place: draws[place]):
            members.setdefault(self.labels[place], []).append(place)
        spread = {
            place: (rank + counter(key, place, "within") / 2.0**64) / len(places)
            for places in members.values()
            for rank, place in enumerate(places)
        }
        return self.at(sorted(spread, key=lambda place: spread[place]))

    def check_classes(self, words: Sequence[str], what: str) -> None:
        """Raises: OperantError that begins with `what`, for one class only, or for a class without an example."""
        there = sorted(set(self.labels))
        if len(there) == 1 and len(words) > 1:
            same = f"all {len(self)} texts have the label {there[0]} ({words[there[0]]!r})"
            raise OperantError(f"{what}: {same}: one class cannot be told from another; give examples of each")
        if missing := [f"{i} ({word!r})" for i, word in enumerate(words) if i not in there]:
            raise OperantError(
                f"{what}: no text has the label {', '.join(missing)}: give examples of every class, or fewer words"
            )


def examples_of(task: Task) -> Examples:
    """The examples in the target of a task: `{"name": "sst-2", "examples": [[text, label], ...]}`.

    Raises: OperantError for any other target.
    """
    target = task.target
    pairs = target.get("examples") if isinstance(target, Mapping) else None
    if not isinstance(pairs, (list, tuple)) or not pairs:
        raise OperantError(
            f"the target of the task {task.id!r} is {shown(target)}: a prompt is scored on labelled texts; give "
            "{'name': 'sst-2', 'examples': [[text, label], ...]}"
        )
    for pair in pairs:
        good = isinstance(pair, (list, tuple)) and len(pair) == 2
        if not good or not isinstance(pair[0], str) or type(pair[1]) is not int or pair[1] < 0:
            raise OperantError(
                f"the task {task.id!r} has the example {shown(pair)}: it must be [text, label], the label a whole "
                "number from 0"
            )
    return Examples(str(target.get("name", task.id)), tuple(p[0] for p in pairs), tuple(p[1] for p in pairs))


def prompt(rows: Row, *, start: str = "Prompt:", conditioned: bool = False) -> list[dict[str, object]]:
    """All rows of a source, {"rows": [...], "source": its name}, as one task, whose reply is a prompt for all texts.

    Rows have a text and a label, the number of its class. The task's target has the name of the set and `examples`, the
    pairs of text and label. start: what the policy reads. conditioned: one task for each row instead, of which the
    policy reads the text, and writes a prompt for it alone.
    Raises: OperantError for a row without a text or label, and for rows of one class.
    """
    pairs = [_pair(row, number) for number, row in enumerate(rows["rows"])]
    if pairs and len({label for _, label in pairs}) < 2:
        raise OperantError(
            f"all {len(pairs)} rows have the label {pairs[0][1]}: there is nothing to tell apart; give rows of two "
            "classes at least"
        )
    target = {"name": rows["source"]}
    if conditioned:
        return [{"prompt": text, "target": target | {"examples": [[text, label]]}} for text, label in pairs]
    return [{"prompt": start, "target": target | {"examples": [list(pair) for pair in pairs]}}]


prompt.whole = True  # type: ignore[attr-defined]
"""It reads all rows of a source at once (`data.forms.formed`)."""


def _pair(row: object, number: int) -> tuple[str, int]:
    """The text and the label of a row. Raises: OperantError with its number if it has none."""
    with said_of(place_of(number)):
        require(isinstance(row, Mapping), f"it is of type {type(row).__name__} and no mapping with a text and a label")
        text, label = text_of(found_in(row, TEXTS), "the text"), found_in(row, LABELS)
        if isinstance(label, bool) or not str(label).strip().isdecimal():
            raise OperantError(f"the label is {label!r}; it must be the number of a class: 0, 1, ...")
        require(text.strip(), "the text is empty; leave the row out")
        return text, int(label)
