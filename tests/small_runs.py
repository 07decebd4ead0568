"""Runs of a few small steps, and what is compared of them."""

import json

from toys import letters, lm

TASKS = ["ab", "cde", "fg", "h", "ijk"]
SMALL = {"steps": 4, "probes": 0, "batch": 4, "max_tokens": 6}
SMALL |= {"minibatch": 2, "optimizer.lr": 1e-3, "checkpoint_minutes": 0.0}


def count_a(rollouts):
    return [float(r.reply.count("a")) for r in rollouts]


def model():
    return lm("gpt2", vocab=len(letters()), spread=0.02)


def told(run):
    """What was logged, without times."""
    lines = (run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {k: v for k, v in json.loads(x).items() if not k.startswith(("time/", "tokens/", "memory/", "checkpoint/"))}
        for x in lines
    ]


def weights(run):
    return {k: v.clone() for k, v in run.policy.state_dict().items()}


def options(**more):
    return {"tokenizer": letters(), **SMALL, **more}


KEPT = ("optimizer.lr", "sampling.max_tokens", "sampling.fixed_length", "kl.coef", "update.minibatch", "learner.seed")
