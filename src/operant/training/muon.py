"""Muon (Jordan et al., 2024): hidden matrices take steps whose singular values are all near 1; torch's own.

    B <- 0.95 B + 0.05 G                                    G: the gradient; B: the state
    W <- W - lr 0.2 sqrt(max(rows, columns)) NS(0.95 B + 0.05 G)

NS sets singular values to about 1 by five steps of Newton and Schulz. Embeddings, output heads, value heads, vectors,
and what else is not the matrix of a linear layer are left to AdamW. The factor makes a step as large as one of AdamW
(Liu et al., 2025, arXiv:2502.16982, section 2.2), so both have one learning rate.
"""

from typing import Any

import torch
from torch import Tensor, nn

from operant import distributed
from operant.models.policy import Policy
from operant.models.value_head import ValueHead
from operant.training.optimizer import MasterWeights, gradients
from operant.types import require


def hidden_matrices(policy: nn.Module) -> list[Tensor]:
    """The trained matrices of linear layers, LoRA's among them, without those of output and value heads."""
    from transformers.pytorch_utils import Conv1D

    heads = {id(part.head.weight) for part in policy.modules() if isinstance(part, Policy)}  # tied ones, too
    values = {id(p) for part in policy.modules() if isinstance(part, ValueHead) for p in part.parameters()}
    linear = {id(part.weight) for part in policy.modules() if isinstance(part, nn.Linear | Conv1D)}
    return [p for p in distributed.trained(policy).values() if id(p) in linear - heads - values]


class Muon(MasterWeights):
    """torch's Muon, with its momentum of 0.95 (Nesterov), and torch's AdamW for all other weights."""

    def __init__(self, groups: list[dict[str, Any]], policy: nn.Module, **settings: object):
        hidden = {id(p) for p in hidden_matrices(policy)}
        require(hidden, "optimizer.kind=muon: no matrix of a hidden layer is trained; use adamw")
        require(hasattr(torch.optim, "Muon"), f"optimizer.kind=muon needs torch 2.9, and this is {torch.__version__}")
        split = [
            {**group, "params": params, "hidden": inner}
            for group in groups
            for inner in (True, False)
            if (params := [p for p in group["params"] if (id(p) in hidden) == inner])
        ]
        super().__init__(split, defaults=settings)

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """As in `MasterWeights`. torch moves the numbers of steps of groups that say fused, and these do not."""
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            state |= {name: x.to(p.device) for name, x in state.items()}

    @torch.no_grad()
    def move(self, shrink: float) -> None:
        """As in `MasterWeights`: each group is stepped by an optimizer that has the state of this one."""
        if shrink != 1:
            torch._foreach_mul_(gradients(self), shrink)
        for group in self.param_groups:
            shared = {name: group[name] for name in ("lr", "weight_decay")}
            if group["hidden"]:
                stepping = torch.optim.Muon(group["params"], **shared, adjust_lr_fn="match_rms_adamw")
            else:
                others = {name: group[name] for name in ("betas", "eps")}
                stepping = torch.optim.AdamW(group["params"], **shared, **others, fused=True)
            stepping.state = self.state
            stepping.step()
