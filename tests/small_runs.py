"""Runs of a few small steps, and what is compared of them."""

import json

import torch
from toys import letters, lm

from operant import steps, train

TASKS = ["ab", "cde", "fg", "h", "ijk"]
SMALL = {"steps": 4, "probes": 0, "batch": 4, "max_tokens": 6}
SMALL |= {"minibatch": 2, "optimizer.lr": 1e-3, "checkpoint_minutes": 0.0}


def count_a(rollouts):
    return [float(r.reply.count("a")) for r in rollouts]


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
    """The weights of two runs, to the bit."""
    return all(torch.equal(value, weights(b)[name]) for name, value in weights(a).items())


def cut(out, after, reward=count_a, tasks=TASKS, **more):
    """A run that ends after a step without being asked, as by a kill: nothing is saved at the end."""
    for metrics in steps(model(), tasks, reward, out=out, **options(**more)):
        if metrics["step"] == after:
            break


def stopped_and_whole(place, after, reward=count_a, tasks=TASKS, **more):
    """A run that is killed after a step and resumed, and one that nobody stops: they must log the same."""
    whole = train(model(), tasks, reward, out=place / "whole", **options(**more))
    cut(place / "cut", after, reward, tasks, **more)
    kept = {name: more[name] for name in ("evaluate",) if name in more}
    again = train(model(), tasks, reward, out=place / "cut", resume=True, tokenizer=letters(), **kept)
    assert told(again) == told(whole)
    return again, whole
