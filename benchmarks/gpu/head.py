"""The loss head, forward and backward, against the eager one: V=151,936, D=4096, 8,192 tokens in bfloat16."""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import peak
from benchmarks.gpu.place import Place
from operant.models import logprobs
from operant.sampling import Sampling


def main(place: Place, report: Any) -> None:
    vocabulary, width, count = place.sized((151_936, 4096, 8192), (5000, 32, 64))
    logprobs.BUDGET = 20 * vocabulary if place.tiny else logprobs.BUDGET  # several chunks, as with the real shape
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=False, device=place.device, dtype=torch.bfloat16)
    states = torch.randn(count, width, device=place.device).to(torch.bfloat16).requires_grad_()
    ids = torch.randint(0, vocabulary, (count,), device=place.device)

    def ours() -> Tensor:
        places = torch.zeros_like(ids)
        return logprobs.score(head, states, ids, places, Sampling(), vocabulary=vocabulary)["logprobs"]

    def eager() -> Tensor:
        return head(states).float().log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)

    found = {"shape": f"V={vocabulary} D={width} tokens={count}"}
    for name, way in (("ours", ours), ("eager", eager)):
        found |= {f"{name}/{k}": v for k, v in measured(place, way, head, states).items()}
        report(**found)
    mine, its = gradients(ours, head, states), gradients(eager, head, states)
    found["gradient_gap"] = float((mine - its).norm() / its.norm())
    found["speed_ratio"] = found["eager/seconds"] / found["ours/seconds"]
    found["memory_ratio"] = found["ours/gb"] / max(found["eager/gb"], 1e-9)
    report(**found, good=found["gradient_gap"] < 2e-2)


def measured(place: Place, way: Callable[[], Tensor], head: nn.Module, states: Tensor) -> dict[str, float]:
    """Median seconds of forward and backward, and the peak memory above that before."""
    forward, both = [], []
    gradients(way, head, states)
    before = peak.reset()
    for _ in range(place.sized(5, 2)):
        forward.append(place.seconds(way))
        both.append(place.seconds(lambda: way().sum().backward()))
    numbers = {"forward_seconds": median(forward), "seconds": median(both), "gb": peak.most() - before}
    head.zero_grad()
    states.grad = None
    return numbers


def gradients(way: Callable[[], Tensor], head: nn.Module, states: Tensor) -> Tensor:
    """The gradient of the summed log-probs with respect to the states, in float32."""
    head.zero_grad()
    states.grad = None
    way().sum().backward()
    assert states.grad is not None
    gradient, states.grad = states.grad.float(), None
    head.zero_grad()
    return gradient
