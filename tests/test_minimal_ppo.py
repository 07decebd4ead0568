"""Each function of `recipes/minimal_ppo.py` computes the numbers of the library; test_twins.py compares whole steps."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from operant.objectives import advantages, kl, losses
from operant.rollouts import collate
from operant.types import Batch, Outputs, Rollout, Task, Turn

RECIPE = Path(__file__).parents[1] / "recipes" / "minimal_ppo.py"
LENGTHS = [5, 1, 3, 7]
EXACT = {"rtol": 0.0, "atol": 1e-6}


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal_ppo", RECIPE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Numbers:
    """Random replies in the recipe's layout [B, A], and in the library's [B, T] after queries of 1 to 4 tokens."""

    def __init__(self, seed: int):
        torch.manual_seed(seed)
        shape = (len(LENGTHS), max(LENGTHS))
        self.mask = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).float()
        names = ("logprobs", "ref_logprobs", "new_logprobs", "values", "new_values", "advantages", "returns")
        self.recipe: dict[str, Tensor] = {name: torch.randn(shape) for name in names}  # noise off the mask
        self.scores = torch.randn(len(LENGTHS))
        rollouts = [
            Rollout(Task(str(b), ""), b, [Turn(prompt=[1] * (b + 1), action=[2] * n)], [""])
            for b, n in enumerate(LENGTHS)
        ]
        self.batch: Batch = collate.collate(rollouts, self.scores.tolist())

    def wide(self, x: Tensor) -> Tensor:
        """[B, A] -> [B, T]."""
        return torch.zeros(self.batch.tokens.shape).masked_scatter(self.batch.actions, x[self.mask.bool()])

    def narrow(self, x: Tensor) -> Tensor:
        """[B, T] -> [B, A]."""
        return torch.zeros(self.mask.shape).masked_scatter(self.mask.bool(), x[self.batch.actions])

    def filled(self, *names: str) -> Batch:
        return self.batch.with_(**{name: self.wide(self.recipe[name]) for name in names})


@pytest.fixture(params=range(3))
def numbers(request) -> Numbers:
    return Numbers(request.param)


def test_rewards(recipe: ModuleType, numbers: Numbers) -> None:
    made, n = numbers.filled("logprobs", "ref_logprobs"), numbers.recipe
    ours = made.rewards - 0.2 * kl.estimate("k1", made.logprobs, made.ref_logprobs)
    theirs = recipe.token_rewards(numbers.scores, n["logprobs"], n["ref_logprobs"], numbers.mask, 0.2)
    torch.testing.assert_close(theirs, numbers.narrow(ours), **EXACT)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7)])
def test_advantages_and_returns(recipe: ModuleType, numbers: Numbers, gamma: float, lam: float) -> None:
    rewards = torch.randn(numbers.mask.shape) * numbers.mask
    made = numbers.filled("values").with_(rewards=numbers.wide(rewards))
    ours = advantages.with_gae(made, gamma=gamma, lam=lam)
    theirs, returns = recipe.gae(rewards, numbers.recipe["values"], numbers.mask, gamma, lam)
    torch.testing.assert_close(returns, numbers.narrow(ours.returns), **EXACT)
    theirs = recipe.whiten(theirs, numbers.mask)
    torch.testing.assert_close(theirs, numbers.narrow(ours.advantages), **EXACT)


def test_losses_and_their_gradient(recipe: ModuleType, numbers: Numbers) -> None:
    n = numbers.recipe
    made = numbers.filled("logprobs", "values", "advantages", "returns")
    made = made.with_(weights=collate.token_weights(made))
    mine = [numbers.wide(n[name]).requires_grad_() for name in ("new_logprobs", "new_values")]
    ours = losses.ppo(Outputs(mine[0], mine[0], values=mine[1]), made, clip=0.2, value_clip=0.2, value_coef=0.1)
    losses.total(ours["loss"], made).backward()

    theirs = [n[name].clone().requires_grad_() for name in ("new_logprobs", "new_values")]
    policy = recipe.policy_loss(theirs[0], n["logprobs"], n["advantages"])
    value = recipe.value_loss(theirs[1], n["values"], n["returns"])
    torch.testing.assert_close(policy.detach() * numbers.mask, numbers.narrow(ours["policy/loss"]), **EXACT)
    torch.testing.assert_close(value.detach() * numbers.mask, numbers.narrow(ours["value/loss"]), **EXACT)
    loss = recipe.masked_mean(policy + 0.1 * value, numbers.mask)
    torch.testing.assert_close(loss.detach(), losses.total(ours["loss"].detach(), made), **EXACT)
    loss.backward()
    for a, b in zip(theirs, mine):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, numbers.narrow(b.grad), **EXACT)


def test_the_adaptive_coefficient(recipe: ModuleType) -> None:
    ours, theirs = kl.controller(kl.KLOptions(coef=0.2, control="adaptive")), 0.2
    for measured in (0.1, 5.9, 6.1, 40.0, -3.0):
        ours.update(measured, 0.0, 256)
        theirs = recipe.adapt(theirs, measured, 256)
        assert theirs == pytest.approx(ours.coef, abs=1e-12)


def test_scoring_is_what_sampling_was(recipe: ModuleType) -> None:
    """Rows with unequal queries and replies that end early get the same numbers as each row alone without padding."""
    torch.manual_seed(0)
    lm, _ = recipe.load(None)
    policy = recipe.Policy(lm)
    torch.nn.init.normal_(policy.value.weight)
    prompts = [[3], [4, 5, 6, 7], [8, 9], [10, 11, 12]] * 4
    with torch.no_grad():
        tokens, attention, mask = recipe.sample(policy.lm, prompts, 12, end=0)
        assert 1 <= mask.sum(1).min() < 12 == mask.sum(1).max(), "some replies end early, some do not"
        logprobs, values, entropy = policy(tokens, attention, 12)
        for b, prompt in enumerate(prompts):
            reply = tokens[b, -12:][mask[b].bool()].tolist()
            assert 0 not in reply[:-1] and (len(reply) == 12 or reply[-1] == 0)
            row = torch.tensor([prompt + reply])
            out = policy.lm(row, output_hidden_states=True)
            for a, token in enumerate(reply):  # the state before a token predicts it
                before = len(prompt) + a - 1
                known = out.logits[0, before].log_softmax(-1)
                value = policy.value(out.hidden_states[-1][0, before])[0]
                alone = torch.stack([known[token], value, -(known.exp() * known).sum()])
                together = torch.stack([logprobs[b, a], values[b, a], entropy[b, a]])
                torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
