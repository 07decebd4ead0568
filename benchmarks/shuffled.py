"""The control of the sentiment benchmark: every reply gets the score of another. Nothing can be learnt from that.

    operant train sentiment --reward benchmarks/shuffled.py:shuffled

The scores of a batch are dealt out anew, so their mean is the true one: held-out tasks are still measured.
"""

from random import Random

from operant.rewards import Classifier
from operant.sampling import counter

judge = Classifier("builtin:sentiment")


def shuffled(rollouts):
    """The classifier's probabilities, in an order that depends on what was said and on nothing else."""
    scores = list(judge(rollouts))
    Random(counter(*(r.text for r in rollouts))).shuffle(scores)
    return scores
