"""Every algorithm is compared with an independent file, `recipes/minimal_*.py`, in whole steps in float64.

Both start from the same weights and train on the same replies, which have unequal lengths and are in groups of four,
three and one, and in one whose scores are equal. The twin computes log-probs, KL, advantages and updates by itself.
After every step the weights of the two agree to 1e-8, and so do the metrics that both return.
"""

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from cases import cases, slow
from torch import Tensor, nn
from toys import lm

from operant import Learner, Policy, ValueOptions
from operant.objectives import kl
from operant.sampling import counter

RECIPES = Path(__file__).parents[1] / "recipes"
STEPS, EPOCHS, MINIBATCHES, RATE = 2, 3, 3, 5e-3
GROUPS = [0, 1, 0, 3, 2, 1, 0, 3, 1, 0]
"""The groups of ten replies, in no order: four, three, one and two replies."""
LENGTHS = [5, 1, 7, 3, 4, 2, 2, 6, 8, 1]
BEST = 5
"""The replies that rejection keeps."""
EQUAL = 3
"""The group whose scores are equal."""
CLOSE = 1e-8


@cache
def recipe(name: str) -> ModuleType:
    """The recipe of a method. GiGPO in one turn is GRPO with twice the advantages, and a mean over tokens; rejection is
    SFT on the best replies."""
    file = f"minimal_{ {'gigpo': 'grpo', 'rejection': 'sft'}.get(name, name) }.py"
    spec = importlib.util.spec_from_file_location(f"minimal_{name}", RECIPES / file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if name == "gigpo":
        of_groups = module.group_advantages
        module.group_advantages = lambda scores, groups: 2 * of_groups(scores, groups)
        module.mean_over_replies = lambda x, mask: (x * mask).sum() / mask.sum()
        module.gigpo_step = module.grpo_step
    return module


# --- the replies that both train on -----------------------------------------------------------------------------------
@dataclass
class StepData:
    """The replies of a step, as lists for the library and as rectangles for a twin."""

    queries: list[list[int]]
    replies: list[list[int]]
    scores: list[float]

    @staticmethod
    def of(step: int) -> "StepData":
        draw = torch.Generator().manual_seed(step)

        def ids(n: int) -> list[int]:
            return torch.randint(0, 20, (n,), generator=draw).tolist()  # includes the ids of padding and end

        queries = {group: ids(1 + (group + step) % 4) for group in set(GROUPS)}
        scores = [0.7 if g == EQUAL else float(torch.randn((), generator=draw)) for g in GROUPS]
        return StepData([queries[g] for g in GROUPS], [ids(n) for n in LENGTHS], scores)

    def rectangles(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and attention [B, P + A], and mask [B, A]: queries padded on the left, replies on the right."""
        before, behind = max(map(len, self.queries)), max(map(len, self.replies))
        tokens, attention = torch.zeros(2, len(self.queries), before + behind).long()
        mask = torch.zeros(len(self.queries), behind).double()
        for b, (query, reply) in enumerate(zip(self.queries, self.replies, strict=True)):
            span = slice(before - len(query), before + len(reply))
            tokens[b, span], attention[b, span] = torch.tensor(query + reply), 1
            mask[b, : len(reply)] = 1.0
        return tokens, attention, mask


def orders(step: int, count: int = len(GROUPS)):
    """The order of the replies in every epoch: which replies share a minibatch is not part of a method."""
    for epoch in range(EPOCHS):
        yield torch.tensor(sorted(range(count), key=lambda n: counter(0, step, epoch, n)))


# --- the twins --------------------------------------------------------------------------------------------------------
@dataclass
class Twin:
    """A recipe with its models and its optimizer."""

    name: str
    coef: float

    def __post_init__(self) -> None:
        made = recipe(self.name).Policy if self.name == "ppo" else lambda model: model
        self.policy: nn.Module = made(lm()).double()
        self.reference: nn.Module = made(lm(seed=1)).double()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=RATE)

    def step(self, data: StepData) -> dict[str, Tensor]:
        scores = torch.tensor(data.scores, dtype=torch.float64)
        about = self.policy, self.reference, self.optimizer, data.rectangles(), scores
        cut = {"epochs": EPOCHS, "minibatches": MINIBATCHES}
        charged = cut | {"kl_coef": self.coef}
        match self.name:
            case "ppo":
                return recipe("ppo").ppo_step(*about, **charged)
            case "sft" | "rejection":
                pairs = list(zip(data.queries, data.replies, strict=True))
                if self.name == "rejection":
                    best = sorted(range(len(pairs)), key=lambda i: (-data.scores[i], i))[:BEST]
                    pairs = [pairs[i] for i in sorted(best)]
                return recipe("sft").sft_step(self.policy, self.optimizer, pairs, **cut)
            case name:
                return getattr(recipe(name), f"{name}_step")(*about, torch.tensor(GROUPS), **charged)


class Ours:
    """The library with the same options."""

    def __init__(self, name: str, coef: float, clipped: bool):
        options = {"lr": RATE, "epochs": EPOCHS, "minibatch": 4, "max_tokens": 9, "watch_every": 0}  # 4, 4 and 2 of 10
        options |= {"learner.select": f"top:{BEST}", "minibatch": 2} if name == "rejection" else {}  # 2, 2 and 1 of 5
        options |= {} if clipped else {"max_grad_norm": None}
        if name != "sft":
            options |= {"reference": Policy(lm(seed=1).double())}
            options |= {"kl.loss_coef" if name in ("grpo", "gigpo") else "kl.coef": coef}
        value = ValueOptions() if name == "ppo" else None
        self.learner = Learner(Policy(lm().double(), value=value), algorithm=name, **options)

    def step(self, data: StepData) -> dict[str, float]:
        if self.learner.algorithm.source == "data":
            return self.learner.step(data.queries, data.replies)
        return self.learner.step(data.queries, data.replies, data.scores, groups=GROUPS)


def compared_weights(policy: nn.Module) -> list[Tensor]:
    """The parameters without the biases of keys: softmax ignores them, and Adam magnifies their rounding errors."""
    found = []
    for name, p in policy.named_parameters():
        query, key, value = p.detach().chunk(3) if name.endswith("c_attn.bias") else (p.detach(), None, None)
        found += [query] if key is None else [query, value]
    return found


SAME = {"loss/total": "loss", "kl/per_reply": "kl", "reward/mean": "reward", "reward/return": "return"}
SAME |= {"policy/advantage_zero": "silent", "value/explained_variance": "explained"}
"""Metrics that both return: our name and the name of the twin."""


def distances(these: list[Tensor], those: list[Tensor]) -> list[float]:
    return [float((p - q).abs().max()) for p, q in zip(these, those, strict=True)]


CASES = [(name, coef, coef == 0.0) for name in ("ppo", "grpo", "rloo") for coef in (0.0, 0.3)]
CASES += [("gigpo", 0.3, False), ("rejection", 0.0, False), ("sft", 0.0, False), ("sft", 0.0, True)]
"""A method, the coefficient of KL, and whether gradients are clipped."""
COMPARED = {"ppo": "explained kl loss reward", "grpo": "kl loss reward silent", "rloo": "kl loss return reward"}
COMPARED |= {"gigpo": "kl loss reward silent", "rejection": "loss", "sft": "loss"}


@cases(*CASES)
def test_whole_steps_are_those_of_the_twin(name, coef, clipped, monkeypatch):
    ours, twin, history = Ours(name, coef, clipped), Twin(name, coef), []
    begun = [p.clone() for p in compared_weights(twin.policy)]
    for step in range(STEPS):
        data, order = StepData.of(step), orders(step, BEST if name == "rejection" else len(GROUPS))
        metrics = ours.step(data)
        history.append(metrics)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "randperm", lambda count, order=order: next(order))
            if not clipped:
                patched.setattr(nn.utils, "clip_grad_norm_", lambda *_: None)
            seen = twin.step(data)
        both = [compared_weights(policy) for policy in (ours.learner.policy, twin.policy)]
        assert max(distances(*both)) < CLOSE
        pairs = {theirs: mine for mine, theirs in SAME.items() if theirs in seen and mine in metrics}
        assert pairs.keys() == set(COMPARED[name].split())
        for theirs, mine in pairs.items():
            close = 1e-6 if theirs == "explained" else CLOSE  # the recipe adds 1e-8 to the variance
            assert metrics[mine] == pytest.approx(float(seen[theirs]), abs=close)
    assert min(distances(begun, both[1])) > RATE / 2
    # A bound that is never reached would not be tested.
    assert not clipped or any(m["update/grad_norm"] > 1 for m in history)
    for bound in ("policy/clip_fraction", "value/clip_fraction"):
        assert any(m.get(bound, 1.0) > 0 for m in history)


# --- the recipes themselves -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["ppo", "grpo", "rloo", "sft"])
def test_a_recipe_is_short_and_stands_alone(name):
    source = (RECIPES / f"minimal_{name}.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 250
    modules = {
        part.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for part in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert modules <= {"argparse", "copy", "random", "string", "torch", "transformers"}


def test_the_adaptive_coefficient_is_that_of_the_library():
    ours, theirs = kl.controller(kl.KLOptions(coef=0.2, control="adaptive")), 0.2
    for measured in (0.1, 5.9, 6.1, 40.0, -3.0):
        ours.update(measured, 0.0, 256)
        theirs = recipe("ppo").adapt(theirs, measured, 256)
        assert theirs == pytest.approx(ours.coef, abs=1e-12)


def test_scoring_is_what_sampling_was():
    """Rows with unequal queries and replies that end early get the same numbers as each row alone without padding."""
    torch.manual_seed(0)
    ppo = recipe("ppo")
    policy = ppo.Policy(ppo.load(None)[0])
    torch.nn.init.normal_(policy.value.weight)
    prompts = [[3], [4, 5, 6, 7], [8, 9], [10, 11, 12]] * 4
    with torch.no_grad():
        tokens, attention, mask = ppo.sample(policy.lm, prompts, 12, end=0)
        assert 1 <= mask.sum(1).min() < 12 == mask.sum(1).max(), "some replies end early, some do not"
        together = policy(tokens, attention, 12)
        for b, prompt in enumerate(prompts):
            reply = tokens[b, -12:][mask[b].bool()].tolist()
            assert 0 not in reply[:-1] and (len(reply) == 12 or reply[-1] == 0)
            row, own = torch.tensor([prompt + reply]), mask[b].bool()
            for mine, alone in zip(together, policy(row, torch.ones_like(row), len(reply)), strict=True):
                torch.testing.assert_close(mine[b][own], alone[0], rtol=0, atol=1e-5)


@cases("ppo", slow("grpo"), slow("rloo"))
def test_a_recipe_learns(name, capsys):
    """Reward up by far more than chance: the standard error of a step's mean is below 0.1."""
    history = recipe(name).main(["--steps", "8", "--batch", "32", "--tokens", "12"])
    start, end = history[0]["reward"], sum(step["reward"] for step in history[-3:]) / 3
    assert history[0]["kl"] == pytest.approx(0.0, abs=1e-5) and end > start + 0.6
    assert len(capsys.readouterr().out.splitlines()) == 8


def test_the_supervised_recipe_learns_what_it_has_not_seen(capsys):
    """At first all 28 tokens are equally likely: log 28 = 3.3 nats."""
    history = recipe("sft").main(["--steps", "30", "--batch", "32"])
    start, end = history[0]["held out"], sum(step["held out"] for step in history[-3:]) / 3
    assert start > 2.0 and end < 1.2 and len(capsys.readouterr().out.splitlines()) == 30
