"""Controls: every reply gets the score of another, so nothing can be learnt.

    operant train sentiment --reward benchmarks/shuffled.py:shuffled
    operant train keyword --reward benchmarks/shuffled.py:keyword
    operant train chat --reward benchmarks/shuffled.py:chat

The scores of a batch are shuffled, so their mean is unchanged and the evaluation on held-out tasks remains valid.
"""

from random import Random

from operant.rewards import judge, resolve
from operant.runs.config import configure
from operant.sampling import counter
from operant.text_scores.classifier import Classifier

sentiment = Classifier("builtin:sentiment")


def in_another_order(rollouts, scores):
    """The scores in an order that depends only on the texts of the replies."""
    scores = list(scores)
    Random(counter(*(r.text for r in rollouts))).shuffle(scores)
    return scores


def shuffled(rollouts):
    """The classifier's probabilities, shuffled."""
    return in_another_order(rollouts, sentiment(rollouts))


def of_recipe(name):
    """The reward of a recipe, shuffled; its parts are added up first."""
    config = configure({}, name)
    reward = resolve(config.train.reward, config.parts.get("reward"))
    return lambda rollouts: in_another_order(rollouts, judge(reward, rollouts).scores)


keyword, chat = of_recipe("keyword"), of_recipe("chat")
arithmetic, countdown = of_recipe("arithmetic"), of_recipe("countdown")
