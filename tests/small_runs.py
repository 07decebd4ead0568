"""Runs of a few small steps, and what is compared of them."""

import json
from contextlib import suppress

import torch
from toys import letters, lm

from operant import Observer, train

TASKS = ["ab", "cde", "fg", "h", "ijk"]
SMALL = {"steps": 4, "probes": 0, "batch": 4, "max_tokens": 6}
SMALL |= {"minibatch": 2, "optimizer.lr": 1e-3, "checkpoint_minutes": 0.0}


def count_a(rollouts):
    return [float(r.reply.count("a")) for r in rollouts]


class Grumpy:
    """A reward that gives less every time it is asked."""

    __name__ = "grumpy"

    def __init__(self, fails=0):
        self.asked, self.fails = 0, fails

    def __call__(self, rollouts):
        self.asked += 1
        if self.asked == self.fails:
            raise RuntimeError("enough")
        return [r.reply.count("a") - 0.1 * self.asked for r in rollouts]

    def state_dict(self):
        return {"asked": self.asked}

    def load_state_dict(self, state):
        self.asked = state["asked"]


def model():
    return lm("gpt2", vocab=len(letters()), spread=0.02)


def told(run, *apart):
    """What a run, or the run of a folder, has logged, without times and what else begins with a name of `apart`."""
    lines = (getattr(run, "path", run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    apart = ("time/", "tokens/", "memory/", "checkpoint/", *apart)
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(apart)} for line in lines]


def weights(run):
    return {k: v.clone() for k, v in run.policy.state_dict().items()}


def options(**more):
    """Two epochs of PPO, as the second is like the third and fourth; another method has its own number."""
    return {"tokenizer": letters(), **SMALL, **({} if "algorithm" in more else {"epochs": 2}), **more}


def same(a, b):
    return all(torch.equal(value, weights(b)[name]) for name, value in weights(a).items())


class Killed(BaseException):
    """What ends a run without being asked."""


class Kill(Observer):
    def __init__(self, after):
        self.after = after

    def after_step(self, run):
        if run.learner.progress.step == self.after:
            raise Killed


def killed(*given, after, **options):
    """Train until a step, and end there as by a kill: nothing is saved at the end."""
    with suppress(Killed):
        train(*given, observers=[Kill(after)], **options)


def cut(out, after, reward=count_a, tasks=TASKS, **more):
    """A run that a kill ends after a step."""
    killed(model(), tasks, reward, out=out, after=after, **options(**more))


def stopped_and_whole(place, after, reward=count_a, tasks=TASKS, **more):
    """A run that is killed after a step and resumed, and one that nobody stops: they must log the same."""
    whole = train(model(), tasks, reward, out=place / "whole", **options(**more))
    cut(place / "cut", after, reward, tasks, **more)
    kept = {name: more[name] for name in ("evaluate",) if name in more}
    again = train(model(), tasks, reward, out=place / "cut", resume=True, tokenizer=letters(), **kept)
    assert told(again) == told(whole)
    return again, whole
