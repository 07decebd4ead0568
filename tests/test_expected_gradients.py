"""What every row of the table descends on: its gradient, averaged over all that can be said, against the claim.

A vocabulary of six, replies of one or two tokens. Every group of replies is given to the library once, as a minibatch
of its own, and its gradient is caught; weighted by the probability of the group they sum to the expected gradient. The
claims are written out here, on bare float64 models, and differentiated by autograd.
"""

import expected_gradients as exact
import torch
from cases import cases, slow
from expected_gradients import BETA, EXACT, PROMPT, Said, best_return, expected, groups_of, likely, of, replies, small
from rigs import Caught, gap
from torch import Tensor

from operant import Learner, Policy
from operant.algorithms import ALGORITHMS


# --- the claims -------------------------------------------------------------------------------------------------------
def over_groups(policy: Said, size: int, loss) -> Tensor:
    """`loss(numbers)` of every group, weighted by how often it is drawn; the weights are no part of the gradient."""
    chances, groups = policy.whole.exp().detach(), groups_of(policy.logprobs, size)
    return sum(likely(group, chances) * loss(group) for group in groups)


def grpo(size: int, *, scale: bool = True, ratio: bool = True, gain_of_all: float = 1.0):
    """GRPO as its paper has it: over groups, replies and tokens, with k3 a token (`ratio`: times the ratio).

    gain_of_all: multiplies the advantages.
    """

    def claim(policy: Said, reference: Said, r: Tensor) -> Tensor:
        def loss(group):
            scores = r[list(group)]
            centred = scores - scores.mean()
            gains = centred / ((centred**2).mean().sqrt() + 1e-6) if scale else centred
            total = 0.0
            for y, gain in zip(group, gains, strict=True):
                now, then, ref = policy.logprobs[y], policy.logprobs[y].detach(), reference.logprobs[y]
                k3 = (ref - now).exp() - 1 - (ref - now)
                each = -(now - then).exp() * gain_of_all * gain + BETA * (k3 * (now - then).exp() if ratio else k3)
                total = total + each.mean() / size
            return total

        return over_groups(policy, size, loss)

    return claim


# --- RLOO -------------------------------------------------------------------------------------------------------------
@cases(slow("one", 3), ("ragged", 2))
def test_rloo_climbs_the_return(shape, size, monkeypatch):
    """E[reward] - BETA KL, whatever the size of the group: of whole replies, also where their lengths differ."""
    assert gap(expected("rloo", shape, size, monkeypatch, **{"kl.coef": BETA}), of(best_return, shape)) < EXACT


# --- GRPO -------------------------------------------------------------------------------------------------------------
KINDS = {"k3": {}, "plain_k3": {"kl.loss_kind": "plain_k3"}, "unscaled": {"advantage.scale": False}}


@cases(
    ("k3", "ragged", 2),
    ("plain_k3", "one", 3),
    slow("k3", "one", 3),
    slow("plain_k3", "ragged", 2),
    slow("unscaled", "ragged", 2),
)
def test_grpo_is_the_sum_over_its_groups(kind, shape, size, monkeypatch):
    mine = expected("grpo", shape, size, monkeypatch, **{"kl.loss_coef": BETA} | KINDS[kind])
    assert gap(mine, of(grpo(size, scale=kind != "unscaled", ratio=kind != "plain_k3"), shape)) < EXACT


# --- PPO --------------------------------------------------------------------------------------------------------------
@cases(("ppo", "token"), ("ppo", "turn_first"), ("a2c", "token"))
def test_ppo_and_a2c_climb_the_return(name, level, monkeypatch):
    """Whatever a critic says before the token, or before the first one. A mean over two tokens is half of a sum."""
    mine = expected(name, "two", 1, monkeypatch, value="normal", **exact.PLAIN, **{"advantage.level": level})
    truth = of(best_return, "two") / 2
    assert gap(mine[: len(truth)], truth) < EXACT and not mine[len(truth) :].any()


@cases("reinforce", "coderl")
def test_reinforce_climbs_the_return(name, monkeypatch):
    """CodeRL's loss is the same if no programs are given beside the policy's, and rewards are not discounted."""
    own = {"kl.coef": BETA, "score.centre": False, "advantage.gamma": 1.0}
    assert gap(expected(name, "two", 1, monkeypatch, **own), of(best_return, "two") / 2) < EXACT


# --- distillation -----------------------------------------------------------------------------------------------------
HINT = [5, 1]


