"""torch's optimizers with float32 copies of 16-bit weights, so that small steps are not lost in rounding."""

from typing import Any

import torch
from torch import Tensor


class MasterWeights(torch.optim.Optimizer):
    """Before one of torch's optimizers: it changes float32 master weights of every 16-bit parameter, and all others.

    A step of 1e-5 is lost in a bfloat16 weight, which has eight bits. It is added to the master weight, and the weight
    is the rounded master weight (Micikevicius et al., 2018, arXiv:1710.03740).
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any):
        self.pairs: list[tuple[Tensor, Tensor]] = []
        """Each 16-bit parameter and its master weight."""
        for group in groups:
            optimised = []
            for p in group["params"]:
                if p.dtype in (torch.bfloat16, torch.float16):
                    self.pairs.append((p, p.detach().float().requires_grad_()))
                    optimised.append(self.pairs[-1][1])
                else:
                    optimised.append(p)
            group["params"] = optimised
        super().__init__(groups, **settings)

    @torch.no_grad()
    def step(self, closure: Any = None, *, shrink: float = 1.0) -> None:
        """Make a step with the gradients times `shrink` on the master weights, and round them to the parameters."""
        for p, master in self.pairs:
            if p.grad is None:
                master.grad = None
            elif master.grad is None:
                master.grad = p.grad.float()
            else:
                master.grad.copy_(p.grad)
        self.move(shrink)
        if self.pairs:
            torch._foreach_copy_([p for p, _ in self.pairs], [master for _, master in self.pairs])

    def move(self, shrink: float) -> None:
        """Make one step of the weights that the optimizer has: master weights, and parameters without them."""
        if shrink != 1:
            torch._foreach_mul_(gradients(self), shrink)
        super().step()

    @torch.no_grad()
    def renew(self) -> None:
        """Set the master weights to the parameters, after these were changed from outside."""
        for p, master in self.pairs:
            master.copy_(p)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters; those of master weights keep their memory for the next step."""
        for p, _ in self.pairs:
            p.grad = None
        mastered = {id(master) for _, master in self.pairs}
        for group in self.param_groups:
            for p in group["params"]:
                if id(p) not in mastered:
                    p.grad = None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"masters": [master.detach() for _, master in self.pairs]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        for (p, master), saved in zip(self.pairs, state.pop("masters", []), strict=True):
            master.copy_(saved)
            p.copy_(saved)
        super().load_state_dict(state)


class MasterAdamW(MasterWeights, torch.optim.AdamW):
    """AdamW, with `fused=True`."""

    def move(self, shrink: float) -> None:
        """Make one step of the weights that the optimizer has; the gradients are clipped while they are read."""
        coarse = any(p.dtype == torch.float64 for group in self.param_groups for p in group["params"])
        if shrink == 1 or coarse:  # the scale below is a float32, too coarse for float64 weights
            self.grad_scale = self.found_inf = None
            super().move(shrink)
            return
        # torch's fused kernel divides the gradients by a scale while it reads them, which saves a pass over them.
        self.grad_scale, self.found_inf = torch.tensor(1 / shrink), torch.zeros(())
        super().move(1.0)


class MasterRMSprop(MasterWeights, torch.optim.RMSprop):
    """RMSprop: eps is added outside the root."""


class MasterSGD(MasterWeights, torch.optim.SGD):
    """SGD, with or without momentum."""


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients of all parameters that have one."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
