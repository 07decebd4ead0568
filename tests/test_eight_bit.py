"""Adam's moments in a byte each, held to float32; test_trainer.py has runs that go on with them to the bit."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from toys import lm

from operant import Learner, OperantError
from operant.training.eight_bit import BLOCK, EightBit, _turn, pack_first, pack_second, unpack_first, unpack_second
from operant.training.optimizer import MasterAdamW, OptimizerOptions, make_optimizer

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}


def problem():
    """A small net and the batches that it learns from; gradients of one block span three decades."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 3))
    truth = nn.Sequential(nn.Linear(40, 5), nn.Tanh(), nn.Linear(5, 3))
    scale = torch.logspace(-3, 0, 40)
    batches = [x * scale for x in torch.randn(400, 16, 40)]
    return net, [(x, truth(x).detach()) for x in batches]


def trained(kind, net, batches, **settings):
    groups = [{"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.01}]
    groups.append({"params": [p for p in net.parameters() if p.ndim <= 1], "weight_decay": 0.0})
    optimizer, losses = kind(groups, **SETTINGS | settings), []
    for x, y in batches:
        loss = (net(x) - y).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_it_learns_as_float32_does():
    net, batches = problem()
    twin, start = deepcopy(net), deepcopy(net)
    mine, theirs = trained(EightBit, net, batches), trained(MasterAdamW, twin, batches, fused=True)
    assert sum(mine[-50:]) == pytest.approx(sum(theirs[-50:]), rel=0.05) and theirs[-1] < 0.2 * theirs[0]
    for a, b, begun in zip(net.parameters(), twin.parameters(), start.parameters()):
        assert float((a - b).detach().norm()) < 0.5 * float((b - begun).detach().norm())


def test_the_first_step_is_adams_own():
    net, batches = problem()
    twin = deepcopy(net)
    trained(EightBit, net, batches[:1])
    trained(MasterAdamW, twin, batches[:1], fused=True)
    for a, b in zip(net.parameters(), twin.parameters()):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("shape", [(3,), (2, 3, 400)])
def test_any_shape_and_order_of_memory(shape):
    torch.manual_seed(0)
    plain = torch.randn(shape).requires_grad_()
    turned = plain.detach().clone().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
    for p in (plain, turned):
        optimizer = EightBit([{"params": [p]}], **SETTINGS)
        for i in range(3):
            p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(i))
            optimizer.step()
    assert torch.equal(plain, turned)


def test_what_is_packed_is_right_on_average():
    """Over the steps the mean of what comes back is the number, for small ones beside large ones, too."""
    torch.manual_seed(0)
    for pack, unpack, kind, x in (
        (pack_first, unpack_first, torch.int8, torch.randn(3, BLOCK) * torch.logspace(-4, 0, BLOCK)),
        (pack_second, unpack_second, torch.uint8, torch.rand(3, BLOCK) * torch.logspace(-8, 0, BLOCK)),
    ):
        codes, scale, total = torch.zeros(3, BLOCK, dtype=kind), torch.zeros(3, 1), torch.zeros(3, BLOCK).double()
        for step in range(1000):
            pack(x, _turn(step, x.device), codes, scale)
            total += unpack(codes, scale)
        near = x.abs() > 1e-3 * x.abs().amax(1, keepdim=True)
        assert torch.allclose((total / 1000)[near], x[near].double(), rtol=0.02)
        assert torch.equal(total.sign()[near], x.sign()[near].double())


def test_small_second_moments_are_not_made_larger():
    """Rounded by turns of the code alone, numbers of a millionth of the largest would gain 1.5 % in each step."""
    x = torch.logspace(-7, -5, BLOCK).repeat(1, 1)
    x[0, -1] = 1.0
    codes, scale, total = torch.zeros(1, BLOCK, dtype=torch.uint8), torch.zeros(1, 1), torch.zeros(1, BLOCK).double()
    for step in range(1000):
        pack_second(x, _turn(step, x.device), codes, scale)
        total += unpack_second(codes, scale)
    assert abs(float((total / 1000 / x.double() - 1)[0, :-1].mean())) < 0.003


def test_a_second_moment_decays_as_it_should():
    """By a thousandth a step, which is less than the distance between two codes."""
    p = torch.zeros(BLOCK, requires_grad=True)
    optimizer, gradient = EightBit([{"params": [p]}], **SETTINGS), torch.logspace(-2, 0, BLOCK)
    p.grad = gradient
    optimizer.step()
    p.grad = torch.zeros(BLOCK)
    p.grad[-1] = 1e-3**0.5  # one that stays as it is keeps the scale, too
    for _ in range(1000):
        optimizer.step()
    state = optimizer.state[p]
    held = unpack_second(state["second"], state["second_scale"])[0]
    wanted = 1e-3 * gradient.square() * 0.999**1000
    assert float((held / wanted)[:-1].log().abs().max()) < 0.5 and float((held / wanted)[:-1].log().mean().abs()) < 0.05


def test_what_is_divided_by_never_becomes_nothing():
    second = torch.tensor([1.0, 1e-12, 1e-20, 0.0]).repeat(1, BLOCK // 4)
    codes, scale = torch.zeros(1, BLOCK, dtype=torch.uint8), torch.zeros(1, 1)
    pack_second(second, torch.full((BLOCK,), 0.999), codes, scale)
    assert codes[0, :4].tolist() == [255, 1, 1, 0]


def test_the_tensorflow_placement_of_epsilon_is_known_to_it():
    options = {"optimizer.states": "8bit", "optimizer.eps_placement": "tensorflow", "optimizer.eps": 1e-3}
    learner = Learner(lm("gpt2", 40), **options)
    learner.step([[3, 4, 5]], [[8, 9, 10]], [1.0])
    assert learner.optimizer.param_groups[0]["eps"] == pytest.approx(1e-3 / (1 - 0.999**4) ** 0.5)


def test_the_kind_of_state_is_chosen_or_refused():
    with pytest.raises(OperantError, match=r"optimizer.states='4bit'"):
        OptimizerOptions(states="4bit")
    kinds = [type(make_optimizer(nn.Linear(2, 2), OptimizerOptions(**more))) for more in ({"states": "8bit"}, {})]
    assert kinds == [EightBit, MasterAdamW]
