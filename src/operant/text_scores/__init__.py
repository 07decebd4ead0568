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

from operant.text_scores.base import Score, check_tasks, references
from operant.text_scores.bertscore import BertScore
from operant.text_scores.cider import Cider
from operant.text_scores.concepts import Coverage, Dates, IncreasingNumbers, RepeatPenalty
from operant.text_scores.diversity import Diversity
from operant.text_scores.judged_by_classifier import Consistency, Intent
from operant.text_scores.nltk import Meteor
from operant.text_scores.parent import Parent
from operant.text_scores.perplexity import Perplexity
from operant.text_scores.rouge_score import Rouge
from operant.text_scores.sacrebleu import Bleu, Chrf, Ter
from operant.types import Task

__all__ = ["OF_ALL", "SCORES", "Intent", "Score", "check_tasks", "prepare", "references"]

SCORES: dict[str, type[Score]] = {
    made.__dict__["__name__"]: made
    for made in (
        Bleu,
        Chrf,
        Ter,
        Rouge,
        Meteor,
        Cider,
        BertScore,
        Parent,
        Consistency,
        Intent,
        Coverage,
        RepeatPenalty,
        IncreasingNumbers,
        Dates,
    )
}
"""Scores of single replies, by name."""
OF_ALL: dict[str, Any] = {"diversity": Diversity, "perplexity": Perplexity}
"""What is measured of all replies together, by name."""


def prepare(part: Any, what: str, tasks: Sequence[Task]) -> None:
    """Refuse tasks that a reward or metric cannot judge, and let it read what it needs of all of them.

    Raises: OperantError that names the first such task; `what` names the part.
    """
    check_tasks(part, what, tasks)
    if callable(read := getattr(part, "read_tasks", None)):
        read(tasks)
