"""FLOP/s of the update as a share of the device's: 6 FLOP per weight and token, the head only at action tokens."""

from typing import Any

import torch
from torch import nn

from benchmarks.gpu import peak
from benchmarks.gpu.machine import product_rate
from benchmarks.gpu.place import Place, queries

NOMINAL = {"H200": 989.0, "H100": 989.0, "A100": 312.0}
"""Dense bfloat16 TFLOP/s by the data sheet."""
BAR = 0.4


def main(place: Place, report: Any) -> None:
    reached = product_rate(place)
    report(product_tflops=reached)
    for name in ("gpt2", "llama-1b"):
        found = measured(place, name)
        found["share_of_products"] = found["tflops"] / reached
        found["mfu"] = found["tflops"] / nominal(reached)
        report(**{f"{name}/{k}": v for k, v in found.items()})
    report(good=place.tiny or found["mfu"] >= BAR)


def measured(place: Place, name: str) -> dict[str, float]:
    """Full updates in bfloat16: 32 rows of 512 tokens, half of them actions, in one minibatch."""
    rows, half, epochs = place.sized((32, 256, 4), (4, 8, 2))
    options = {"epochs": epochs, "micro_tokens": 2 * rows * half, "max_tokens": half, "watch_every": 0}
    learner = place.learner(name, reference=None, **{"kl.coef": 0.0, **options})
    prompts, replies = queries(rows, half), [q[::-1] for q in queries(rows, half)]
    work = epochs * flops(learner.policy, 2 * rows * half, rows * half)
    before = peak.reset()

    def step() -> None:
        learner.step(prompts, replies, [float(i % 2) for i in range(rows)])

    best = min(place.updates(learner, step, place.sized(4, 1)))
    return {"seconds": best, "tflops": work / best / 1e12, "held_gb": before, "gb": peak.most()}


def flops(policy: Any, tokens: int, actions: int) -> float:
    """6 FLOP per weight: of the blocks for every token, of the head for every action. Attention scores are left out."""
    modules = [m for m in policy.model.modules() if isinstance(m, nn.Embedding) or m is policy.head]
    tables = {id(p) for module in modules for p in module.parameters()}
    body = sum(p.numel() for p in policy.model.parameters() if p.ndim == 2 and id(p) not in tables)
    return 6.0 * (body * tokens + policy.head.weight.numel() * actions)


def nominal(reached: float) -> float:
    """TFLOP/s by the data sheet, or `reached` if the device is unknown."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((rate for part, rate in NOMINAL.items() if part in name), reached)
