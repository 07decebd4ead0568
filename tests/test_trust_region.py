"""TRPO's rule: Fisher products against a dense matrix in float64, the bound of every step, and what moves what."""

import copy

import pytest
import torch
from cases import cases, slow
from rigs import said
from toys import lm

from operant import Learner, OperantError, Policy, Sampling, ValueOptions
from operant.models.options import ModelOptions
from operant.rollouts.collate import collate
from operant.training.trust_region import TrustRegion, conjugate_gradients
from operant.training.update import weighted

PAIRS = [([3, 4, 5], [6, 7, 8, 2]), ([9], [10, 11]), ([12, 13], [14, 15, 16, 17, 18])]
QUERIES, REPLIES = [[3, 4, 5], [6, 7]] * 4, [[8, 9, 10], [11, 12, 13, 14]] * 4
SCORES = [1.0, -1.0, 0.5, -0.2, 0.9, -0.7, 0.3, 0.1]


def flat(tensors) -> torch.Tensor:
    return torch.cat([x.detach().flatten() for x in tensors])


def dense_fisher(policy, sampling) -> torch.Tensor:
    """F written out: the mean over tokens of J' (diag p - p p') J, with J of each token's logits row by row."""
    model, parameters = policy.model, [p for p in policy.model.parameters() if p.requires_grad]
    total, count = 0, sum(len(action) for _, action in PAIRS)
    for prompt, action in PAIRS:
        if model.config.is_encoder_decoder:
            start = torch.tensor([[model.config.decoder_start_token_id, *action[:-1]]])
            logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=start).logits[0]
        else:
            logits = model(torch.tensor([prompt + action])).logits[0, len(prompt) - 1 : -1]
        for z in sampling.adjust(logits, torch.arange(len(action))):
            at = z.isfinite()
            rows = [torch.autograd.grad(x, parameters, retain_graph=True, materialize_grads=True) for x in z[at]]
            jacobian, p = torch.stack([flat(row) for row in rows]), z[at].detach().softmax(-1)
            total = total + jacobian.T @ (torch.diag(p) - torch.outer(p, p)) @ jacobian / count
    return total


