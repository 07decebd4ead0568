"""Exact KL, both ways, and its gradient, against an enumeration of the vocabulary in float64."""

from copy import deepcopy

import torch
from cases import cases
from toys import lm

from operant import Policy, Rollout, Sampling, Task, Turn
from operant.rollouts.collate import collate

TURNS = [([5, 6, 7], [8, 2, 9, 4]), ([4], [7, 7]), ([9, 3, 3, 3, 11], [2])]
SAMPLING = Sampling(temperature=0.8, max_tokens=4, min_tokens=2, stop_tokens=(2, 3), banned=(13,))


def enumerated(model, other, ways):
    """[N] by the definition, one state after the other; the gradient stands in the model's parameters."""
    for prompt, action in TURNS:
        for place in range(len(action)):
            prefix = torch.tensor([prompt + action[:place]])
            p, q = ((m(prefix).logits[0, -1] / 0.8).clone() for m in (model, other))
            gone = [13] + ([2, 3] if place < 2 else [])
            possible = [v for v in range(20) if v not in gone]
            p, q = p[possible].log_softmax(0), q[possible].log_softmax(0).detach()
            m = ((p.exp() + q.exp()) / 2).log()
            yield {
                "reverse": (p.exp() * (p - q)).sum(),
                "forward": (q.exp() * (q - p)).sum(),
                "jensen_shannon": ((p.exp() * (p - m)).sum() + (q.exp() * (q - m)).sum()) / 2,
            }[ways]


@cases(("gpt2", "reverse"), ("llama", "forward"), ("gpt2", "jensen_shannon"))
def test_values_and_gradients_are_those_of_the_enumeration(kind, ways):
    model, other = lm(kind, seed=1), lm(kind, seed=2)
    # Early stop tokens in the given replies have no probability at all; the KL of the state is defined all the same.
    rollouts = [Rollout(Task(str(i), p), i, [Turn(p, a)], [""]) for i, (p, a) in enumerate(TURNS)]
    batch = collate(rollouts, [0.0] * len(TURNS))
    out = Policy(model).forward(batch, SAMPLING, against=Policy(other), divergences=(ways,))
    mine = out.kl[ways][batch.actions]
    mine.sum().backward()

    twin, against = deepcopy(model).double(), deepcopy(other).double()
    twin.zero_grad()
    truth = torch.stack(list(enumerated(twin, against, ways)))
    truth.sum().backward()
    assert bool((truth > 0.01).all())
    assert torch.allclose(mine.detach().double(), truth.detach(), rtol=1e-4, atol=1e-5)
    trained = ([p.grad for p in m.parameters() if p.grad is not None] for m in (model, twin))
    grads = [torch.cat([grad.double().flatten() for grad in each]) for each in trained]
    assert float((grads[0] - grads[1]).norm() / grads[1].norm()) < 1e-4
    assert all(p.grad is None for p in other.parameters())
    assert float(out.kl[ways].detach()[~batch.actions].abs().sum()) == 0
