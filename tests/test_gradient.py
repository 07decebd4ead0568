"""The gradient of given rollouts is one thing, however the batch is cut: micro-batches, padding, minibatches, ranks.

The truth is written out here: a float64 twin of the model, one bare forward a row, PPO's loss and its denominators by
their formulas. The gradient is caught before any optimizer touches it.
"""

import pytest
from cases import cases
from gradients import batch_of, caught, made_policy, truth
from rigs import gap, on_ranks, wider
from toys import CAUSAL

from operant.sampling import counter

# --- one process ------------------------------------------------------------------------------------------------------
MICRO = {1: 8192, 3: 42, 8: 1}
"""Micro-batches of the eight attempts under a budget of tokens."""


@cases((1, "token"), (3, "token"), (3, "episode"), (3, "sequence"), (8, "horizon"))
def test_micro_batches_do_not_change_the_gradient(pieces, per):
    policy, which = made_policy(), list(range(8))
    (mine,), passes = caught(policy, batch_of(which, policy), per=per, micro=MICRO[pieces])
    assert passes == pieces and gap(mine, truth(policy, which, per)) < 1e-5


@pytest.mark.parametrize("packing", ["on", "off"])
@pytest.mark.parametrize("kind", CAUSAL)
def test_every_architecture_has_the_gradient_of_the_formula(kind, packing):
    policy, which = made_policy(kind, packing), list(range(8))
    (mine,), _ = caught(policy, wider(batch_of(which, policy), 6, 2, 0.0), micro=42)
    assert gap(mine, truth(policy, which, "token")) < 1e-5


@pytest.mark.parametrize("packing", ["on", "off"])
def test_padding_does_not_change_the_gradient(packing):
    policy, which = made_policy(packing=packing), list(range(8))
    batch = batch_of(which, policy)
    for junk in (7.0, 1e6, float("nan")):
        (mine,), _ = caught(policy, wider(batch, 9, 7, junk))
        assert gap(mine, truth(policy, which, "token")) < 1e-5


def test_each_minibatch_has_its_own_denominator_and_whitening():
    """Three minibatches of three: each gradient is that of its own three attempts, whatever the micro-batches."""
    policy, which = made_policy(), list(range(9))
    order = sorted(which, key=lambda n: counter(0, 0, 0, n))
    for micro in (8192, 1):
        mine, _ = caught(policy, batch_of(which, policy), minibatch=3, micro=micro, whitened=True)
        assert len(mine) == 3
        for k, gradient in enumerate(mine):
            assert gap(gradient, truth(policy, order[3 * k : 3 * k + 3], "token", whitened=True)) < 1e-5


# --- ranks ------------------------------------------------------------------------------------------------------------
DEALT = {2: [[0, 1, 2, 3, 4, 5, 6], [7, 8]], 3: [[1, 3, 5, 6, 4, 8], [0, 7], [2]]}
"""Who holds which attempts: very unequal numbers of tokens."""
REDUCTIONS = ["token", "episode", "sequence", "horizon"]


def absent() -> int:
    """A step in whose order rank 2's only unit, number 2, comes last: the first minibatch of 8 has none of its own."""
    numbers = [0, 3, 6, 9, 12, 15, 1, 4, 2]
    return next(s for s in range(1000) if max(numbers, key=lambda n: counter(0, s, 0, n)) == 2)


def ranks_work(rank: int, world: int) -> dict:
    policy = made_policy()
    batch = batch_of(DEALT[world][rank], policy)
    found = {per: caught(policy, batch, per=per, micro=1) for per in REDUCTIONS}
    found["whitened"] = caught(policy, batch, whitened=True, micro=40)
    if world == 3:
        found["absent"] = caught(policy, batch, whitened=True, micro=30, minibatch=8, step=absent())
    return found


@pytest.fixture(scope="module", params=DEALT)
def ranked(request):
    return request.param, on_ranks(ranks_work, request.param)


@pytest.mark.slow
def test_ranks_make_the_gradient_of_one_process(ranked):
    world, ranks = ranked
    policy = made_policy()
    for case in [*REDUCTIONS, "whitened"]:
        right = truth(policy, list(range(9)), case if case in REDUCTIONS else "token", whitened=case == "whitened")
        for rank in range(world):
            (mine,), _ = ranks[rank][case]
            assert gap(mine, right) < 1e-5, (case, rank)


@pytest.mark.parametrize("ranked", [3], indirect=True)
@pytest.mark.slow
def test_ranks_with_three_one_and_no_micro_batches_of_their_own(ranked):
    """The first minibatch holds the attempts of ranks 0 and 1 alone, the second that of rank 2 alone.

    All run as many passes as the one that has most, 3 and then 1: rows of weight 0 stand in.
    """
    (_, ranks), policy = ranked, made_policy()
    assert [ranks[r]["absent"][1] for r in range(3)] == [4, 4, 4]
    first = truth(policy, DEALT[3][0] + DEALT[3][1], "token", whitened=True)
    second = truth(policy, DEALT[3][2], "token", whitened=True)
    for rank in range(3):
        mine, _ = ranks[rank]["absent"]
        assert gap(mine[0], first) < 1e-5 and gap(mine[1], second) < 1e-5
