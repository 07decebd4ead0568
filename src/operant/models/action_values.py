"""The Q heads: two estimates of the value of each token, beside the value head."""

import torch
from torch import Tensor

from operant.models.logprobs import score
from operant.models.value_head import ValueHead, ValueOptions
from operant.sampling import Sampling


class ActionValueHead(ValueHead):
    """The value V of a state, [..., D] -> [...], and two estimates of the value Q of each token, [..., D] -> [..., V].

    The smaller one of two is less often too large (arXiv:2206.11871, section 4.3).
    """

    def __init__(self, width: int, options: ValueOptions, vocabulary: int):
        super().__init__(width, options)
        self.vocabulary = vocabulary
        self.one, self.two = self._net(width, vocabulary, options), self._net(width, vocabulary, options)

    def q_one(self, states: Tensor) -> Tensor:
        return self._of(self.one, states)

    def q_two(self, states: Tensor) -> Tensor:
        return self._of(self.two, states)

    def least(self, states: Tensor) -> Tensor:
        """The smaller estimate of each token."""
        return torch.minimum(self.q_one(states), self.q_two(states))

    def scored(self, states: Tensor, ids: Tensor, places: Tensor) -> dict[str, Tensor]:
        """`Outputs.q` of tokens [N] at `places` in their replies, in the states before them [N, D]; in chunks."""
        found: dict[str, Tensor] = {}
        for name, head in (("one", self.q_one), ("two", self.q_two)):
            numbers = score(head, states, ids, places, Sampling(), vocabulary=self.vocabulary)
            found |= {name: numbers["logprobs"] + numbers["logsumexp"], f"{name}_nll": -numbers["logprobs"]}
        return found
