"""A game of guessing letters that misbehaves in the episode of one task, for tests/test_worlds.py."""

import contextlib
import ctypes
import os
import random
import subprocess
import sys
import threading
import time
import zlib

from operant.types import Step, Task

BAD = "t/3"


class Letters:
    """Three turns: each pays for the letters of the reply that the task's id asks for. It can play many slots."""

    pays = True

    def __init__(self, price: float = 1.0):
        self.price = price
        self.turns, self.wanted = {}, {}

    def reset(self, tasks):
        for slot, task in tasks.items():
            self.turns[slot] = 0
            self.wanted[slot] = "abcdefgh"[zlib.crc32(task.id.encode()) % 8]
        return {slot: Step("the " + self.wanted[slot], info={"wanted": self.wanted[slot]}) for slot in tasks}

    def step(self, replies):
        return {slot: self.answer(slot, reply) for slot, reply in replies.items()}

    def answer(self, slot, reply):
        self.turns[slot] += 1
        paid = self.price * (reply.count(self.wanted[slot]) + 0.25)
        if self.turns[slot] == 1:
            return Step(" go on.", reward=paid)
        if self.turns[slot] == 2:
            return Step("a door.", fresh=True, reward=paid, options=["up", "go"])
        return Step(reward=paid, terminated=True)


class Hostile(Letters):
    """`fault` breaks the second turn of the bad task, or the reset if it begins with reset_."""

    def __init__(self, fault: str = "", price: float = 1.0):
        super().__init__(price)
        self.fault = fault

    def reset(self, tasks):
        self.bad = {slot for slot, task in tasks.items() if task.id == BAD}
        steps = super().reset(tasks)
        if self.bad and self.fault.startswith("reset_"):
            getattr(self, self.fault.removeprefix("reset_"))(steps, *self.bad)
        return steps

    def step(self, replies):
        steps = super().step(replies)
        for slot in self.bad & set(replies):
            if self.turns[slot] == 2 and not self.fault.startswith("reset_"):
                getattr(self, self.fault)(steps, slot)
        return steps

    def raises(self, steps, slot):
        raise KeyError("no such room")

    def exits(self, steps, slot):
        os._exit(3)

    def quits(self, steps, slot):
        sys.exit(0)

    def segfaults(self, steps, slot):
        ctypes.string_at(0)

    def dies_after_its_answer(self, steps, slot):
        threading.Timer(0.02, lambda: os._exit(1)).start()

    def hangs(self, steps, slot):
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(1)

    def hangs_with_a_server(self, steps, slot):
        """A child in a session of its own, whose child has lost its parent."""
        for _ in range(2):
            script = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(1000)"
            subprocess.Popen([sys.executable, "-S", "-c", script], start_new_session=True)
        self.hangs(steps, slot)

    def fills_memory(self, steps, slot):
        self.kept = [bytearray(1 << 30) for _ in range(10)]

    def answers_for_nobody(self, steps, slot):
        del steps[slot]

    def pays_nan(self, steps, slot):
        steps[slot] = Step("on", reward=float("nan"))

    def sends_an_object(self, steps, slot):
        steps[slot] = Step("on", info={"game": self})

    def fails_by_itself(self, steps, slot):
        steps[slot] = Step(failed="raised", info={"failure": "has lost its server"})


class Draws(Letters):
    """Its first texts are random, and its state is that of its generator: tuples, as Python has them.

    It has tasks of its own.
    """

    def __init__(self, fault: str = "", tasks: int = 6):
        super().__init__()
        self.fault, self.count, self.chance = fault, tasks, random.Random(0)

    def games(self, split):
        return [Task(f"{split}/{i}", "x") for i in range(self.count if split == "train" else 2)]

    def reset(self, tasks):
        first = super().reset(tasks)
        return {slot: Step(f"{step.text} {self.chance.randint(100, 999)}") for slot, step in first.items()}

    def answer(self, slot, reply):
        if reply == (self.fault or None):
            os._exit(3)
        return super().answer(slot, reply)

    def state_dict(self):
        return {"chance": self.chance.getstate(), 1: "one"}

    def load_state_dict(self, state):
        assert state[1] == "one"
        self.chance.setstate(state["chance"])


class Measured(Draws):
    """It is measured in a world without a state."""

    def for_evaluation(self):
        return Letters()


def fails(*_):
    raise KeyError("no door")


Fails = type("Fails", (Letters,), dict(measure=fails, on_leave=fails, answer=lambda *_: Step(reward=float("nan"))))


def ask(task, *, most: int = 3, price: float = 1.0):
    """A world as a generator function: it asks for the letter of the task's target, at most `most` times."""
    reply = yield f"{task.prompt} which?"
    for _ in range(most - 1):
        if task.target in reply:
            return price
        reply = yield " no.", -0.5
    if reply == "late":
        return Step("cut.", reward=0.25, truncated=True)


RAISED = "raises reset_raises quits fills_memory answers_for_nobody pays_nan sends_an_object fails_by_itself"
FAULTS = {
    "raised": RAISED.split(),
    "crashed": ["exits", "reset_exits", "segfaults"],
    "timeout": ["hangs", "hangs_with_a_server", "reset_hangs"],
}
"""The faults by the end of the episode."""
