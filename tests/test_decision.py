"""Prompts that state the return: what stands in them in play and in training, and what asking for more is worth."""

from dataclasses import replace

import pytest
import torch
from cases import cases
from small_runs import same
from toys import bare_logprobs, ids, letters, lm
from worlds import Turns

from operant import Learner, Rollout, Step, Task, Turn, train
from operant.rollouts.prompts import ConditionOptions, Wanted, returns_to_go, with_returns
from operant.sampling import counter

DIGITS = {i: 3 + i for i in range(6)}


def tell(value):
    """A return as one token: 0, 1/5 ... 1."""
    return [DIGITS[round(5 * value)]]


def told(value):
    """A return as text that the tokenizer of letters can write."""
    return "abcdef"[round(5 * value)]


# --- by hand ----------------------------------------------------------------------------------------------------------
def test_returns_from_each_turn_on():
    turns = [Turn([3], [4, 5], reward=1.0), Turn([6], [7], reward=-2.0, trained=False), Turn([8], [9, 9], reward=4.0)]
    rollout = Rollout(Task("a", [3]), 0, turns, [""] * 3)
    assert returns_to_go(rollout, 0.0) == [3.0, 2.0, 4.0]
    assert returns_to_go(rollout, 1.0, 0.5) == [1 + 0.5 * (-2 + 0.5 * 5), -2 + 0.5 * 5, 5.0]
    assert returns_to_go(rollout, [1.0, 2.0, 3.0, 4.0], 0.5) == [4 + 0.5 * (-2 + 0.5 * 11), -2 + 0.5 * 11, 11.0]
    overruled = replace(rollout, turns=[*turns, Turn([1], [2], trained=False)])
    assert returns_to_go(overruled, 1.0) == [4.0, 3.0, 5.0, 0.0], "a score is paid on the last action of the policy"


@cases(
    (1.0, 2, "1"), (0.0, 2, "0"), (-0.01, 1, "0"), (0.46, 1, "0.5"), (-2.5, 1, "-2.5"), (10.0, 2, "10"), (120, 0, "120")
)
def test_a_return_is_written_with_few_digits(value, digits, written):
    class Words:
        bos_token_id = None

        def __call__(self, text, **kwargs):
            return {"input_ids": [text]}

    options = ConditionOptions(template="has {return}: {prompt}!", digits=digits)
    assert options.put(Words(), Task("a", "x"), [5], value) == [f"has {written}: ", 5, "!"]


def test_what_is_left_of_a_wanted_return():
    wanted = Wanted(ConditionOptions(wanted=2.0, turn_gamma=0.5, template=lambda value: [int(4 * value)]))
    put = wanted.opening(None, training=True)
    turns = [Turn([1], [2], reward=1.5), Turn([1], [2], reward=-1.0)]
    assert [put(Task("a", [9]), 0, [9], turns[:n]) for n in range(3)] == [[8, 9], [4, 9], [16, 9]]


def test_the_best_returns_are_asked_for_in_turn():
    wanted = Wanted(ConditionOptions(top=0.5, template=lambda value: [int(value)]))
    assert wanted.opening(None, training=True) is None, "nothing is known in the first step"
    wanted.see([3.0, 1.0, 4.0, 2.0])
    asked = [wanted.opening(None, training=True)(Task("a", [0]), place, [0], [])[0] for place in range(4)]
    assert asked == [4, 3, 4, 3] and wanted.opening(None, training=False)(Task("a", [0]), 1, [0], []) == [4, 0]
    again = Wanted(wanted.options)
    again.load_state_dict(wanted.state_dict())
    assert again.best == [4.0, 3.0]


def test_the_loss_is_the_cross_entropy_behind_reached_returns():
    """Two turns with fresh prompts, and two in one row, by bare log-probs."""
    model = lm().double()
    turns = [
        Turn([5, 9], [10, 11], [-9.0, -9.0], reward=0.2, unconditioned=[9]),
        Turn([5, 12], [13], [-9.0], reward=0.4, unconditioned=[12]),
    ]
    fresh = Rollout(Task("a", [9]), 0, turns, ["", ""])
    turns = [Turn([5, 14], [15], [-9.0], unconditioned=[14]), Turn([5, 14, 15, 16], [17], [-9.0], reward=0.2)]
    row = Rollout(Task("b", [14]), 1, turns, ["", ""])
    learner = Learner(model, algorithm="decision", lr=0.0, temperature=0.5, **{"condition.template": tell})
    metrics = learner.learn([fresh, row], [0.4, 0.0])
    rows = [([8, 9], [10, 11]), ([7, 12], [13]), ([4, 14], [15]), ([4, 14, 15, 16], [17])]
    right = [-bare_logprobs(model, prompt, action, temperature=0.5) for prompt, action in rows]
    assert metrics["supervised/loss"] == pytest.approx(float(torch.cat(right).mean()), rel=1e-9)
    assert metrics["reward/mean"] == pytest.approx(0.6)
    (made,) = with_returns([row], [[0.2, 0.2]], None, learner.wanted.options)
    assert [turn.prompt for turn in made.turns] == [[4, 14], [4, 14, 15, 16]], "said once, where the row begins"


