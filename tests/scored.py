"""Rollouts to be judged, and a reward that is known."""

from operant.types import Rollout, Task, Turn


def rollout_of(reply, *, query="The film", ids=(5, 6, 7), task="t/0", end="stop", target=None) -> Rollout:
    turn = Turn(prompt=[1, 2], action=list(ids), end=end)
    return Rollout(Task(task, [1, 2], target), group=0, turns=[turn], texts=[reply], end=end, query=query)


def fixed(scores, name="fixed"):
    def reward(rollouts):
        return scores

    reward.__name__ = name
    return reward
