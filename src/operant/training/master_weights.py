"""AdamW that keeps float32 copies of weights in fewer bits, so that small steps are not lost."""

from typing import Any

import torch
from torch import Tensor


class MasterAdamW(torch.optim.AdamW):
    """AdamW on float32 masters of every parameter that computes in fewer bits; on the parameter itself otherwise.

    A step of 1e-5 is lost in a bfloat16 weight, which has eight bits: it is added to the master, and the weight is what
    the master rounds to (Micikevicius et al., 2018, arXiv:1710.03740).
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any):
        self.pairs: list[tuple[Tensor, Tensor]] = []
        for group in groups:
            group["params"] = [self._master(p) for p in group["params"]]
        super().__init__(groups, **settings)

    def _master(self, p: Tensor) -> Tensor:
        if p.dtype not in (torch.bfloat16, torch.float16):
            return p
        master = p.detach().float().requires_grad_()
        self.pairs.append((p, master))
        return master

    @torch.no_grad()
    def step(self, closure: Any = None, *, shrink: float = 1.0) -> None:
        """Gradients to the masters, a step with them times `shrink`, and the masters' values to what computes."""
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
        """One step of what the optimizer holds."""
        if shrink != 1 and any(p.dtype == torch.float64 for group in self.param_groups for p in group["params"]):
            torch._foreach_mul_(gradients(self), shrink)
            shrink = 1.0  # the scale below has the digits of float32
        # torch's fused kernel divides by a scale while it reads the gradients: a pass over them less.
        self.grad_scale = None if shrink == 1 else torch.tensor(1 / shrink)
        self.found_inf = None if shrink == 1 else torch.zeros(())
        super().step()

    @torch.no_grad()
    def renew(self) -> None:
        """The weights have come from elsewhere: the masters are what they are now."""
        for p, master in self.pairs:
            master.copy_(p)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the parameters that compute; the masters' gradients keep their memory for the next step."""
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
        for (p, master), held in zip(self.pairs, state.pop("masters", []), strict=True):
            master.copy_(held)
            p.copy_(held)
        super().load_state_dict(state)


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients of all parameters that have one."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
