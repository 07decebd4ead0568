"""PPO-ptx: PPO on the policy's own replies, and imitation of given ones in the same step (arXiv:2203.02155)."""

from dataclasses import replace

import torch
from torch import Tensor

from operant.algorithms import find
from operant.objectives import losses
from operant.types import Batch, Outputs


def ppo_and_imitation(
    out: Outputs, batch: Batch, *, clip: float = 0.2, value_coef: float = 0.1, imitation_coef: float = 1.0
) -> dict[str, Tensor]:
    """PPO where the policy has acted, and `imitation_coef` times the negative log-likelihood of given replies.

    Options: --algorithm ppo_ptx --loss.imitation-coef 0.5 --tasks prompts_with_completions.jsonl
    """
    terms = losses.ppo(out, batch, clip=clip, value_coef=value_coef)
    given = batch.demonstrated[:, None] if batch.demonstrated is not None else torch.zeros_like(batch.actions)
    terms["given/loss"] = imitation_coef * -out.logprobs
    terms["loss"] = torch.where(given, terms["given/loss"], terms["loss"])
    return terms


PPO_PTX = replace(find("ppo"), loss=ppo_and_imitation, source="both")
