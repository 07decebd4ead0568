"""Scores of texts by name: from replies and their references to numbers. Rewards and metrics of evaluations use them.

    score = SCORES["rouge"]("rougeL", several="mean")    # the constructor's arguments are the options
    score.check()                                        # loads what it needs: a model, data of a package
    prepare(score, "rouge", tasks)                       # refuses tasks that it cannot judge
    score(rollouts)                                      # one number for each reply: a reward
    score.measured(rollouts)                             # what an evaluation logs, where that is something else

A score depends on its reply and task alone, and never on the other replies of a call.
"""

from collections.abc import Sequence
from typing import Any

from operant.import_by_name import Lazy
from operant.text_scores.base import Score, check_tasks, references
from operant.types import Task

__all__ = ["OF_ALL", "SCORES", "Score", "check_tasks", "prepare", "references"]

SCORES = Lazy(
    {
        "bleu": "operant.apps.text.sacrebleu:Bleu",
        "chrf": "operant.apps.text.sacrebleu:Chrf",
        "ter": "operant.apps.text.sacrebleu:Ter",
        "rouge": "operant.apps.text.rouge_score:Rouge",
        "meteor": "operant.apps.text.nltk:Meteor",
        "cider": "operant.apps.text.cider:Cider",
        "bertscore": "operant.text_scores.bertscore:BertScore",
        "parent": "operant.apps.text.parent:Parent",
        "consistency": "operant.apps.text.judged_by_classifier:Consistency",
        "intent": "operant.apps.text.judged_by_classifier:Intent",
        "coverage": "operant.apps.text.concepts:Coverage",
        "repeat_penalty": "operant.apps.text.concepts:RepeatPenalty",
        "increasing_numbers": "operant.apps.text.concepts:IncreasingNumbers",
        "dates": "operant.apps.text.concepts:Dates",
    }
)
"""Scores of single replies, by name: the classes."""
OF_ALL = Lazy(
    {"diversity": "operant.apps.text.diversity:Diversity", "perplexity": "operant.text_scores.perplexity:Perplexity"}
)
"""What is measured of all replies together, by name."""


def prepare(part: Any, what: str, tasks: Sequence[Task]) -> None:
    """Refuse tasks that a reward or metric cannot judge, and let it read what it needs of all of them.

    Raises: OperantError that names the first such task; `what` names the part.
    """
    check_tasks(part, what, tasks)
    if callable(read := getattr(part, "read_tasks", None)):
        read(tasks)
