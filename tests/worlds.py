"""Tasks and options of runs in worlds, and what is compared of them."""

import sys

import hostile_worlds
import pytest

from operant import Step, Task

HOSTILE = f"{hostile_worlds.__file__}:Hostile"
SLOW = ("hangs", "hangs_with_a_server", "reset_hangs", "fills_memory")
FAILING = [
    pytest.param(end, fault, marks=[pytest.mark.slow] * (fault in SLOW))
    for end, faults in hostile_worlds.FAULTS.items()
    for fault in faults
]
"""The faults of a world, each after the end of its episode; those that take seconds are tried in CI."""
TASKS = [Task(f"t/{i}", "x") for i in range(5)]
SMALL = {"steps": 2, "batch": 4, "sampling.max_tokens": 4, "watch_every": 0, "probes": 0}
linux = pytest.mark.skipif(sys.platform != "linux", reason="leftover processes are searched for in /proc")


class Turns:
    """A world by one function: `answer(slot, reply)` is what follows a reply, and `turn[slot]` counts them from 1."""

    first = Step(fresh=True)

    def reset(self, tasks):
        self.turn = dict.fromkeys(tasks, 0)
        return dict.fromkeys(tasks, self.first)

    def step(self, replies):
        self.turn |= {slot: self.turn[slot] + 1 for slot in replies}
        return {slot: self.answer(slot, reply) for slot, reply in replies.items()}


def content(rollout):
    """A rollout without its log-probs and values, whose last bits depend on the size of the batch."""
    turns = [(t.prompt, t.action, t.reward, t.options, t.chosen, t.end) for t in rollout.turns]
    return rollout.task, rollout.place, turns, rollout.texts, rollout.end, rollout.info


LAKE = {"id": "FrozenLake-v1", "kwargs": {"render_mode": "ansi"}, "actions": ("left", "down", "right", "up")}
