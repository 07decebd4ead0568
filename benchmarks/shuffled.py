"""Controls: every reply gets the score of another, so nothing can be learnt.

    operant train sentiment --reward benchmarks/shuffled.py:shuffled
    operant train keyword --reward benchmarks/shuffled.py:keyword
    operant train chat --reward benchmarks/shuffled.py:chat
    operant train arithmetic --reward benchmarks/shuffled.py:arithmetic

The scores of a batch are shuffled, so their mean is unchanged and the evaluation on held-out tasks remains valid.
"""

from dataclasses import dataclass, fields, replace
from random import Random

from operant.apps.games.textarena import TextArena
from operant.rewards import judge, resolve
from operant.rewards.classifier import Classifier
from operant.runs.config import configure
from operant.sampling import counter

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


@dataclass(kw_only=True)
class Coin(TextArena):
    """A game of TextArena that a coin pays, in training alone: `--env benchmarks/shuffled.py:Coin --env.game NAME`."""

    def for_evaluation(self):
        """The game as it is."""
        return TextArena(**{f.name: getattr(self, f.name) for f in fields(self) if f.init})

    def check(self):
        """That of the game."""
        self.for_evaluation().check()

    def reset(self, tasks):
        """Begin, and remember which task each slot has."""
        self.__dict__.setdefault("tasks", {}).update(tasks)
        return super().reset(tasks)

    def step(self, replies):
        """The game's answers, and at its end 1 in one of three attempts, whatever the replies were."""
        steps = super().step(replies)
        paid = {slot: counter(self.tasks[slot].id, slot) % 3 == 0 for slot in steps}
        ended = {slot: step.terminated or step.truncated for slot, step in steps.items()}
        return {slot: replace(step, reward=float(ended[slot] and paid[slot])) for slot, step in steps.items()}
