"""Memory that runs out: the optimizer step is made anew with smaller micro-batches, and its gradient is the same."""

import pytest
import torch
from test_gradient import batch_of, caught, gap, made_policy

from operant.types import Batch, OperantError
from operant.updates.gradient import UpdateOptions


def test_where_memory_runs_out_the_step_is_made_anew(monkeypatch):
    policy = made_policy()
    batch = batch_of(list(range(9)), policy)
    (right,), _ = caught(policy, batch)
    sizes = []

    def narrow(self, rows: Batch, *arguments, **named):
        sizes.append(rows.tokens.numel())
        if sizes[-1] > 100 or len(sizes) == 3:  # the third pass fails after two have left their gradients behind
            raise torch.OutOfMemoryError("out of memory")
        return whole(self, rows, *arguments, **named)

    whole = type(policy).forward
    monkeypatch.setattr(type(policy), "forward", narrow)
    (mine,), _ = caught(policy, batch)
    assert len(sizes) > 4 and gap(mine, right) < 1e-5


def test_what_was_found_by_running_out_is_remembered_and_a_fixed_size_is_an_error():
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
