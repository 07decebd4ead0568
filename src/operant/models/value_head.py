"""Heads on a language model's last hidden state: the value of a state, and of each token in it (Q)."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from operant.bounds import bounded, check_bounds
from operant.models.logprobs import score
from operant.sampling import Sampling
from operant.types import OperantError


@dataclass(frozen=True)
class ValueOptions:
    """The critic: a head on the policy's own states, or a network of its own.

    Raises: OperantError for another number of layers, or an unknown `init`.
    """

    layers: int = bounded(1, choices=(1, 2), rule="1 (linear) or 2 (an MLP)")
    """1: linear. 2: Linear, ReLU, Linear with twice the width."""
    init: str = bounded("zero", choices=("zero", "torch", "normal", "small"))
    """zero | torch (nn.Linear's own, as TRL's) | normal (std 0.2) | small (std 1 / sqrt(D + 1), Ziegler et al.)."""
    detach: bool = False
    """Stop the gradient of the value loss before the language model's weights."""
    critic: str | None = None
    """`copy` (of the policy) or the name of a model: a separate critic network."""
    actions: bool = False
    """Two further heads with a value Q of each token. A method that needs them sets it."""

    def __post_init__(self) -> None:
        check_bounds(self, "value")
        if self.actions and self.critic is not None:
            raise OperantError(f"value.critic={self.critic!r}: Q values are heads of the policy itself; leave it out")


class ValueHead(nn.Module):
    """[..., D] -> [...]. It computes in float32, or in the language model's dtype if that is wider."""

    def __init__(self, width: int, options: ValueOptions = ValueOptions()):
        super().__init__()
        self.detach = options.detach
        self.net = self._net(width, 1, options)

    @staticmethod
    def _net(width: int, outputs: int, options: ValueOptions) -> nn.Sequential:
        last = nn.Linear(width if options.layers == 1 else 2 * width, outputs)
        stds = {"zero": 0.0, "normal": 0.2, "small": (last.in_features + 1) ** -0.5}
        if options.init in stds:
            nn.init.normal_(last.weight, std=stds[options.init])
            nn.init.zeros_(last.bias)
        inner = [] if options.layers == 1 else [nn.Linear(width, 2 * width), nn.ReLU()]
        return nn.Sequential(*inner, last).float()

    def _of(self, net: nn.Sequential, states: Tensor) -> Tensor:
        with torch.autocast(states.device.type, enabled=False):
            known = states.detach() if self.detach else states
            return net(known.to(torch.promote_types(known.dtype, next(net.parameters()).dtype)))

    def forward(self, states: Tensor) -> Tensor:
        return self._of(self.net, states).squeeze(-1)


class ActionValueHead(ValueHead):
    """The value V of a state, [..., D] -> [...], and two estimates of the value Q of each token, [..., D] -> [..., V].

    The smaller one of two is less often too large (arXiv:2206.11871, section 4.3).
    """

    def __init__(self, width: int, options: ValueOptions, vocabulary: int):
        super().__init__(width, options)
        self.vocabulary = vocabulary
        self.one, self.two = self._net(width, vocabulary, options), self._net(width, vocabulary, options)

    def least(self, states: Tensor) -> Tensor:
        return torch.minimum(self._of(self.one, states), self._of(self.two, states))

    def scored(self, states: Tensor, ids: Tensor, places: Tensor) -> dict[str, Tensor]:
        """`Outputs.q` of tokens [N] at `places` in their replies, in the states before them [N, D]; in chunks."""
        found: dict[str, Tensor] = {}
        for name, net in (("one", self.one), ("two", self.two)):
            numbers = score(partial(self._of, net), states, ids, places, Sampling(), vocabulary=self.vocabulary)
            found |= {name: numbers["logprobs"] + numbers["logsumexp"], f"{name}_nll": -numbers["logprobs"]}
        return found
