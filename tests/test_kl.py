"""KL: its gradient against enumeration in float64, its estimate against its definition, and its controllers."""

import copy

import pytest
import torch
from cases import cases, slow_but
from expected_gradients import flat
from rigs import Caught, gap
from toys import bare_logprobs, lm

from operant import Learner, Policy, Sampling, ValueOptions
from operant.models.logprobs import divergence
from operant.objectives.kl import EXACT, KLOptions, controller, loss_term


# --- one token, enumerated (test 10) ----------------------------------------------------------------------------------
def categorical(seed: int) -> torch.Tensor:
    return torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def exact_gradient(logits: torch.Tensor, ref: torch.Tensor, kind: str) -> torch.Tensor:
    """The gradient of a divergence from its formula, which is that of `reverse` for what is estimated."""
    logits, charge = logits.clone().requires_grad_(), CHARGES[kind if kind in EXACT else "reverse"]
    return torch.autograd.grad(charge(logits.log_softmax(0), ref.log_softmax(0)), logits)[0]


def expected_gradient(logits: torch.Tensor, behaviour: torch.Tensor, ref: torch.Tensor, kind: str) -> torch.Tensor:
    """The gradient of the library's loss term, each of the six tokens weighted by its probability under the sampler."""
    logits = logits.clone().requires_grad_()
    p, b, q = logits.log_softmax(0), behaviour.log_softmax(0), ref.log_softmax(0)
    mean = divergence(p[None], q[None], kind).sum() if kind in EXACT else (b.exp() * loss_term(kind, p, b, q)).sum()
    return torch.autograd.grad(mean, logits)[0]


@pytest.mark.parametrize("off", [False, True], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", *EXACT])
def test_the_expected_gradient_of_every_form_is_that_of_the_kl(kind, off):
    for seed in range(5):
        logits, ref = categorical(seed), categorical(50 + seed)
        behaviour, truth = categorical(99 + seed) if off else logits, exact_gradient(logits, ref, kind)
        assert float((expected_gradient(logits, behaviour, ref, kind) - truth).abs().max()) < 1e-8


def test_plain_k3_has_the_gradient_of_the_other_kl():
    """That of sum_v q log(q / p)."""
    logits, ref = categorical(0), categorical(50)
    wrong = expected_gradient(logits, logits, ref, "plain_k3")
    assert gap(wrong, exact_gradient(logits, ref, "k1")) > 0.1
    assert gap(wrong, exact_gradient(logits, ref, "forward")) < 1e-8


# --- through policy and update ----------------------------------------------------------------------------------------
V, PROMPT, T = 6, [3, 4], 0.8


def small(seed: int):
    return lm(vocab=V, seed=seed, spread=0.35)


def true_gradient(kind: str) -> torch.Tensor:
    """The gradient of a charge at the prompt between two models at temperature 0.8, by plain passes in float64."""
    model, ref = small(0).double(), small(1).double()
    p, q = ((m(torch.tensor([PROMPT])).logits[0, -1] / T).log_softmax(0) for m in (model, ref))
    CHARGES[kind](p, q.detach()).backward()
    return flat(model)


def chance(reply: list[int]) -> float:
    return float(bare_logprobs(small(0), PROMPT, reply, T).sum().exp())


def stepped(replies, **options) -> list[tuple[dict, torch.Tensor]]:
    """Metrics and gradient of one step on each of the replies, for a learner whose reward is only KL."""
    fixed = {"advantage.lam": 1.0, "advantage.whiten_scope": "none", "loss.value_coef": 0.0, "max_grad_norm": None}
    fixed |= {"epochs": 1, "fixed_length": True, "temperature": T}
    learner = Learner(Policy(small(0), value=ValueOptions()), reference=Policy(small(1)), **fixed | options)
    found = []
    for reply in replies:
        learner.optimizer = Caught(learner.policy.model.parameters())
        found.append((learner.step([PROMPT], [torch.tensor(reply)], [0.0]), learner.optimizer.gradients[0]))
    return found


@cases((0.2, 0.3, "k3"), (0.0, 0.3, "k1"), (0.0, 0.3, "forward"), (0.0, 0.3, "jensen_shannon"))
def test_kl_is_paid_once_and_twice_only_with_two_coefficients(coef, loss_coef, kind):
    """One token, enumerated: the gradient is (coef + loss_coef) times that of the KL."""
    replies = [[v] for v in range(V)]
    steps = stepped(replies, max_tokens=1, **{"kl.coef": coef, "kl.loss_coef": loss_coef, "kl.loss_kind": kind})
    mean = sum(chance(r) * g for r, (_, g) in zip(replies, steps, strict=True))
    assert gap(mean, (coef + loss_coef) * true_gradient(kind if kind in EXACT else "reverse")) < 1e-4


CHARGES = {
    "k1": lambda p, q: (p.exp() * (p - q)).sum(),
    "k2": lambda p, q: (p.exp() * (p - q) ** 2 / 2).sum(),
    "k3": lambda p, q: (p.exp() * ((q - p).exp() - 1 + p - q)).sum(),
    "absolute": lambda p, q: (p.exp() * (p - q).abs()).sum(),
    "reverse": lambda p, q: (p.exp() * (p - q)).sum(),
    "forward": lambda p, q: (q.exp() * (q - p)).sum(),
    "jensen_shannon": lambda p, q: sum((x.exp() * (x - ((p.exp() + q.exp()) / 2).log())).sum() for x in (p, q)) / 2,
}
"""What is expected of each charge, [V] log-probs in."""


@pytest.mark.parametrize("kind", slow_but(("k2", "absolute", "reverse"), CHARGES))
def test_a_charge_in_the_reward_has_the_whole_gradient(kind):
    """One token, enumerated. Without the direct term a state's exact KL would be a baseline: no gradient at all."""
    replies, right = [[v] for v in range(V)], 0.2 * true_gradient(kind)

    def expected(how: str) -> torch.Tensor:
        given = {"kl.kind": kind, "kl.coef": 0.2, "kl.reward_gradient": how}
        return sum(chance(r) * g for r, (_, g) in zip(replies, stepped(replies, max_tokens=1, **given), strict=True))

    assert gap(expected("full"), right) < 1e-4
    if kind in EXACT:
        assert float(expected("score").norm()) < 1e-5 < float(right.norm()) / 100


# --- the logged KL (test 11) ------------------------------------------------------------------------------------------
def test_a_warning_names_what_makes_kl_negative():
    with pytest.warns(UserWarning, match="top_k=4"):
        Learner(lm(), top_k=4, truncation="stored")
    assert Sampling().warning() is None and Sampling(temperature=0.5, min_tokens=3).warning() is None
    for name, value in {"top_k": 2, "top_p": 0.6, "min_p": 0.5}.items():
        said = Sampling(**{name: value}).warning()
        assert f"{name}={value}" in said and "negative" in said


KL_OF = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: (-d).exp() - 1 + d, "absolute": lambda d: d.abs()}


