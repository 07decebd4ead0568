"""Two ranks play, judge and learn what one process does: groups, repeats, abstentions, drops, in float64."""

import math

import pytest
import torch
from rigs import on_ranks
from toys import lm

from operant import Learner, OperantError, Policy, Task, ValueOptions
from operant.distributed import rank
from operant.runs.scored_rollouts import play_and_score
from operant.training.step_arguments import parsed

IDS = ["a", "b", "c", "d", "e"]
TASKS = [Task(name, [5 + i, 6]) for i, name in enumerate(IDS)]
ORDER = [0, 1, 2, 3, 4, 0, 2]
"""More prompts than tasks: two come twice, and would be dealt to another rank the second time."""
BASE = {"max_tokens": 6, "stop_tokens": (2, 7, 9), "micro_tokens": 120, "epochs": 1}
BASE |= {"optimizer.lr": 1e-3, "seed": 4, "watch_every": 0}


def score(rollout) -> float:
    return sum((3 * token + i) % 7 for i, token in enumerate(rollout.ids)) / 7


def some_abstain(rollout):
    return None if rollout.task.id in "bd" and len(rollout.ids) % 2 else score(rollout)


def one_rank_abstains(rollout):
    """What rank 1 is dealt: every second task."""
    return None if rollout.task.id in "bd" else score(rollout)


CASES = {
    "ppo, one rank abstains": ("ppo", {"minibatch": 6, "advantage.whiten_scope": "minibatch"}, one_rank_abstains),
    "ppo, drops": ("ppo", {"on_length": "drop", "score.scale": True, "epochs": 1}, score),
    "grpo, some abstain": ("grpo", {"minibatch": 5, "epochs": 2}, some_abstain),
    "grpo, one rank abstains": ("grpo", {"minibatch": 4}, one_rank_abstains),
    "distill, one rank abstains": ("distill", {"teacher.hint": lambda r: [7]}, one_rank_abstains),
    "rloo": ("rloo", {"kl.kind": "k3"}, some_abstain),
}


def learnt(name: str) -> dict:
    """Metrics of two steps, and the weights after them less those before."""
    algorithm, options, reward = CASES[name]
    model = lm(spread=0.2).double()
    value, reference = ValueOptions() if algorithm == "ppo" else None, Policy(lm(seed=1).double())
    learner = Learner(Policy(model, value=value), reference=reference, algorithm=algorithm, **BASE | options)
    before = [p.detach().clone() for p in learner.policy.trainable()]
    told = []
    for _ in range(2):
        tasks = [TASKS[i] for i in ORDER for _ in range(2)]
        rollouts, judged = play_and_score(learner, tasks, lambda rollouts: [reward(r) for r in rollouts], samples=2)
        told.append({k: v for k, v in learner.learn(rollouts, judged.scores).items() if not k.startswith("time/")})
    moved = torch.cat([(a.detach() - b).flatten() for a, b in zip(learner.policy.trainable(), before, strict=True)])
    return {"metrics": told, "moved": moved, "groups": sorted(r.group for r in rollouts)}


def work(number: int, world: int) -> dict:
    told = {"heard": heard(), "nobody": nobody(), "own": own_queries(number), "wrong": wrong_triplets(number)}
    return {name: learnt(name) for name in CASES} | told | {"horizon": horizon(number)}


def heard() -> str:
    """A score that is not finite on one rank alone, where scores are scaled over all of them."""
    learner = Learner(lm(), **BASE, **{"score.scale": True})
    rollouts, judged = play_and_score(learner, TASKS[:4], lambda rollouts: [score(r) for r in rollouts])
    scores = [math.nan if rank() == 1 else s for s in judged.scores]
    return f"{_heard(lambda: learner.learn(rollouts, scores))} | {learner.progress.step} {learner.moments.count}"


def own_queries(number: int) -> dict:
    """Each rank asks for itself; one query is asked on both."""
    learner = Learner(lm(), algorithm="grpo", **BASE)
    replies = learner.generate([[5, 6], [5, 6], [7 + number], [7 + number]])
    return {"ids": [r.ids for r in replies[:2]], "error": _heard(lambda: learner.step(replies, [1.0, 0.0] * 2))}


def horizon(number: int) -> int:
    """Each rank lets its replies have another length; what replies are divided by has to be one number."""
    learner = Learner(lm(), algorithm="reinforce", **BASE)
    replies = learner.generate([[5, 6]], max_new_tokens=3 + number)
    return parsed(learner, replies, [1.0], dict.fromkeys(["scores", "groups"])).sampling.max_tokens


def wrong_triplets(number: int) -> str:
    """On the first rank a response is missing."""
    learner = Learner(lm(), **BASE)
    return _heard(lambda: learner.step([[5], [6]], [[7], [8]][number == 0 :], [1.0, 0.0]))


def _heard(work) -> str:
    try:
        work()
    except OperantError as error:
        return str(error)
    return "nothing"


def nobody() -> str:
    learner = Learner(lm(), **BASE)
    rollouts, judged = play_and_score(learner, TASKS[:4], lambda rollouts: [None] * len(rollouts))
    return _heard(lambda: learner.learn(rollouts, judged.scores))


@pytest.fixture(scope="module")
def ranks():
    return on_ranks(work, 2, deadline=300)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_move_the_weights_as_one_process_does(ranks, name):
    right = learnt(name)
    assert float(right["moved"].norm()) > 1e-2
    for number in (0, 1):
        mine = ranks[number][name]
        assert float((mine["moved"] - right["moved"]).norm() / right["moved"].norm()) < 1e-6
        for here, there in zip(mine["metrics"], right["metrics"], strict=True):
            assert here.keys() == there.keys()
            assert not {k: (here[k], v) for k, v in there.items() if here[k] != pytest.approx(v, rel=1e-6, abs=1e-8)}
    assert ranks[0][name]["groups"] + ranks[1][name]["groups"] != right["groups"]  # they were dealt
    assert not set(ranks[0][name]["groups"]) & set(ranks[1][name]["groups"])  # by whole groups


def test_an_error_of_one_rank_is_heard_on_both_and_moves_nothing(ranks):
    first, second = ranks[0]["heard"], ranks[1]["heard"]
    assert first == second and "is nan: rewards must be finite" in first and first.endswith("| 0 0.0")


def test_a_step_that_nobody_judges_ends_on_both(ranks):
    dropped = "they were dropped by on_length='drop' or learner.max_staleness"
    message = f"no reply is left to train on: the reward abstained from all, or {dropped}"
    assert ranks[0]["nobody"] == ranks[1]["nobody"] == message


def test_ranks_that_ask_the_same_get_replies_of_their_own(ranks):
    first, second = (rank["own"] for rank in ranks)
    assert len({tuple(ids) for ids in first["ids"] + second["ids"]}) == 4 and first["error"] == second["error"]
    assert "1 of the 3 queries stand on several ranks, and replies are compared on one" in first["error"]


def test_a_mistake_in_the_triplets_of_one_rank_is_heard_on_both(ranks):
    assert {rank["wrong"] for rank in ranks} == {"1 responses for 2 queries: give one for each"}
    assert {rank["horizon"] for rank in ranks} == {4}