# --- play -------------------------------------------------------------------------------------------------------------
class Count(Turns):
    """A world of three turns, the last two of which go on from the first: each pays 0, 0.2 or 0.4, by its slot."""

    branches, first = True, Step("go", fresh=True)

    def __init__(self, fresh: bool = True):
        self.fresh = fresh

    def answer(self, slot, reply):
        return Step("on", fresh=self.fresh, at=0, reward=slot % 3 / 5, terminated=self.turn[slot] == 3)


@pytest.mark.parametrize("fresh", [True, False])
def test_play_states_what_is_wanted_before_the_prompt(fresh):
    known = {"condition.template": told, "condition.wanted": 1.0, "condition.evaluated": 0.4, "max_tokens": 3}
    learner = Learner(lm(vocab=40), tokenizer=letters(), algorithm="decision", env=Count(fresh), **known)
    for stream, wanted in (("train", 1.0), ("evaluate", 0.4)):
        for rollout in learner.play([Task(str(i), "x") for i in range(8)], stream=stream):
            one, two, other = rollout.turns
            assert one.prompt == ids(told(wanted)) + ids("go") and one.unconditioned == ids("go")
            assert (other.prompt, other.unconditioned) == (two.prompt, two.unconditioned)
            if fresh:
                assert two.prompt == ids(told(wanted - one.reward)) + ids("on") and two.unconditioned == ids("on")
            else:
                own, more = one.unconditioned, one.action + ids("on")
                assert (two.prompt, two.unconditioned) == (one.prompt + more, own + more)


def test_a_run_resumes_with_the_returns_that_it_asks_for(tmp_path):
    given = {"tasks": [f"go {i}" for i in range(8)], "algorithm": "decision", "env": Count, "batch": 8, "probes": 2}
    given |= {"condition.template": told, "max_tokens": 3, "tokenizer": letters(), "lr": 1e-2, "evaluate": ["go"]}
    whole = train(lm(vocab=40), out=tmp_path / "whole", steps=2, **given)
    train(lm(vocab=40), out=tmp_path / "half", steps=1, **given)
    half = train(lm(vocab=40), out=tmp_path / "half", steps=2, resume=True, **given)
    assert half.learner.wanted.best == whole.learner.wanted.best != [] and same(half, whole)


# --- learning ---------------------------------------------------------------------------------------------------------
WANTED, PROMPTS, V = 7, [[1, 2, 3], [4, 5], [6], [8, 9, 10, 11]], 12


def score(rollout):
    """The share of one token: 1 is the optimum."""
    return rollout.ids.count(WANTED) / len(rollout.ids)


def mean_when_asked(learner, value):
    learner.wanted = Wanted(replace(learner.wanted.options, wanted=value))
    return sum(map(score, learner.generate(PROMPTS * 16))) / 64


def taught(steps, shift):
    """A learner after steps on episodes of every return: each is labelled with its own, or with that of another."""
    own = {"lr": 1e-2, "max_tokens": 5, "fixed_length": True, "condition.template": tell}
    learner = Learner(lm("gpt2", V, spread=0.05), algorithm="decision", **own)
    for step in range(steps):
        replies = []
        for i in range(48):
            right = [counter(3, step, i, place) % 6 < i % 6 for place in range(5)]
            others = [counter(4, step, i, place) % V for place in range(5)]
            replies.append([WANTED if yes else other for yes, other in zip(right, others, strict=True)])
        scores = [reply.count(WANTED) / 5 for reply in replies]
        moved = shift(step, len(scores))
        learner.step([PROMPTS[i % 4] for i in range(48)], replies, scores[moved:] + scores[:moved])
    return learner


def test_asking_for_more_gets_more():
    """By chance a token is right in 1 of 12, and in the data in half; what is asked for comes."""
    learner = taught(50, lambda step, count: 0)
    means = [mean_when_asked(learner, value / 5) for value in range(6)]
    assert means == sorted(means) and means[0] < 0.1 and means[-1] > 0.85
    assert max(abs(mean - value / 5) for value, mean in enumerate(means)) < 0.15


def test_shuffled_returns_say_nothing():
    learner = taught(20, lambda step, count: 1 + counter(5, step) % (count - 1))
    assert abs(mean_when_asked(learner, 1.0) - mean_when_asked(learner, 0.0)) < 0.15
