"""Gradients of gradients: refused where the gradient is written by hand, and those of a float64 twin where allowed."""

import copy

import pytest
import torch
from cases import cases
from rigs import gap, said
from toys import lm

from operant import OperantError, Policy, Sampling, ValueOptions
from operant.models.kernels import direct_gradients
from operant.models.options import ModelOptions
from operant.rollouts.collate import collate

PAIRS = [([3, 4, 5], [6, 7, 8, 2]), ([9], [10, 11]), ([12, 13], [14, 15, 16, 17, 18])]


def product(outputs, parameters, seed=1) -> torch.Tensor:
    """The product of the Hessian of three numbers of a forward pass with a random direction, as one vector."""
    draw = torch.Generator().manual_seed(seed)
    slopes = torch.autograd.grad(outputs, parameters, create_graph=True, allow_unused=True)
    directions = [torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype) for p in parameters]
    along = sum((g * v).sum() for g, v in zip(slopes, directions, strict=True) if g is not None)
    found = torch.autograd.grad(along, parameters, allow_unused=True)
    return torch.cat([(torch.zeros_like(p) if h is None else h).flatten() for p, h in zip(parameters, found)])


def plain(model, other, sampling) -> torch.Tensor:
    """The same numbers by the model's own forward pass, a row at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for prompt, reply in PAIRS:
        ids, places = torch.tensor([prompt + reply]), torch.arange(len(reply))
        span = slice(len(prompt) - 1, -1)
        p, q = (sampling.adjust(m(ids).logits[0, span], places).log_softmax(-1) for m in (model, other))
        allowed = p.detach().isfinite()
        gained = torch.where(allowed, p.exp() * p.masked_fill(~allowed, 0), 0)
        apart = torch.where(allowed, p.exp() * (p.masked_fill(~allowed, 0) - q.masked_fill(~allowed, 0)), 0)
        total = total + p.gather(-1, ids[0, len(prompt) :, None]).exp().sum()
        total = total + gained.sum(-1).square().sum() + apart.sum()
    return total


@cases(("gpt2", "on"), ("llama", "off"))
def test_inside_the_second_derivative_is_that_of_a_float64_twin(kind, packing):
    sampling = Sampling(temperature=0.7, banned=(19,), min_tokens=2, stop_tokens=(2,))
    policy, old = (Policy(lm(kind, seed=s), options=ModelOptions(packing=packing)) for s in (0, 1))
    batch = collate([said(*pair) for pair in PAIRS], [0.0] * 3)
    at = batch.actions
    with policy.double_backward():
        out = policy(batch, sampling, against=old, entropy_gradient=True)
        total = out.logprobs[at].exp().sum() + out.entropy[at].square().sum() + out.kl["reverse"][at].sum()
        mine = product(total, policy.trainable())
    twins = [copy.deepcopy(m.model).double().requires_grad_() for m in (policy, old)]
    for twin in twins:
        twin.set_attn_implementation("eager")
    assert gap(mine, product(plain(twins[0], twins[1], sampling), list(twins[0].parameters()))) < 1e-4


def test_outside_it_is_refused_with_the_remedy():
    policy = Policy(lm("gpt2"), value=ValueOptions(init="normal"))
    out = policy(collate([said(*pair) for pair in PAIRS], [0.0] * 3))
    with pytest.raises(OperantError, match=r"gradient of the gradient of log-probs.*policy\.double_backward"):
        product(out.logprobs.sum(), policy.trainable())
    with direct_gradients():
        table = policy.model.get_input_embeddings()(torch.tensor([3, 4]))
    with pytest.raises(OperantError, match="direct_gradients has no gradients of gradients"):
        table.square().sum().backward(create_graph=True)
