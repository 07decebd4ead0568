"""Q-learning of tokens: targets, expectiles and gradients by hand, a chain whose best play is known, and guidance."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from cases import cases
from small_runs import same
from toys import letters, lm

from operant import Batch, Learner, OperantError, Policy, Sampling, Task, ValueOptions, export, load_policy, train
from operant.models.value_head import ActionValueHead
from operant.runs.build import trained
from operant.sampling import counter

QUERIES, REPLIES = [[3, 4], [5], [3, 4, 6, 7, 8]], [[6, 7], [8, 9, 10], [9]]
"""The first and the last are two turns of one episode: the second prompt goes on from the first reply."""
SCORES = [0.5, -1.0, 2.0]


def by_hand(learner, target, *, gamma, turn_gamma, tau, cql, bc, awac):
    """The loss of the three replies, on bare float64 models, an action at a time."""
    model, head, twin = learner.policy.model, learner.policy.value_head, target.value_head

    def states(of, prompt, action):
        return of(torch.tensor([prompt + action]), output_hidden_states=True).hidden_states[-1][0, len(prompt) - 1 : -1]

    rows, total, count = [], 0.0, 0
    for prompt, action in zip(QUERIES, REPLIES, strict=True):
        h, frozen = states(model, prompt, action), states(target.model, prompt, action).detach()
        v = head.net(h).squeeze(-1)
        q = [net(h) for net in (head.one, head.two)]
        best = torch.minimum(twin.one(frozen), twin.two(frozen)).detach()
        logprobs = model(torch.tensor([prompt + action])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        rows.append((v, q, best, logprobs, action))
    for turns in [(0, 2), (1,)]:
        steps = [(row, i, turn) for turn in turns for row in (rows[turn],) for i in range(len(row[4]))]
        for number, ((v, q, best, logprobs, action), i, turn) in enumerate(steps):
            last = i == len(action) - 1
            ahead = 0.0
            if number + 1 < len(steps):
                (following, *_), j, other = steps[number + 1]
                ahead = (gamma if other == turn else gamma * turn_gamma) * following[j].detach()
            reward, a = SCORES[turn] if last else 0.0, action[i]
            for each in q:
                total = total + (reward + ahead - each[i, a]) ** 2
                total = total - cql * each[i].log_softmax(-1)[a]
            gap = best[i, a] - v[i]
            total = total + (tau if gap > 0 else 1 - tau) * gap**2
            total = total - bc * min(float((awac * gap).exp().detach()), 20.0) * logprobs[i, a]
            count += 1
    return total / count


@cases((48_000_000, 0.0), (40, 0.7))
def test_loss_and_gradient_are_those_of_a_hand_calculation(chunk, awac, monkeypatch):
    monkeypatch.setattr("operant.models.logprobs.BUDGET", chunk)
    options = {"advantage.gamma": 0.9, "advantage.turn_gamma": 0.5, "loss.tau": 0.8, "loss.cql_coef": 0.3}
    options |= {"loss.bc_coef": 0.6, "loss.awac_beta": awac, "update.micro_tokens": 12}
    options |= {"value.layers": 1, "value.init": "normal", "lr": 0.0, "max_grad_norm": None, "keep_gradients": True}
    learner = Learner(lm().double(), algorithm="ilql", **options)
    target = learner.copies["target"].policy
    with torch.no_grad():
        for p in target.parameters():
            p.mul_(1.1)
    target = deepcopy(target)  # it moves after the step
    metrics = learner.step(QUERIES, REPLIES, SCORES, episodes=[0, 1, 0])
    mine = {name: p.grad.clone() for name, p in learner.policy.named_parameters() if p.grad is not None}
    learner.policy.zero_grad()
    right = by_hand(learner, target, gamma=0.9, turn_gamma=0.5, tau=0.8, cql=0.3, bc=0.6, awac=awac)
    right.backward()
    assert metrics["loss/total"] == pytest.approx(float(right.detach()), rel=1e-9)
    theirs = {name: p.grad for name, p in learner.policy.named_parameters() if p.grad is not None}
    assert mine.keys() == theirs.keys() and any(name.startswith("value_head.two") for name in mine)
    for name, gradient in mine.items():
        assert torch.allclose(gradient, theirs[name], rtol=1e-8, atol=1e-10), name


# --- a chain ----------------------------------------------------------------------------------------------------------
START, LEFT, RIGHT, LENGTH = 3, 4, 5, 3
"""Three steps to the right pay 1; any other reply pays 0.1 for a left as its last step, and else nothing."""


def pay(reply):
    return 1.0 if reply == [RIGHT] * LENGTH else 0.1 * (reply[-1] == LEFT)


def recorded(step, count=48):
    """Replies of a player who goes right in half of its steps: the best one is 1 of 8."""
    return [[RIGHT if counter(7, step, i, place) % 2 else LEFT for place in range(LENGTH)] for i in range(count)]


def learnt(shuffled=False, steps=40):
    options = {"loss.cql_coef": 0.1, "loss.tau": 0.9, "advantage.gamma": 1.0, "value.init": "torch"}
    plain = {"max_tokens": LENGTH, "fixed_length": True, "lr": 4e-3, "epochs": 4, "optimizer.schedule": "linear"}
    learner = Learner(lm(vocab=6, spread=0.05), algorithm="ilql", total_steps=steps, **plain, **options)
    for step in range(steps):
        replies = recorded(step)
        scores = [pay(reply) for reply in replies]
        shift = 1 + counter(5, step) % 47 if shuffled else 0
        learner.step([[START]] * len(replies), replies, scores[shift:] + scores[:shift])
    return learner


def played(learner, guidance):
    """The mean pay of 64 replies."""
    sampling = replace(learner.sampling, guidance=guidance)
    return sum(pay(r.ids) for r in learner.play([Task(str(i), [START]) for i in range(64)], sampling=sampling)) / 64


@pytest.fixture(scope="module")
def taught():
    return learnt()


def test_guided_play_beats_the_player_it_learnt_from(taught):
    """The player's mean is 0.175. Q of the last of three steps to the right is 1, and of the left there 0.1."""
    unguided, guided = played(taught, 0.0), played(taught, 16.0)
    assert unguided < 0.3 and guided > 0.9
    batch = Batch.given([[START]] * 2, [[RIGHT] * LENGTH, [RIGHT, RIGHT, LEFT]])
    with torch.no_grad():
        out = taught.policy.forward(batch)
    least = out.q["one"].minimum(out.q["two"])[:, 1:]
    assert float(least[0, -1]) == pytest.approx(1.0, abs=0.25) and float(least[1, -1]) == pytest.approx(0.1, abs=0.2)


