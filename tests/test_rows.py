"""Methods with several sources, with fields of their own, and with other units."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toys import letters, lm

from operant import Batch, Learner, Outputs, Policy, Rollout, Sampling, Task, Turn, ValueOptions, train
from operant.algorithms import find
from operant.data.demonstrations import Demonstrations
from operant.objectives.kl import KLOptions
from operant.rollouts.collate import collate, units
from operant.training.objective import Objective, forward

sys.path.append(str(Path(__file__).parents[1] / "docs/extending/src"))

from operant_example.world import Guess

PTX, ANCHORED = "operant_example.two_sources:PPO_PTX", "operant_example.target:ANCHORED_PPO"
PLAIN = {"update.epochs": 1, "kl.coef": 0.0, "max_tokens": 4, "watch_every": 0, "optimizer.max_grad_norm": None}
ALONE = {"advantage.whiten_scope": "none", "advantage.lam": 1.0, "loss.value_coef": 0.0}


def demonstrations() -> list[Rollout]:
    tasks = [Task(f"given/{i}", [4 + i, 5], replies=([6, 7, 8][: i + 1],)) for i in range(3)]
    return Demonstrations(None, 2).rollouts(tasks)


def test_the_gradient_of_two_sources_is_the_sum_of_both():
    """By autograd on bare log-probs: each token weighs 1 / N, a played one by -advantage, a given one by -coef."""
    learner = Learner(lm(), algorithm=PTX, reference=None, keep_gradients=True, **PLAIN, **ALONE, imitation_coef=0.5)
    played, given = learner.generate([[4, 9], [5], [6, 6, 7]]), demonstrations()
    twin, scores = Policy(lm(), value=ValueOptions()), [1.0, -2.0, 0.5]
    metrics = learner.learn([*played, *given], [*scores, None, None, None])
    rows = [r.turns[0] for r in (*played, *given)]
    batch = Batch.given([turn.prompt for turn in rows], [turn.action for turn in rows])
    out, values = twin.forward(batch), [r.turns[0].values for r in played]
    assert not any(map(any, values)), "the value head begins at 0, so the advantage is the score"
    weights = torch.tensor([*scores, 0.5, 0.5, 0.5])[:, None] * batch.actions / batch.actions.sum()
    (-(weights * out.logprobs).sum()).backward()
    wanted = {name: p.grad for name, p in twin.model.named_parameters()}
    for name, p in learner.policy.model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], atol=1e-6, rtol=1e-4)
    last = learner.last_step.batch
    for row, turn in enumerate(r.turns[0] for r in played):
        assert last.logprobs[row][last.actions[row]].tolist() == pytest.approx(turn.logprobs, abs=0)
    assert last.demonstrated.tolist() == [False] * 3 + [True] * 3
    assert metrics["given/count"] == 3 and metrics["rollout/count"] == 3 and metrics["reward/mean"] == sum(scores) / 3
    at = batch.actions & last.demonstrated[:, None]
    assert metrics["given/logprob"] == pytest.approx(float(out.logprobs.detach()[at].mean()), rel=1e-5)
    assert metrics["given/loss"] == pytest.approx(-0.5 * metrics["given/logprob"], rel=1e-5)
    assert metrics["rollout/reply_tokens"] == sum(len(r.ids) for r in played) / 3


def test_metrics_of_played_replies_do_not_see_the_given_ones():
    def metrics_of(extra):
        learner = Learner(lm(), algorithm=PTX, **PLAIN | {"kl.coef": 0.1}, lr=0.0)
        replies = learner.generate([[4, 9], [5], [6, 6, 7]])
        return learner.learn([*replies, *extra], [1.0, -2.0, 0.5] + [None] * len(extra))

    alone, both = metrics_of([]), metrics_of(demonstrations())
    ours = [n for n in alone if n.split("/")[0] in ("rollout", "reward", "kl", "value", "policy", "returns")]
    assert len(ours) > 30
    for name in ours:
        assert both[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("kind", ["k3", "reverse"])
def test_given_replies_have_no_kl_in_the_loss(kind):
    batch = Batch.given([[4], [5]], [[6], [7]])
    now, ref = torch.where(batch.actions, -1.0, 0.0), torch.where(batch.actions, -2.0, 0.0)
    batch = batch.with_(raw_logprobs=now, ref_logprobs=ref, demonstrated=torch.tensor([False, True]))
    out = Outputs(now, now, kl={"reverse": batch.actions.float()})
    kl = KLOptions(coef=0.0, loss_coef=0.5, loss_kind=kind)
    objective = Objective(lambda out, batch: {"loss": torch.zeros_like(now)}, kl=kl)
    loss = forward(lambda *given, **how: out, batch, objective, Sampling())[1]["loss"]
    assert loss[0, 1] > 0 and loss[1, 1] == 0


def test_a_row_reads_a_target_network_with_its_values():
    learner = Learner(lm(), algorithm=ANCHORED, **PLAIN | {"optimizer.lr": 1e-2})
    for _ in range(2):
        replies = learner.generate([[4, 9], [5], [6, 6, 7]])
        target, version = learner.copies["target"].policy, learner.progress.step
        rows = Batch.given([r.turns[0].prompt for r in replies], [r.ids for r in replies])
        with torch.no_grad():
            wanted = target.forward(rows, Sampling(max_tokens=4))
        learner.learn(replies, [float(len(r.ids)) for r in replies])
        seen = learner.last_step.batch.extra
        torch.testing.assert_close(seen["target_logprobs"], wanted.logprobs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(seen["target_values"], wanted.values, atol=1e-5, rtol=1e-5)
        assert (seen["target_values"].abs().max() > 0) == (version > 0), "the value head begins at 0"


def test_units_by_hand():
    def rollout(group, *turns):
        made = [Turn(prompt, action, logprobs=[-1.0] * len(action), reward=0.0) for prompt, action in turns]
        return Rollout(Task("t", "a"), group, made, [""] * len(made))

    rollouts = [rollout(7, ([4], [5]), ([4, 5, 6], [7])), rollout(3, ([4], [6]))]
    rollouts += [rollout(7, ([4], [8, 9])), rollout(3, ([4], [4]))]
    joined, apart = collate(rollouts, [0.0] * 4), collate(rollouts, [0.0] * 4, joined=False)
    assert units(joined) == [[0], [1], [2], [3]] and units(apart) == [[0, 1], [2], [3], [4]]
    assert units(apart, "turn") == [[0], [1], [2], [3], [4]] and units(joined, "pair") == [[0, 1], [2, 3]]
    assert units(apart, "group") == [[0, 1, 3], [2, 4]]


@pytest.mark.parametrize("unit, base, steps", [("turn", "ppo", 9), ("episode", "ppo", 3), ("group", "rloo", 2)])
def test_minibatches_are_cut_by_unit(unit, base, steps):
    """Six episodes of three turns in three groups, two units a minibatch: 18 / 2, 6 / 2 and 3 / 2 optimizer steps."""
    method = replace(find(base), unit=unit)
    options = {"kl.coef": 0.0, "max_tokens": 3, "update.minibatch": 2, "update.epochs": 1}
    learner = Learner(lm(), tokenizer=letters(), algorithm=method, env=Guess("z", 3), **options)
    metrics = learner.learn(learner.play([Task(f"t/{i // 2}", "ab") for i in range(6)]), [float(i) for i in range(6)])
    assert metrics["update/steps"] == steps and metrics["rollout/turns"] == 3 and metrics["rollout/logprob_gap"] < 1e-4


def test_a_run_of_two_sources_logs_them_apart_and_resumes(tmp_path):
    rows = [{"prompt": word, "completion": "ab"} for word in ["abc", "bcd", "cde", "def"]]
    given = {"tasks": rows, "reward": lambda rs: [float(len(r.reply)) for r in rs], "algorithm": PTX, "batch": 4}
    given |= {"max_tokens": 2, "epochs": 1, "probes": 0, "evaluate": rows[:1], "tokenizer": letters()}
    whole = train(lm(), out=tmp_path / "whole", steps=2, **given)
    train(lm(), out=tmp_path / "half", steps=1, **given)
    half = train(lm(), out=tmp_path / "half", steps=2, resume=True, **given)
    names = ("given/count", "given/loss", "rollout/count", "reward/mean", "kl/per_reply", "loss/total")
    assert [half.metrics[1][n] for n in names] == [whole.metrics[1][n] for n in names]
    assert whole.metrics[0]["given/count"] == 4 and whole.metrics[0]["rollout/count"] == 4
