"""The sampler: its distribution and its random numbers. Their keys are in test_streams.py."""

import torch
from cases import cases

from operant.sampling import Sampling, task_key, uniforms

GREEDY = {"top_k": 1, "keep_stops": True, "stop_tokens": (4,)}


@cases({}, {"temperature": 0.6}, {"banned": (1, 4)}, {"top_k": 3}, {"top_p": 0.7}, GREEDY)
def test_tokens_are_drawn_with_their_probabilities(more):
    """20,000 draws with counters 0..19999: chi-square against the enumerated distribution of float64."""
    torch.manual_seed(0)
    logits, n = torch.randn(1, 12) * 1.5, 20_000
    sampling = Sampling(**more)
    scores = sampling.adjust(logits, 0)
    allowed = sampling.kept(scores)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    ids, logprobs = sampling.draw(scores.expand(n, -1).clone(), uniforms(list(range(n)), 2))

    probs = (logits[0].double() / sampling.temperature).exp()
    probs[list(sampling.banned)] = 0
    order = probs.argsort(descending=True)
    if sampling.top_k:
        probs[order[sampling.top_k :]] = 0
    if sampling.top_p < 1:  # the smallest set with 0.7 of the mass
        within = int(((probs / probs.sum())[order].cumsum(0) < 0.7).sum()) + 1
        probs[order[within:]] = 0
    probs /= probs.sum()
    counts = torch.bincount(ids, minlength=12)
    assert not counts[probs == 0].any()
    some = probs > 0
    chi = float(((counts - n * probs)[some] ** 2 / (n * probs[some])).sum())
    freedom = int(some.sum()) - 1
    assert chi <= freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations; the counters are fixed
    assert torch.allclose(logprobs.double(), probs.log()[ids], atol=1e-5)


def test_uniforms_are_even_and_independent_of_place_and_key():
    keys = [task_key(0, "train", 0, f"t{i}") for i in range(2000)]
    x = torch.stack([uniforms(keys, place) for place in range(8)], 1)
    assert float(x.min()) >= 0 and float(x.max()) < 1 and abs(float(x.mean()) - 0.5) < 4 / (12 * x.numel()) ** 0.5
    assert float(((torch.histc(x.float(), 20, 0, 1) - 800) ** 2 / 800).sum()) < 19 + 4 * 38**0.5
    assert float((torch.corrcoef(x.T) - torch.eye(8)).abs().max()) < 4 / 2000**0.5
    assert abs(float(torch.corrcoef(torch.stack([x[1:, 0], x[:-1, 0]]))[0, 1])) < 4 / 2000**0.5


def test_a_cdf_that_rounds_short_draws_a_possible_token():
    scores = torch.full((1, 5), -torch.inf)
    scores[0, [1, 3]] = torch.tensor([0.0, -40.0])
    for u, expected in ((0.0, 1), (1 - 2**-53, 3), (0.5, 1)):
        ids, logprobs = Sampling().draw(scores.clone(), torch.tensor([u], dtype=torch.float64))
        assert ids.item() in (1, 3) and (u > 0.9 or ids.item() == expected) and torch.isfinite(logprobs).all()
