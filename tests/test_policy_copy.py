"""Policy copies: the memory that they share, and that they do not change while the policy is trained."""

from copy import deepcopy

import pytest
import torch
from cases import cases
from rigs import scores
from toys import lm

from operant import OperantError, Policy, ValueOptions
from operant.models.options import ModelOptions
from operant.models.reference import PolicyCopy, fingerprint


def memory(model) -> dict[str, int]:
    """The memory address of each parameter, under every name that it has."""
    return {n: p.untyped_storage().data_ptr() for n, p in model.named_parameters(remove_duplicate=False)}


def frozen_below(kind="gpt2", *, trained, **more):
    """A policy that trains only the parameters whose name contains one of `trained`."""
    model = lm(kind, **more)
    for name, p in model.named_parameters():
        p.requires_grad_(any(word in name for word in trained))
    return Policy(model, value=ValueOptions())


def move(policy):
    with torch.no_grad():
        for p in policy.trainable():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.1)


def test_a_copy_that_has_moved_and_is_frozen_then_is_saved_as_it_is():
    policy = frozen_below("gpt2", trained=[".h.1."])
    twin, frozen, again = (PolicyCopy(policy, rule) for rule in (("polyak", 0.25), "frozen", "frozen"))
    move(policy)
    twin.update(policy, 1)
    frozen.load_state_dict(twin.state_dict())
    again.load_state_dict(frozen.state_dict())
    assert torch.equal(scores(again.policy), scores(twin.policy))


@cases(("gpt2", ".h.1.", "frozen"), ("llama", "layers.1.", ("polyak", 0.25)), ("gpt_neox", "layers.1.", ("every", 1)))
def test_only_what_is_trained_is_copied(kind, top, rule):
    policy = frozen_below(kind, trained=[top])
    twin = PolicyCopy(policy, rule)
    mine, theirs = memory(policy.model), memory(twin.policy.model)
    assert {n for n in mine if mine[n] != theirs[n]} == {n for n in mine if top in n} != set()
    assert {b.data_ptr() for b in twin.policy.model.buffers()} == {b.data_ptr() for b in policy.model.buffers()}
    assert not any(p.requires_grad for p in twin.policy.parameters())
    assert [n for n, p in policy.model.named_parameters() if p.requires_grad] == [n for n in mine if top in n]


@pytest.mark.parametrize("trained, shared", [(["wte", ".h.1."], False), ([".h.1."], True)])
def test_a_tied_head_is_copied_where_it_is_trained(trained, shared):
    policy = frozen_below("gpt2", trained=trained)
    twin = PolicyCopy(policy)
    mine, theirs = memory(policy.model), memory(twin.policy.model)
    assert mine["lm_head.weight"] == mine["transformer.wte.weight"]
    assert theirs["lm_head.weight"] == theirs["transformer.wte.weight"]
    assert (mine["lm_head.weight"] == theirs["lm_head.weight"]) is shared
    before = scores(twin.policy)
    move(policy)
    assert torch.equal(scores(twin.policy), before) and not torch.allclose(scores(policy), before, atol=1e-2)


def test_a_frozen_weight_in_memory_of_a_trained_one_is_copied():
    policy = Policy(lm("llama", tie_word_embeddings=False), value=ValueOptions())
    head, embedding = policy.model.lm_head, policy.model.get_input_embeddings()
    head.weight = torch.nn.Parameter(embedding.weight.data, requires_grad=False)  # two parameters, one memory
    twin = PolicyCopy(policy)
    assert not set(memory(policy.model).values()) & set(memory(twin.policy.model).values())
    assert policy.value_head is not None and twin.policy.value_head is None


def test_the_fingerprint_covers_what_is_shared_too():
    policy = frozen_below(trained=[".h.1."])
    twin = PolicyCopy(policy)
    assert twin.fingerprint == fingerprint(twin.policy) == fingerprint(policy)
    with torch.no_grad():
        policy.model.transformer.h[0].ln_1.bias[3] += 1e-3  # a write into the shared base
    assert fingerprint(twin.policy) != twin.fingerprint


def test_a_share_of_the_distance_is_not_lost_in_16_bits():
    """A twentieth of four last digits rounds to none. After n steps 0.95^n of the distance is left, resumed or not."""
    policy = Policy(lm(), options=ModelOptions(precision="bfloat16"))
    twin, other = (PolicyCopy(policy, ("polyak", 0.05)) for _ in range(2))
    begun = deepcopy(policy.model).double()
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1.03)
    for step in range(60):
        twin.update(policy, step)
        other.load_state_dict(twin.state_dict()) if step == 20 else other.update(policy, step)
    for name, p in twin.policy.model.named_parameters():
        old, new = begun.get_parameter(name), policy.model.get_parameter(name).double()
        assert torch.allclose(p.double(), new + 0.95**60 * (old - new), rtol=2**-8, atol=1e-9), name
        assert torch.equal(p, other.policy.model.get_parameter(name))


@cases((("polyak", 0.25), 0.25), (("every", 1), 1.0))
def test_a_shadow_that_follows_moves_and_keeps_only_its_own(rule, share):
    policy = frozen_below(trained=[".h.1.", "wte"])
    twin, begun = PolicyCopy(policy, rule), deepcopy(policy.model)
    first = twin.fingerprint
    move(policy)
    twin.update(policy, 1)
    assert first != twin.fingerprint == fingerprint(twin.policy)
    for name, p in twin.policy.model.named_parameters():
        old, new = begun.get_parameter(name), policy.model.get_parameter(name)
        assert torch.allclose(p, old + share * (new - old), atol=1e-6), name
    state = twin.state_dict()
    assert set(state["weights"]) == {n for n in memory(policy.model) if ".h.1." in n or "wte" in n or "lm_head" in n}

    other = PolicyCopy(frozen_below(trained=[".h.1.", "wte"]), rule)
    other.load_state_dict(deepcopy(state))
    assert torch.equal(scores(other.policy), scores(twin.policy)) and other.fingerprint == twin.fingerprint
    state["weights"].popitem()
    with pytest.raises(OperantError, match="lm_head"):
        other.load_state_dict(state)


def test_the_state_of_a_quantised_layer_is_shared():
    """A quantised layer makes this state of its weight in the first call; that of a copy would stay empty."""
    kind, policy = type("MatmulLtState", (), {}), frozen_below(trained=["ln_f"])
    policy.model.transformer.h[0].mlp.state = kind()
    policy.model.transformer.h[1].mlp.state = "of another kind"
    other = PolicyCopy(policy).policy.model.transformer.h
    assert other[0].mlp.state is policy.model.transformer.h[0].mlp.state and other[1].mlp.state == "of another kind"
