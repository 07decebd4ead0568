"""operant without one of the pieces that make it fast: `pieces_side.py NAME`. The rest is `operant_side.py`."""

import sys
from contextlib import contextmanager

import operant_side
import torch

from operant.engines.native import engine
from operant.models import logprobs
from operant.models import options as model_options
from operant.sampling import Sampling
from operant.training import microbatch, optimizer


def activations() -> None:
    """GELU in transformers' seven kernels."""
    model_options.fuse_activations = lambda model: None


def embedding() -> None:
    """A gradient of the whole embedding table in every backward pass."""

    @contextmanager
    def never(on: bool = True):
        yield

    microbatch.direct_gradients = never


def clipping() -> None:
    """Gradients are multiplied in a pass of their own."""

    def apply(made, options, *, shrink: float = 1.0):
        held = [p.grad for group in made.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(held, shrink)
        optimizer.apply(made, options)

    from operant.training import update

    update.apply = apply


def sweep() -> None:
    """Log-softmax, entropy and logsumexp each by themselves, and autograd's backward pass."""

    class Plain:
        @staticmethod
        def apply(logits, told):
            z = told.sampling.adjust(logits, told.places)
            logp = z.log_softmax(-1)
            entropy = -(logp.exp() * logp).sum(-1)
            return logp.gather(-1, told.ids[:, None]).squeeze(-1), z.logsumexp(-1), entropy

    logprobs.Sweep = Plain


def drawing() -> None:
    """One float64 cumulative sum over the whole vocabulary."""

    def draw(scores, uniforms, work=None):
        top = scores.amax(-1, keepdim=True)
        cumulative = (scores - top).exp_().cumsum(-1, dtype=torch.float64)
        mass = cumulative[:, -1:].contiguous()
        ids = torch.searchsorted(cumulative, uniforms.to(cumulative)[:, None] * mass, right=True)
        ids = torch.minimum(ids, torch.searchsorted(cumulative, mass, right=False))
        return ids.squeeze(-1), (scores.gather(-1, ids) - top - mass.log().to(scores)).squeeze(-1)

    Sampling.draw = staticmethod(draw)


def buffer() -> None:
    """transformers' own cache, which is put together anew at every token."""
    from dataclasses import replace

    build = engine.try_decoding
    engine.try_decoding = lambda made: replace(build(made), pooled=False)


def retiring() -> None:
    """Rows whose reply has ended are carried along until the longest has."""
    engine.COMPACT_AT = 0.0


def reading_once() -> None:
    """Every prompt of a group is read by itself."""
    from operant.engines.native.engine import decoding

    decoding.distinct = lambda prompts: ([list(p) for p in prompts], list(range(len(prompts))))


def sorting() -> None:
    """Micro-batches as the rows come, whatever their length."""
    from operant.types import Batch

    def as_they_come(batch: Batch, held, budget, *, packed):
        width, cuts = int(batch.mask.sum(1).max()), [[]]
        for rows in held:
            if cuts[-1] and width * (len(cuts[-1]) + len(rows)) > budget:
                cuts.append([])
            cuts[-1] += rows
        return cuts

    microbatch.cut = as_they_come


def attention() -> None:
    """The fused attention kernel for short bfloat16 rows, too."""
    model_options.SHORT = 0


def main() -> None:
    name = sys.argv[1]
    if name != "nothing":
        globals()[name]()
    operant_side.main()


if __name__ == "__main__":
    main()