@pytest.mark.slow
def test_shuffled_rewards_guide_nowhere():
    assert played(learnt(shuffled=True, steps=25), 16.0) < 0.4


def test_one_object_samples_and_scores_guided_replies(taught):
    """The log-probs of decoding are those of a bare softmax of logits + guidance * min Q, at every temperature."""
    sampling = replace(taught.sampling, guidance=3.0, temperature=0.7)
    (reply,) = taught.play([Task("a", [START])], sampling=sampling)
    (turn,) = reply.turns
    policy, ids = taught.policy, torch.tensor([turn.prompt + turn.action])
    with torch.no_grad():
        states = policy.model(ids, output_hidden_states=True).hidden_states[-1][0, :-1]
        q = torch.minimum(policy.value_head.one(states), policy.value_head.two(states))
        right = ((policy.head(states) + 3.0 * q) / 0.7).log_softmax(-1)[range(LENGTH), turn.action]
        scored = policy.forward(Batch.given([turn.prompt], [turn.action]), sampling).logprobs[0, 1:]
    assert turn.logprobs == pytest.approx(right.tolist(), abs=1e-5)
    assert scored.tolist() == pytest.approx(right.tolist(), abs=1e-5)


def test_an_option_is_chosen_by_its_guided_tokens(taught):
    """The distribution over options is that of the mean guided log-probs of their tokens."""
    options, sampling = [[RIGHT, RIGHT], [LEFT]], replace(taught.sampling, guidance=4.0)
    table, _ = taught.policy.choice_logprobs(Batch.choosing([[START]], [options]), sampling)
    means = []
    for option in options:
        batch = Batch.given([[START]], [option])
        with torch.no_grad():
            means.append(taught.policy.forward(batch, sampling).logprobs[0, 1:].mean())
    assert table[0].tolist() == pytest.approx(torch.stack(means).log_softmax(0).tolist(), abs=1e-5)


