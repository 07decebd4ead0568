"""The control of the sentiment benchmark: every reply gets the score of another, so nothing can be learnt.

    operant train sentiment --reward benchmarks/shuffled.py:shuffled

The scores of a batch are shuffled, so their mean is unchanged and the evaluation on held-out tasks remains valid.
"""

from random import Random

from operant.rewards import Classifier
from operant.sampling import counter

judge = Classifier("builtin:sentiment")


def shuffled(rollouts):
    """The classifier's probabilities, in an order that depends only on the texts of the replies."""
    scores = list(judge(rollouts))
    Random(counter(*(r.text for r in rollouts))).shuffle(scores)
    return scores
