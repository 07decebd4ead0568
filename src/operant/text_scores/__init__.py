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
        "bleu": "operant.text_scores.sacrebleu:Bleu",
        "chrf": "operant.text_scores.sacrebleu:Chrf",
        "ter": "operant.text_scores.sacrebleu:Ter",
        "rouge": "operant.text_scores.rouge_score:Rouge",
        "meteor": "operant.text_scores.nltk:Meteor",
        "cider": "operant.text_scores.cider:Cider",
        "bertscore": "operant.text_scores.bertscore:BertScore",
        "parent": "operant.text_scores.parent:Parent",
        "consistency": "operant.text_scores.judged_by_classifier:Consistency",
        "intent": "operant.text_scores.judged_by_classifier:Intent",
        "coverage": "operant.text_scores.concepts:Coverage",
        "repeat_penalty": "operant.text_scores.concepts:RepeatPenalty",
        "increasing_numbers": "operant.text_scores.concepts:IncreasingNumbers",
        "dates": "operant.text_scores.concepts:Dates",
    }
)
"""Scores of single replies, by name: the classes."""
OF_ALL = Lazy(
    {"diversity": "operant.text_scores.diversity:Diversity", "perplexity": "operant.text_scores.perplexity:Perplexity"}
)
"""What is measured of all replies together, by name."""


def prepare(part: Any, what: str, tasks: Sequence[Task]) -> None:
    """Refuse tasks that a reward or metric cannot judge, and let it read what it needs of all of them.

    Raises: OperantError that names the first such task; `what` names the part.
    """
    check_tasks(part, what, tasks)
    if callable(read := getattr(part, "read_tasks", None)):
        read(tasks)