# --- heads on disk ----------------------------------------------------------------------------------------------------
def test_heads_are_saved_with_the_learner_and_loaded_alone(tmp_path):
    learner = Learner(lm(), algorithm="ilql", lr=1e-2, max_tokens=3)
    learner.step(QUERIES, REPLIES, SCORES)
    learner.save(tmp_path / "learner")
    again = Learner.load(tmp_path / "learner", policy=lm())
    both = [one.step(QUERIES, REPLIES, SCORES)["loss/total"] for one in (learner, again)]
    assert both[0] == both[1]
    moved = learner.copies["target"].policy.value_head.one[-1].weight
    assert torch.equal(moved, again.copies["target"].policy.value_head.one[-1].weight)
    assert not torch.equal(moved, learner.policy.value_head.one[-1].weight)
    learner.policy.tokenizer = letters()
    export(learner.policy, tmp_path / "export")
    loaded = load_policy(str(tmp_path / "export"), value=ValueOptions(layers=2, actions=True)).value_head
    assert isinstance(loaded, ActionValueHead)
    for name, x in learner.policy.value_head.state_dict().items():
        assert torch.equal(x, loaded.state_dict()[name]), name
    plain = load_policy(str(tmp_path / "export"), value=ValueOptions(layers=2)).value_head
    assert not isinstance(plain, ActionValueHead), "a critic without Q takes the V of one that has some"
    assert torch.equal(plain.net[0].weight, loaded.net[0].weight)


def test_a_run_is_guided_resumes_and_its_export_can_be_guided(tmp_path):
    given = {"tasks": ["go", "the"] * 4, "reward": lambda rollouts: [float("a" in r.reply) for r in rollouts]}
    given |= {"algorithm": "ilql", "batch": 8, "probes": 2, "max_tokens": 3, "tokenizer": letters(), "lr": 1e-2}
    given |= {"sampling.guidance": 2.0, "evaluate": ["go"], "evaluation.sampling": {"guidance": 4.0}, "quiet": True}
    whole = train(lm(vocab=40), out=tmp_path / "whole", steps=2, **given)
    assert whole.metrics[0]["rollout/logprob_gap"] < 1e-3, "log-probs of guided replies are scored without guidance"
    train(lm(vocab=40), out=tmp_path / "half", steps=1, **given)
    assert same(train(lm(vocab=40), out=tmp_path / "half", steps=2, resume=True, **given), whole)
    policy, engine = trained(tmp_path / "whole")
    assert torch.equal(policy.value_head.two[-1].weight, whole.policy.value_head.two[-1].weight)
    replies = engine.generate([[5, 6]] * 4, Sampling(max_tokens=3, guidance=50.0, stop_tokens=(-1,)), [1, 2, 3, 4])
    assert len({tuple(reply.action) for reply in replies}) == 1, "so much guidance is greedy"


def test_guidance_without_q_values_is_a_sentence():
    with pytest.raises(OperantError, match="the policy has no Q values; train some"):
        Policy(lm()).forward(Batch.given([[3]], [[4]]), Sampling(guidance=1.0))
    with pytest.raises(OperantError, match="'ilql' needs Q values of every action, and the policy has none"):
        Learner(Policy(lm(), value=ValueOptions()), algorithm="ilql")
