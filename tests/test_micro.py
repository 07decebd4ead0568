"""Memory that runs out: the optimizer step is made anew with smaller micro-batches, and its gradient is the same."""

from dataclasses import replace

import pytest
import torch
from gradients import batch_of, caught, made_policy
from rigs import gap, partitions
from toys import lm

from operant import Learner
from operant.rollouts.collate import cut, units
from operant.training.update import UpdateOptions
from operant.types import Batch, OperantError


def test_where_memory_runs_out_the_step_is_made_anew(monkeypatch):
    policy = made_policy(packing="off")  # what a row takes is what is counted below
    batch = batch_of(list(range(9)), policy)
    (right,), _ = caught(policy, batch)
    sizes, made = [], []

    def narrow(self, rows: Batch, *arguments, **named):
        sizes.append(rows.tokens.numel())
        if sizes[-1] > 100 or made == ["made"]:  # the first pass has left its gradient behind
            if sizes[-1] <= 100:
                made.append("failed")
            raise torch.OutOfMemoryError("out of memory")
        made.append("made")
        return whole(self, rows, *arguments, **named)

    whole = type(policy).forward
    monkeypatch.setattr(type(policy), "forward", narrow)
    (mine,), _ = caught(policy, batch)
    assert made[1] == "failed" and gap(mine, right) < 1e-5


def test_the_size_that_fits_is_remembered():
    budget = UpdateOptions(micro_tokens=512).budget()
    budget.halve(RuntimeError())
    again = UpdateOptions(micro_tokens=512).budget()
    again.load_state_dict(budget.state_dict())
    assert again.tokens == 256
    with pytest.raises(OperantError, match=r"micro_batch=fixed.*update.micro_tokens \(now 512\)"):
        UpdateOptions(micro_tokens=512, micro_batch="fixed").budget().halve(RuntimeError())
    for _ in range(2):
        again.halve(RuntimeError())
    with pytest.raises(OperantError, match="at 64 tokens a pass"):
        again.halve(RuntimeError())


def test_other_errors_are_not_taken_for_it(monkeypatch):
    policy = made_policy()

    def broken(*arguments, **named):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(type(policy), "forward", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        caught(policy, batch_of(list(range(9)), policy))


def test_a_piece_whose_tokens_importance_leaves_out_is_measured():
    told = []
    for micro in (8192, 12):
        masked = {"importance": "token", "importance_cap": 1.5, "importance_mask": True, "rescore": True}
        learner = Learner(lm(), algorithm="grpo", epochs=1, micro_tokens=micro, max_tokens=6, **masked)
        stale = learner.generate([[5, 6, 7]] * 4 + [[8, 9]] * 4)
        for i, (turn,) in enumerate(rollout.turns for rollout in stale):
            stale[i] = replace(stale[i], turns=[replace(turn, logprobs=[x - 2 * (i % 2) for x in turn.logprobs])])
        told.append(learner.step(stale, [float(i % 3) for i in range(8)]))
    assert told[0]["policy/entropy"] == pytest.approx(told[1]["policy/entropy"], rel=1e-5)


@pytest.mark.parametrize("setup", [0, 7, 64, 10_000])
@pytest.mark.parametrize("budget", [30, 60, 8192])
@pytest.mark.parametrize("packed", [False, True])
def test_the_cut_is_the_cheapest_of_all(packed, budget, setup):
    """Padding and passes together, against every way to cut eight rows in order of length; packed rows have none."""
    lengths = [3, 9, 4, 17, 9, 30, 5, 12]
    batch = Batch.given([[1]] * 8, [[2] * (n - 1) for n in lengths])
    cuts = cut(batch, units(batch), budget, setup, packed=packed)
    assert sorted(r for rows in cuts for r in rows) == list(range(8))

    def cost(pieces):
        widths = [sum(piece) if packed else max(piece) * len(piece) for piece in pieces]
        allowed = all(w <= budget or len(piece) == 1 for w, piece in zip(widths, pieces, strict=True))
        return sum(widths) + setup * len(pieces) if allowed else float("inf")

    ordered = sorted(lengths)
    best = min(cost([ordered[a:b] for a, b in edges]) for edges in partitions(8))
    assert cost([[lengths[r] for r in rows] for rows in cuts]) == best