@cases(("two", 1), slow("one", 3), slow("ragged", 2))
def test_distill_descends_on_the_divergence_in_visited_states(shape, size, monkeypatch):
    """Of every reply that can be said, the KL to the teacher behind its hint before each token, whatever the reward."""
    mine = expected("distill", shape, size, monkeypatch, **{"teacher.hint": lambda rollout: HINT})
    said, model, teacher = replies(shape), small(0), small(1)

    def each(reply: exact.Reply) -> Tensor:
        """[A] the divergence before each token, over the vocabulary."""
        own = (model(torch.tensor([[*PROMPT, *reply]])).logits[0, len(PROMPT) - 1 : -1] / exact.T).log_softmax(-1)
        told = [*HINT, *PROMPT]
        with torch.no_grad():
            theirs = (teacher(torch.tensor([[*told, *reply]])).logits[0, len(told) - 1 : -1] / exact.T).log_softmax(-1)
        return (own.exp() * (own - theirs)).sum(-1)

    divergences, chances = [each(reply) for reply in said], Said.by(small(0), said).whole.exp().detach()
    sum(likely(g, chances) * torch.cat([divergences[y] for y in g]).mean() for g in groups_of(said, size)).backward()
    assert gap(mine, exact.flat(model)) < EXACT


ELSEWHERE = {"sft", "decision", "ilql", "soft_q", "dpo", "online-dpo", "kto", "reward-model", "outcome-critic"}
ELSEWHERE |= {"trpo", "nlpo"}
"""Whole steps of SFT are those of another file in test_twins.py. The others are no averages over what the policy says:
test_decision.py, test_ilql.py, test_dpo.py, test_labelled.py and test_critic.py have their losses by hand. TRPO's step
is held to a dense matrix in test_trust_region.py, and NLPO, whose replies come with masks, to PPO in
test_policy_gradients.py."""


# --- GiGPO and rejection ----------------------------------------------------------------------------------------------
@cases(("one", 3), slow("two", 2))
def test_gigpo_of_one_turn_counts_the_comparison_twice(shape, size, monkeypatch):
    """All replies begin in the state of the prompt: advantages times 1 + omega, and KL once."""
    mine = expected("gigpo", shape, size, monkeypatch, **{"kl.loss_coef": BETA, "advantage.omega": 0.5})
    assert gap(mine, of(grpo(size, gain_of_all=1.5), shape)) < EXACT


@cases(("one", 3, 2), slow("ragged", 2, 1))
def test_rejection_imitates_the_best_of_what_is_drawn(shape, size, keep):
    """Cross-entropy a token of the best `keep` of `size` replies, of equal ones the first; and KL of their states."""
    said = replies(shape)
    r = exact.rewards(len(said))
    fixed = {"max_tokens": len(said[-1]), "stop_tokens": exact.STOPS, "max_grad_norm": None}
    options = {"learner.select": f"top:{keep}", "kl.loss_coef": BETA, "temperature": exact.T, "watch_every": 0}
    learner = Learner(Policy(small(0)), algorithm="rejection", reference=Policy(small(1)), **fixed, **options)
    learner.optimizer = Caught(learner.policy.parameters())
    groups = groups_of(said, size)
    for group in groups:
        learner.step([PROMPT] * size, [list(said[y]) for y in group], r[list(group)].tolist())
    chances = Said.by(small(0), said).whole.exp().detach()
    weights = [likely(group, chances) for group in groups]
    mine = sum(w * g for w, g in zip(weights, learner.optimizer.gradients, strict=True))

    def states(model) -> Tensor:
        """[Y, A, V] the log-probs of every token behind the prompt, and behind the prompt and one token."""
        rows = torch.tensor([[*PROMPT, *reply, *[0] * (len(said[-1]) - len(reply))] for reply in said])
        return (model(rows).logits[:, len(PROMPT) - 1 : -1] / exact.T).log_softmax(-1)

    model = small(0)
    policy, reference = states(model), states(small(1)).detach()
    divergence, total = (policy.exp() * (policy - reference)).sum(-1), 0.0
    for group, weight in zip(groups, weights, strict=True):
        best = [group[i] for i in sorted(range(size), key=lambda i: (-float(r[group[i]]), i))[:keep]]
        terms = [BETA * divergence[y, t] - policy[y, t, v] for y in best for t, v in enumerate(said[y])]
        total = total + weight * torch.stack(terms).mean()
    total.backward()
    assert gap(mine, exact.flat(model)) < EXACT


CLAIMED = {"distill", "gigpo", "rejection", "ppo", "a2c", "reinforce", "coderl", "grpo", "rloo"}


RELATIVES = """dapo dr-grpo gspo cispo sapo dppo opo maxrl pass-at-k vapo reinforce++ reinforce++-baseline""".split()
"""Their losses and advantages are held to formulas and to expected gradients in test_group_methods.py."""


def test_every_row_of_the_table_has_a_claim():
    assert set(ALGORITHMS) == CLAIMED | ELSEWHERE | set(RELATIVES)
