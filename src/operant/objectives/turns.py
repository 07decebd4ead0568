"""Turns as single actions: sums, means and ends of what their tokens have."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Turns:
    """The turns of E episodes of A actions; K is the largest number of turns of an episode. Padding is 0."""

    place: Tensor
    """[E, A] int: the number of the action's turn among the turns of its episode that have actions; K at padding."""
    count: Tensor
    """[E, K] int: the number of actions of each turn."""

    @staticmethod
    def of(turns: Tensor) -> "Turns":
        """Make it from the turn of each action, [E, A] as in `Batch.turns`, -1 at padding."""
        opens = turns != torch.cat([torch.full_like(turns[:, :1], -1), turns[:, :-1]], 1)
        number = opens.cumsum(1) - 1
        most = int(torch.where(turns >= 0, number, -1).max()) + 1 if turns.numel() else 0
        place = torch.where(turns >= 0, number, most)
        return Turns(place, place.new_zeros(len(turns), most + 1).scatter_add(1, place, place * 0 + 1)[:, :most])

    @property
    def position(self) -> Tensor:
        """[E, A] int: the index of each action within its turn."""
        begins = torch.cat([self.count.cumsum(1) - self.count, self.count.sum(1, keepdim=True)], 1)
        return torch.arange(self.place.shape[1], device=self.place.device) - begins.gather(1, self.place)

    def summed(self, x: Tensor) -> Tensor:
        """[E, A] -> [E, K] the sum over each turn."""
        most = self.count.shape[1]
        return x.new_zeros(len(x), most + 1).scatter_add(1, self.place, x)[:, :most]

    def mean(self, x: Tensor) -> Tensor:
        """[E, A] -> [E, K] the mean over each turn."""
        return self.summed(x) / self.count.clamp(min=1)

    def first(self, x: Tensor) -> Tensor:
        """[E, A] -> [E, K] at the first action of each turn."""
        return self.summed(torch.where(self.position == 0, x, 0))

    def last(self, x: Tensor) -> Tensor:
        """[E, A] -> [E, K] at the last action of each turn."""
        follows = torch.cat([self.place[:, 1:], torch.full_like(self.place[:, :1], -1)], 1)
        return self.summed(torch.where(self.place != follows, x, 0))

    def spread(self, x: Tensor) -> Tensor:
        """[E, K] -> [E, A] the number of its turn for each action."""
        return torch.cat([x, torch.zeros_like(x[:, :1])], 1).gather(1, self.place) if x.shape[1] else x
