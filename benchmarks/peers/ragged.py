"""Replies with lengths that are drawn beforehand and hidden from the scheduler."""

from dataclasses import dataclass

import torch

from operant import Sampling
from operant.sampling import uniforms


@dataclass(frozen=True)
class Forced(Sampling):
    """Ends every reply at a length that is drawn beforehand and that only the sampling of a token can see.

    A reply is recognised by its random numbers: those of all replies and positions are sorted once per step.
    """

    def prepare(self, keys: list[int], lengths: list[int]) -> "Forced":
        table = torch.stack([uniforms(keys, place) for place in range(self.max_tokens)], 1)
        places = torch.arange(1, self.max_tokens + 1).expand_as(table)
        due = places == torch.tensor(lengths)[:, None]
        order = table.flatten().argsort()
        object.__setattr__(self, "table", (table.flatten()[order], due.flatten()[order], self.stop_tokens[0]))
        return self

    def draw(self, scores, uniforms, *rest):
        known, due, end = (t.to(scores.device) if isinstance(t, torch.Tensor) else t for t in self.table)
        over = due[torch.searchsorted(known, uniforms.double())]
        scores[:, end] = torch.where(over, 1e9, -torch.inf)
        return Sampling.draw(scores, uniforms, *rest)