@cases(("gpt2", 8), ("t5", 1000), slow("llama", 8), slow("t5, recomputed", 8), slow("gpt2, recomputed", 1000))
def test_products_are_those_of_the_dense_fisher_matrix(kind, tokens):
    kind, _, recomputed = kind.partition(", ")
    small = {"t5": {"d_model": 8, "d_kv": 4, "d_ff": 8}, "gpt2": {"n_embd": 8}, "llama": {"hidden_size": 8}}[kind]
    narrow = small | ({"intermediate_size": 8, "head_dim": 4} if kind == "llama" else {})
    options = ModelOptions(gradient_checkpointing=bool(recomputed))
    policy = Policy(shrunken(kind, narrow), value=ValueOptions(), options=options)
    sampling = Sampling(temperature=0.8, banned=(19,), min_tokens=2, stop_tokens=(2,))
    learner = Learner(policy, algorithm="trpo", **{"update.fisher_share": 1.0})
    batch = collate([said(*pair) for pair in PAIRS], [0.0] * 3, numbers=torch.float64, joined=kind != "t5")
    batch = weighted(batch, range(len(batch)), learner.objective(sampling))
    rule, truth = learner.rule, dense_fisher(policy, sampling)
    assert rule.moved and len(truth) == sum(p.numel() for p in rule.moved)
    fisher = rule.fisher(batch, sampling, tokens)
    v = torch.randn(len(truth), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float((fisher(v) - truth @ v).norm() / (truth @ v).norm()) < 1e-6
    x, residual = conjugate_gradients(lambda u: fisher(u) + 0.1 * u, v, 400, tolerance=1e-18)
    solved = torch.linalg.solve(truth + 0.1 * torch.eye(len(truth), dtype=torch.float64), v)
    assert float((x - solved).norm() / solved.norm()) < 1e-6 and float(residual.norm() / v.norm()) < 1e-8


def shrunken(kind, narrow):
    config = copy.deepcopy(lm(kind).config)
    for name, value in narrow.items():
        setattr(config, name, value)
    config.num_attention_heads = config.num_heads = config.n_head = 1
    config.num_key_value_heads = 1
    if kind != "t5":
        config.num_hidden_layers = config.n_layer = 1
    torch.manual_seed(0)
    return type(lm(kind))(config).eval().double()


@cases(
    ({}, 0.0, "exact"),
    ({"learner.importance": "token", "update.per": "constant"}, 0.6, "exact"),
    ({"learner.importance": "token"}, -0.6, "sampled"),
    ({"learner.importance": "sequence", "learner.importance_cap": None}, 0.2, "sampled"),
    *[slow({}, likelier, kl) for likelier, kl in ((0.0, "sampled"), (0.6, "exact"), (0.6, "sampled"))],
    slow({"value.critic": "copy"}, 0.0, "exact"),
    slow({"learner.importance": "sequence", "learner.importance_cap": None}, 0.2, "exact"),
)
def test_every_step_is_within_the_bound(more, likelier, kl):
    """A step's KL is that of the models' own forward passes; importance weights belong to the surrogate alone."""
    bound = 0.01
    options = {"update.target_kl": bound, "update.kl": kl, "update.fisher_share": 1.0, "optimizer.lr": 1e-2, **more}
    learner = Learner(lm(), algorithm="trpo", **options, **{"kl.coef": 0.0, "max_tokens": 6})
    twin, kls = copy.deepcopy(learner.policy), []
    for _ in range(2):
        twin.load_state_dict(learner.policy.state_dict())
        replies = learner.generate([[3, 4, 5], [6, 7]] * 16)
        for turn in [turn for r in replies for turn in r.turns]:  # of a sampler under which each token was likelier
            turn.logprobs[:] = [x + likelier for x in turn.logprobs]
        metrics = learner.step(replies, [sum(token < 10 for token in r.ids) / 6 for r in replies])
        assert metrics["trust/accepted"] == 1
        batch = collate(replies, [0.0] * 32)
        with torch.no_grad():
            known, new = (p.model(batch.tokens).logits.log_softmax(-1)[:, :-1] for p in (twin, learner.policy))
        at = batch.actions[:, 1:]
        if kl == "exact":
            moved = float((known.exp() * (known - new)).sum(-1)[at].mean())
        else:
            log_ratio = (new - known).gather(2, batch.tokens[:, 1:, None])[..., 0][at]
            apart = -likelier * batch.actions.sum(1) if "sequence" in more.values() else torch.zeros(32)
            weights = apart.exp()[:, None].expand(at.shape)[at]  # of a token, all weights are equal
            moved = float(((log_ratio.exp() - 1 - log_ratio) * weights).sum() / weights.sum())
        assert moved == pytest.approx(metrics["trust/kl"], rel=1e-3, abs=1e-6) and moved <= bound * 1.001
        kls.append(metrics["trust/kl"])
        assert metrics["trust/kl"] <= bound and metrics["trust/improvement"] > 0 and metrics["trust/predicted"] > 0
        assert 0.5 < metrics["trust/improvement"] / metrics["trust/predicted"] < 2
    assert sum(kls) / len(kls) > bound / 2


def test_critic_and_policy_move_their_own_weights_alone():
    """Which is which is known from where a parameter is: a language model's weight may have any name."""
    model = lm()
    model.transformer.value_of_nothing = torch.nn.Parameter(torch.ones(2))
    learner = Learner(model, algorithm="trpo", **{"kl.coef": 0.0, "update.critic_epochs": 3, "optimizer.lr": 1e-2})
    rule = learner.rule
    assert isinstance(rule, TrustRegion) and any(p is model.transformer.value_of_nothing for p in rule.moved)
    head, before = flat(learner.policy.value_head.parameters()), flat(rule.moved)
    learner.step(QUERIES, REPLIES, [1.0] * 8)  # equal scores: the whitened advantage differs by values only
    learner.step(QUERIES, REPLIES, SCORES)
    assert not torch.equal(flat(learner.policy.value_head.parameters()), head)
    assert not torch.equal(flat(rule.moved), before)
    # With a critic that does not move, the policy's step is the same.
    ends = []
    for lr in (0.0, 1e-2):
        learner = Learner(lm(), algorithm="trpo", **{"kl.coef": 0.0, "optimizer.lr": lr})
        learner.step(QUERIES, REPLIES, SCORES)
        ends.append(flat(learner.rule.moved))
    assert torch.equal(*ends)


@cases(
    ([0.0] * 8, {}),  # no gradient
    # The matrix of half the replies knows little of the others, so the whole step goes too far.
    (SCORES, {"update.backtracks": 1, "update.fisher_share": 0.01, "update.damping": 1e-3}),
)
def test_a_line_search_that_accepts_nothing_moves_nothing(scores, options):
    learner = Learner(lm(), algorithm="trpo", **{"kl.coef": 0.0, "advantage.lam": 1.0}, **options)
    before, metrics = flat(learner.rule.moved), learner.step(QUERIES, REPLIES, scores)
    assert metrics["trust/accepted"] == 0 and "trust/kl" not in metrics
    assert torch.equal(flat(learner.rule.moved), before)


def test_a_refused_critic_leaves_the_step_of_the_policy(monkeypatch):
    def broken(out, batch, value_clip):
        return {"loss": out.values * float("nan")}

    monkeypatch.setattr("operant.objectives.losses.value_error", broken)
    learner = Learner(lm(), algorithm="trpo", keep_gradients=True, **{"kl.coef": 0.0})
    head, before = flat(learner.policy.value_head.parameters()), flat(learner.rule.moved)
    with pytest.warns(UserWarning):
        learner.step(QUERIES, REPLIES, SCORES)
    assert learner.refused is not None and not learner.refused.whole
    assert torch.equal(flat(learner.policy.value_head.parameters()), head)
    assert not torch.equal(flat(learner.rule.moved), before) and {p.grad for p in learner.rule.moved} == {None}


def test_16_bit_weights_and_an_own_optimizer_are_refused():
    with pytest.raises(OperantError, match="trpo computes the policy's step itself"):
        Learner(lm(), algorithm="trpo", optimizer=torch.optim.SGD)
    with pytest.raises(OperantError, match=r"16-bit weights.*float32"):
        Learner(lm().to(torch.bfloat16), algorithm="trpo")


def test_the_share_of_replies_bounds_what_the_matrix_reads(monkeypatch):
    seen, plain = [], TrustRegion.fisher
    noted = lambda self, batch, *rest: (seen.append(len(batch)), plain(self, batch, *rest))[1]  # noqa: E731
    monkeypatch.setattr(TrustRegion, "fisher", noted)
    for share, replies in ((0.51, 8), (0.2, 8), (0.01, 3)):
        learner = Learner(lm(), algorithm="trpo", **{"update.fisher_share": share})
        learner.step(QUERIES[:replies], REPLIES[:replies], SCORES[:replies])
    assert seen == [5, 4, 3], "never fewer than four, if there are so many"