@pytest.mark.parametrize("kind", [*KL_OF, *EXACT])
def test_the_logged_kl_is_the_charged_kl(kind):
    model, ref = lm(), lm(seed=1)
    options = {"kl.coef": 0.3, "kl.kind": kind, "stop_tokens": (2, 4, 6, 8), "epochs": 1, "lr": 0.0}
    options |= {"max_tokens": 7, "temperature": T}
    learner = Learner(Policy(model, value=ValueOptions()), reference=Policy(ref), **options)
    replies = learner.generate([[5, 6, 7], [8], [9, 10], [11, 3, 3, 3]] * 3)
    k1, paid = [], []
    for r in replies:
        prompt, ids = r.turns[0].prompt, r.ids
        d = bare_logprobs(model, prompt, ids, T) - bare_logprobs(ref, prompt, ids, T)
        k1.append(float(d.sum()))
        paid.append(float(KL_OF[kind](d).sum()) if kind in KL_OF else whole_kl(model, ref, prompt, ids, kind))
    metrics = learner.step(replies, [1.0] * 12)
    assert metrics["kl/per_reply"] == pytest.approx(sum(k1) / 12, abs=1e-4)
    assert metrics["kl/per_token"] == pytest.approx(sum(k1) / sum(len(r.ids) for r in replies), abs=1e-4)
    assert metrics["kl/paid"] == pytest.approx(sum(paid) / 12, rel=1e-4)
    assert metrics["reward/kl_penalty"] == pytest.approx(0.3 * sum(paid) / 12, rel=1e-4)
    assert metrics["reward/return"] == pytest.approx(1 - 0.3 * sum(paid) / 12, rel=1e-4)


def whole_kl(model, ref, prompt: list[int], ids: list[int], kind: str) -> float:
    with torch.no_grad():
        rows = torch.tensor([prompt + ids])
        p, q = ((m(rows).logits[0, len(prompt) - 1 : -1].double() / T).log_softmax(-1) for m in (model, ref))
    return float(CHARGES[kind](p, q))


# --- who sets the price -----------------------------------------------------------------------------------------------
def coefs(options: KLOptions, measured: list[tuple[float, float]], replies: int = 100) -> list[float]:
    rule, out = controller(options), []
    for step, (per_reply, per_token) in enumerate(measured):
        rule.begin(step / len(measured))
        rule.update(per_reply, per_token, replies)
        out.append(rule.coef)
    return out


def test_controllers_by_hand():
    measured = [(12.0, 0.0), (6.3, 0.3), (3.0, 0.102)]
    # 100 replies of 10,000: at most 0.2 % a step; 6.3 is 5 % above the target of 6.
    ziegler = [0.1 * 1.002, 0.1 * 1.002 * 1.0005, 0.1 * 1.002 * 1.0005 * 0.998]
    assert coefs(KLOptions(control="adaptive"), measured) == pytest.approx(ziegler)
    # A run of 100 steps has 10 horizons, so a step is a tenth of one; in a run of 5, the price moves by 20 % at most.
    for steps, share in ((100, 0.1), (5, 1.0)):
        rule = controller(KLOptions(control="adaptive"))
        rule.begin(0.0, steps)
        rule.update(9.0, 1.0, 100)  # 1.5 times the target
        assert rule.coef == pytest.approx(0.1 * (1 + 0.2 * share))
    assert coefs(KLOptions(control="adaptive", horizon=50), [(0.0, 0.0)]) == pytest.approx([0.08])  # never below 0
    # Of each error, held within 20 %, a tenth: -20 %, +20 %, +2 %.
    rl4lms = [0.1 * 0.98, 0.1 * 0.98 * 1.02, 0.1 * 0.98 * 1.02 * 1.002]
    assert coefs(KLOptions(control="per_token", target=0.1), measured) == pytest.approx(rl4lms)
    assert coefs(KLOptions(control="linear", end_coef=0.4), measured) == pytest.approx([0.1, 0.2, 0.3])  # of 3 steps
    assert coefs(KLOptions(), measured) == [0.1] * 3


def test_controllers_go_on_where_they_were():
    options = KLOptions(control="adaptive", horizon=1000)
    first = controller(options)
    first.update(12.0, 1.0, 100)
    second = controller(options)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for rule in (first, second):
        rule.update(3.0, 1.0, 100)
    assert second.coef == first.coef != options.coef
