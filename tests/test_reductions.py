"""What a loss is a mean over (`update.per`), advantages over the deviation of the batch, groups that are left out, and
a critic that moves first: by hand."""

import pytest
import torch
from cases import cases
from rigs import said
from toys import lm

from operant import Learner, Outputs
from operant.objectives import losses
from operant.rollouts.collate import collate
from operant.runs.config import configure
from operant.training.update import weighted

LENGTHS, GROUPS, GAINS = [3, 4, 1, 2, 5], [7, 7, 2, 2, 2], [1.5, -0.8, 0.6, 2.0, -1.0]
SHARES = {
    "token": [1 / 15] * 5,
    "reply": [1 / 3 / 5, 1 / 4 / 5, 1 / 5, 1 / 2 / 5, 1 / 5 / 5],
    "group": [1 / 7 / 2, 1 / 7 / 2, 1 / 8 / 2, 1 / 8 / 2, 1 / 8 / 2],
    "constant": [1 / 5 / 6] * 5,
}
"""The weight of a token of each reply, with a limit of six tokens."""
OWN = {"grpo": "reply", "dapo": "token", "dr-grpo": "constant", "gspo": "reply", "cispo": "token"}


def batch():
    made = collate([said([3], [4] * n, group=g) for n, g in zip(LENGTHS, GROUPS, strict=True)], GAINS)
    return made.with_(logprobs=torch.zeros(made.tokens.shape), advantages=torch.tensor(GAINS)[:, None] * made.actions)


@cases(*((algorithm, None) for algorithm in OWN), *(("grpo", per) for per in SHARES), ("cispo", "group"))
def test_the_gradient_is_that_of_the_named_mean(algorithm, per):
    learner = Learner(lm(), algorithm=algorithm, max_tokens=6, **{"update.per": per})
    objective = learner.objective(learner.sampling)
    rows = weighted(batch(), range(5), objective)
    logprobs = torch.zeros(rows.tokens.shape, requires_grad=True)
    losses.total(objective.loss(Outputs(logprobs, logprobs, entropy=logprobs), rows)["loss"], rows).backward()
    summed = torch.tensor([float(row[act].sum()) for row, act in zip(logprobs.grad, rows.actions, strict=True)])
    shares = SHARES[per or OWN[algorithm]]  # the ratio is 1, so the slope of a token is minus its advantage
    expected = [-gain * share * n for gain, share, n in zip(GAINS, shares, LENGTHS, strict=True)]
    assert summed.tolist() == pytest.approx(expected, rel=1e-5)


def test_groups_with_equal_rewards_are_left_out_unless_all_are():
    learner = Learner(lm(), algorithm="grpo", **{"learner.drop_equal": True})
    replies = [said([3], [4, 5], group=g) for g in (0, 0, 1, 1, 2, 2)]
    _, places = learner.preview(replies, [1.0, 0.0, 2.0, 2.0, None, 3.0])
    assert places == [0, 1] and learner.preview(replies, [1.0] * 6)[1] == list(range(6))
    metrics = learner.learn(replies, [1.0, 0.0, 2.0, 2.0, 4.0, 3.0])
    assert metrics["rollout/count"] == 4 and metrics["rollout/dropped"] == pytest.approx(1 / 3)


@cases(("ppo", "copy", "adaptive"), ("vapo", None, "fixed"))
def test_the_critic_moves_first_and_alone(algorithm, critic, control):
    given = {"value.critic": critic, "learner.critic_steps": 2, "optimizer.lr": 1e-2, "seed": 1}
    learner = Learner(lm(), algorithm=algorithm, max_tokens=4, **given | {"kl.control": control})
    own = learner.policy.critic if critic else learner.policy.value_head
    apart = {id(p) for p in own.parameters()}

    def parts():
        every = learner.policy.trainable()
        return [[p.detach().clone() for p in every if (id(p) in apart) is mine] for mine in (True, False)]

    moved = []
    for step in range(3):
        before, replies = parts(), learner.generate([[3], [4]])
        metrics = learner.step(replies, [1.0, 0.0])
        moved.append([not all(map(torch.equal, *pair)) for pair in zip(before, parts(), strict=True)])
        moved[-1].append(learner.controller.coef != learner.kl.coef)  # a policy that stands answers to no price
        assert ("policy/loss" in metrics) == (step == 2) and metrics["value/loss"] > 0
    assert moved == [[True, False, False], [True, False, False], [True, True, control == "adaptive"]]


def test_the_preset_scalerl_is_cispo_with_its_options():
    config = configure({"tasks": ["a", "b"], "reward": len, "preset": "scalerl", "batch": 8, "samples": 4})
    learner, train = config.learner, config.train
    assert train.algorithm == "cispo" and train.retire == 0.9 and learner["learner"].drop_equal
    assert learner["update"].per == "group" and learner["advantage"]["deviation"] == "batch"
    assert learner["loss"]["high"] == 5 and learner["loss"]["bound"] == "weight"
