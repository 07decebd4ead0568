"""A method that looks at a copy of the policy: a target network, which follows slowly, is its second anchor."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from operant.algorithms import find
from operant.objectives import losses
from operant.types import Batch, Outputs


def look(batch: Batch, outputs: Callable[[str], Outputs]) -> Mapping[str, Tensor]:
    """Before each update: the log-probs of the batch's tokens under the target network, and its values."""
    target = outputs("target")
    assert target.values is not None  # `with_values` keeps the critic in the copy
    return {"target_logprobs": target.logprobs, "target_values": target.values}


def anchored(out: Outputs, batch: Batch, *, clip: float = 0.2, anchor_coef: float = 0.1) -> dict[str, Tensor]:
    """PPO, and half the squared distance of log-probs and values from those of the target network.

    Options: --algorithm anchored_ppo --loss.anchor-coef 0.2
    """
    terms = losses.ppo(out, batch, clip=clip)
    assert out.values is not None
    distance = (out.logprobs - batch.extra["target_logprobs"]) ** 2 + (out.values - batch.extra["target_values"]) ** 2
    return terms | {"loss": terms["loss"] + 0.5 * anchor_coef * distance}


PPO = find("ppo")
ANCHORED_PPO = replace(
    PPO, loss=anchored, look=look, copies={**PPO.copies, "target": ("polyak", 0.1)}, with_values=("target",)
)
