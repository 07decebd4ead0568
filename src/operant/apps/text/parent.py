"""PARENT (Dhingra et al., 2019, arXiv:1906.01081): replies that describe a table, against references and the table."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from operant.rewards.text_scores import MEASURES, OfMeasures, target_of
from operant.rewards.words import f_measure, ngrams
from operant.rewards.words import tokenizer as tokenizer_of
from operant.types import OperantError, Rollout, Task, shown

SMALLEST = 1e-5
"""What stands for a precision or recall of 0 before a logarithm, as in the authors' program."""
_CELL = re.compile(r"<(cell|page_title|section_title|section_text)>(.*?)(?=<|$)", re.DOTALL)


class TableValues(NamedTuple):
    """The values of a table as texts."""

    entailing: list[str]
    """Those whose words a reply may use."""
    wanted: list[str]
    """Those that a reply should mention."""


class ParentNumbers(NamedTuple):
    """Precision, recall and F of a reply."""

    precision: float
    recall: float
    f: float


class Parent(OfMeasures):
    """PARENT, 0 to 1: n-grams of the reply count as right if the reference or the table has them.

    Tables are in `task.target`, or in its key `field`: a mapping from attributes to values, a list of pairs (attribute,
    value) or triples (head, relation, tail), text in ToTTo's linearised form, or a row of ToTTo, of which the
    highlighted cells and the titles should be mentioned. table_weight: lambda, the weight of the recall of the table;
    None: 1 - the share of the table that the reference mentions, as the paper proposes. measure: `f`, `precision` or
    `recall`; None: as a reward f, as a metric all three. Of several references, that with the best F counts.
    """

    __name__ = "parent"

    def __init__(
        self,
        measure: str | None = None,
        *,
        field: str | None = None,
        table_weight: float | None = None,
        tokenizer: str = "words",
    ):
        self.choose_measure(measure)
        if table_weight is not None and not 0 <= table_weight <= 1:
            raise OperantError(f"parent: table_weight={table_weight}: it must be from 0 to 1, or none")
        self.field, self.table_weight = field, table_weight
        self.tokens = tokenizer_of(tokenizer)

    def numbers(self, rollouts: list[Rollout]) -> dict[str, list[float]]:
        found = list[ParentNumbers]()
        for rollout in rollouts:
            table, words = self._table(rollout.task), self.tokens(rollout.reply)
            entailing = {word for text in table.entailing for word in self.tokens(text)}
            wanted = [value for text in table.wanted if (value := self.tokens(text))]
            texts = map(self.tokens, self.references(rollout.task))
            each = [parent(words, text, entailing, wanted, self.table_weight) for text in texts]
            found.append(max(each, key=lambda numbers: numbers.f))
        return {name: [getattr(numbers, name) for numbers in found] for name in MEASURES}

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        self._table(task)

    def _table(self, task: Task) -> TableValues:
        return table_values(target_of(task, self.field, "score 'parent'"), f"task {task.id!r}")


def parent(
    reply: Sequence[str],
    reference: Sequence[str],
    entailing: set[str],
    wanted: Sequence[Sequence[str]],
    table_weight: float | None = None,
    longest: int = 4,
) -> ParentNumbers:
    """PARENT of a reply's words, by word overlap.

    entailing: the words of the table. wanted: the values that should be mentioned, each as words. table_weight: lambda.
    """

    def entailed(gram: tuple[str, ...]) -> float:
        return sum(word in entailing for word in gram) / len(gram)

    precisions, recalls = list[float](), list[float]()
    for n in range(1, longest + 1):
        mine, theirs = ngrams(reply, n), ngrams(reference, n)
        right = sum(min(k, theirs[g]) + max(k - theirs[g], 0) * entailed(g) for g, k in mine.items())
        precisions.append(right / mine.total() if mine else 0.0)
        # Only what the table entails is asked of the reply, and an n-gram that occurs less often counts in part.
        asked = sum(k * entailed(g) for g, k in theirs.items())
        found = sum(min(k, mine[g]) * entailed(g) for g, k in theirs.items())
        recalls.append(found / asked if asked else 1.0)
    precision, of_reference = _geometric(precisions), _geometric(recalls) or SMALLEST
    of_table = _mentioned(wanted, reply) or SMALLEST
    weight = 1 - _mentioned(wanted, reference) if table_weight is None else table_weight
    recall = math.exp((1 - weight) * math.log(of_reference) + weight * math.log(of_table))
    return ParentNumbers(precision, recall, f_measure(precision, recall))


def _geometric(values: list[float]) -> float:
    """The geometric mean over n; 0 if not one word is right, and other zeros count as `SMALLEST`."""
    if not values[0]:
        return 0.0
    return math.exp(math.fsum(math.log(value or SMALLEST) for value in values) / len(values))


def _mentioned(values: Sequence[Sequence[str]], text: Sequence[str]) -> float:
    """The mean over the values of the share of their words that the text has in order (longest common subsequence)."""
    return sum(common(value, text) / len(value) for value in values) / len(values) if values else 0.0


def common(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for word in one:
        before = row
        row = [0]
        for i, theirs in enumerate(other):
            row.append(before[i] + 1 if word == theirs else max(before[i + 1], row[i]))
    return row[-1]


def table_values(table: object, where: str) -> TableValues:
    """The values of a table in one of the forms of `Parent`. Raises: OperantError that names `where` for another."""
    if isinstance(table, Mapping) and isinstance(table.get("table"), list):
        return totto_values(table, where)
    values: list[Any] = []
    if isinstance(table, str):
        values = [value for _, value in _CELL.findall(table)]
    elif isinstance(table, Mapping):
        values = list(table.values())
    elif isinstance(table, (list, tuple)) and all(isinstance(e, (list, tuple)) and len(e) in (2, 3) for e in table):
        values = [entry[1] if len(entry) == 2 else f"{entry[0]} {entry[2]}" for entry in table]
    texts = [str(value) for value in values if isinstance(value, (str, int, float)) and str(value).strip()]
    if not texts or len(texts) < sum(value is not None and str(value).strip() != "" for value in values):
        raise OperantError(
            f"score 'parent': {where} has the target {shown(table)}, which is no table: give a mapping from attributes "
            "to values, pairs (attribute, value), triples (head, relation, tail), text such as '<cell> 7 </cell>', or "
            "a row of ToTTo; --data.target-field NAME names the field that holds it"
        )
    return TableValues(texts, texts)


def totto_values(row: Mapping[Any, Any], where: str) -> TableValues:
    """The values of a row of ToTTo: all cells and texts entail, highlighted cells and titles are wanted."""
    titles = [str(row[name]) for name in ("table_page_title", "table_section_title") if row.get(name)]
    try:
        cells = [[str(cell["value"]) for cell in line] for line in row["table"]]
        chosen = [cells[i][k] for i, k in row.get("highlighted_cells") or ()]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise OperantError(
            f"score 'parent': {where} has a table that cannot be read as one of ToTTo ({type(error).__name__}: "
            f"{error}): each cell needs a 'value', and highlighted_cells are pairs [row, column]"
        ) from error
    every = [value for line in cells for value in line] + titles
    more = [str(row["table_section_text"])] if row.get("table_section_text") else []
    return TableValues(every + more, chosen + titles if chosen else every + more)
