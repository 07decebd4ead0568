"""A task whose best mean reward is 1, the learner that finds it, and scores that teach nothing."""

from toys import lm

from operant.sampling import counter
from operant.training.learner import Learner

WANTED, PROMPTS, VOCABULARY = 7, [[1, 2, 3], [4, 5], [6], [8, 9, 10, 11]], 12
OPTIONS = {"optimizer.lr": 1e-2, "max_tokens": 5, "fixed_length": True, "kl.coef": 0.0, "minibatch": 16}
ABSENT = "absent"
"""An option that the method does not have."""
CHANCE, NOISE = 1 / VOCABULARY, 0.06


def score(rollout):
    return rollout.ids.count(WANTED) / len(rollout.ids)


def learner(kind="gpt2", **more):
    options = {name: value for name, value in (OPTIONS | more).items() if value is not ABSENT}
    return Learner(lm(kind, VOCABULARY, spread=0.05), **options)


def shuffled(step, scores):
    """The same scores, each given to another reply."""
    shift = 1 + counter(5, step) % (len(scores) - 1)
    return scores[shift:] + scores[:shift]
