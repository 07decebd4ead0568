"""Packed rows: the kernel's gradients against those of a CPU, and a ragged update packed and padded, in turn."""

import random
from copy import deepcopy
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.gpu import peak
from benchmarks.gpu.correct import models
from benchmarks.gpu.place import Place, queries
from operant.models.options import ModelOptions
from operant.models.policy import Policy
from operant.types import Batch


def main(place: Place, report: Any) -> None:
    good = True
    for name, model in models().items():
        found = gaps(place, model)
        # Both round to bfloat16, so the packed gradient may not be much further from the truth than the padded one.
        good &= found["packed"] and found["packed_gap"] < 1.5 * found["padded_gap"] + 5e-3
        report(**{f"{name}/{k}": v for k, v in found.items()}, good=good)
    for name in ("gpt2", "llama-1b"):
        found = speeds(place, name)
        report(**{f"{name}/{k}": v for k, v in found.items()}, good=good)


def gaps(place: Place, model: Any) -> dict[str, Any]:
    """Relative differences of the gradient of ragged rows from that in float32 on a CPU, packed and padded."""
    model = model.to(torch.bfloat16).float()  # the same weights in both
    truth, _ = gradient(model, "cpu", "float32", "on")
    found: dict[str, Any] = {}
    for way, packing in (("packed", "on"), ("padded", "off")):
        mine, used = gradient(model, place.device, "bfloat16", packing)
        found |= {f"{way}_gap": float((mine - truth).norm() / truth.norm())} | ({way: used} if way == "packed" else {})
    return found


def gradient(model: Any, device: str, precision: str, packing: str) -> tuple[torch.Tensor, bool]:
    """The gradient of the mean log-prob over rows of 2 to 60 tokens as one vector, and whether rows were packed."""
    policy = Policy(deepcopy(model).to(device), options=ModelOptions(precision=precision, packing=packing))
    replies = [[5 + (3 * i + j) % 90 for j in range(1 + (11 * i) % 59)] for i in range(24)]
    batch = Batch.given(queries(24, 1), replies)
    out = policy(batch)
    (out.logprobs.sum() / sum(map(len, replies))).backward()
    gradients = [p.grad.detach().cpu().double().flatten() for p in policy.trainable() if p.grad is not None]
    return torch.cat(gradients), policy.modes.packed


def speeds(place: Place, name: str) -> dict[str, Any]:
    """Median seconds of an update in bfloat16: 128 replies of 16 to 512 tokens, minibatch 32, packed and padded."""
    rows, most, times = place.sized((128, 512, 4), (8, 24, 1))
    draw = random.Random(0)
    lengths = [draw.randint(most // 32 + 1, most) for _ in range(rows)]
    prompts, replies = queries(rows, 8), [q * n for q, n in zip(queries(rows, 1), lengths, strict=True)]
    options = {"epochs": 1, "minibatch": rows // 4, "micro_tokens": 8192, "kl.coef": 0.0, "watch_every": 0}
    found: dict[str, Any] = {"tokens": sum(lengths) + 8 * rows}
    learners = {
        way: place.learner(name, reference=None, **options, **{"model.packing": on})
        for way, on in (("packed", "on"), ("padded", "off"))
    }
    seconds: dict[str, list[float]] = {way: [] for way in learners}
    for _ in range(times + 1):  # in turn
        for way, learner in learners.items():
            before = peak.reset()
            step = partial(learner.step, prompts, replies, [float(i % 2) for i in range(rows)])
            seconds[way] += place.updates(learner, step, 1)
            found[f"{way}_gb"] = peak.most() - before
    for way, values in seconds.items():
        found[f"{way}_seconds"] = median(values[1:])
        found[f"{way}_tokens_per_s"] = found["tokens"] / found[f"{way}_seconds"]
    return found | {"speed_ratio": found["padded_seconds"] / found["packed_seconds"]}
