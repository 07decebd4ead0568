"""Gradients of looked-up rows, added in place, equal those that torch computes for the whole table."""

import copy

import pytest
import torch
from toys import lm

from operant.models.kernels import Lookup, direct_gradients, look_up_directly


def gradients(model, direct: bool) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for ids in ([[3, 4, 3, 5]], [[1, 0, 2, 0]]):  # two micro-batches, of which the second repeats the padding's id
        with direct_gradients(direct):
            model(input_ids=torch.tensor(ids)).logits.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("padding", [None, 0])
def test_gradients_are_those_of_the_whole_table(kind, padding):
    torch.manual_seed(0)
    model = lm(kind).double()
    model.get_input_embeddings().padding_idx = padding
    look_up_directly(model)
    right, mine = gradients(model, False), gradients(model, True)
    assert set(right) == set(mine)
    for name in right:
        torch.testing.assert_close(mine[name], right[name], atol=1e-12, rtol=1e-12)


def test_a_copy_stays_a_copy_and_a_frozen_table_gets_nothing():
    torch.manual_seed(0)
    model = lm("gpt2")
    look_up_directly(model)
    twin = copy.deepcopy(model)
    assert isinstance(twin.get_input_embeddings(), Lookup)
    twin.get_input_embeddings().weight.requires_grad_(False)
    gradients(model, True)
    assert twin.get_input_embeddings().weight.grad is None
    with direct_gradients():
        twin(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()
    assert twin.get_input_embeddings().weight.grad is None
