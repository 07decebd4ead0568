"""operant without one of its optimisations: `pieces_side.py NAME` patches it out and runs `operant_side.py`."""

import sys
from contextlib import contextmanager

import operant_side
import torch

from operant.engines.native import engine
from operant.models import kernels, logprobs
from operant.sampling import Sampling
from operant.training import objective, optimizer


def activations() -> None:
    """Compute GELU in transformers' seven kernels."""
    kernels.fuse_activations = lambda model: None


def embedding() -> None:
    """Compute a gradient of the whole embedding table in every backward pass."""

    @contextmanager
    def never(on: bool = True):
        yield

    objective.direct_gradients = never


def clipping() -> None:
    """Scale the gradients in a separate pass."""

    def apply(made, options, *, lr: float | None = None, shrink: float = 1.0):
        gradients = [p.grad for group in made.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(gradients, shrink)
        optimizer.apply(made, options, lr=lr)

    from operant.training import update

    update.apply = apply


def sweep() -> None:
    """Compute log-softmax, entropy and logsumexp separately, with autograd's backward pass."""

    class Plain:
        @staticmethod
        def apply(logits, inputs):
            z = inputs.sampling.adjust(logits, inputs.places)
            logp = z.log_softmax(-1)
            entropy = -(logp.exp() * logp).sum(-1)
            return logp.gather(-1, inputs.ids[:, None]).squeeze(-1), z.logsumexp(-1), entropy

    logprobs.Sweep = Plain


def drawing() -> None:
    """Sample with one float64 cumulative sum over the whole vocabulary."""

    def draw(scores, uniforms, work=None):
        top = scores.amax(-1, keepdim=True)
        cumulative = (scores - top).exp_().cumsum(-1, dtype=torch.float64)
        mass = cumulative[:, -1:].contiguous()
        ids = torch.searchsorted(cumulative, uniforms.to(cumulative)[:, None] * mass, right=True)
        ids = torch.minimum(ids, torch.searchsorted(cumulative, mass, right=False))
        return ids.squeeze(-1), (scores.gather(-1, ids) - top - mass.log().to(scores)).squeeze(-1)

    Sampling.draw = staticmethod(draw)


def buffer() -> None:
    """Use transformers' cache, which is concatenated again at every token."""
    from dataclasses import replace

    build = engine.try_decoding
    engine.try_decoding = lambda policy: replace(build(policy), pooled=False)


def retiring() -> None:
    """Compute finished rows until the longest reply has ended."""
    engine.COMPACT_AT = 0.0


def reading_once() -> None:
    """Prefill every prompt of a group separately."""
    from operant.engines.native import decoding

    decoding.distinct = lambda prompts: ([list(p) for p in prompts], list(range(len(prompts))))


def sorting() -> None:
    """Cut micro-batches in the order of the rows, not by length."""
    from operant.types import Batch

    def as_they_come(batch: Batch, units, budget, *, packed):
        width, cuts = int(batch.mask.sum(1).max()), [[]]
        for rows in units:
            if cuts[-1] and width * (len(cuts[-1]) + len(rows)) > budget:
                cuts.append([])
            cuts[-1] += rows
        return cuts

    objective.cut = as_they_come


def attention() -> None:
    """Use the fused attention kernel for short bfloat16 rows as well."""
    kernels.SHORT = 0


def main() -> None:
    name = sys.argv[1]
    if name != "nothing":
        globals()[name]()
    operant_side.main()


if __name__ == "__main__":
    main()
