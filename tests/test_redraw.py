"""Dynamic sampling (`--redraw`): which prompts stay, by enumeration; resuming, chunks, several ranks, refusals."""

from dataclasses import replace
from itertools import islice

import pytest
from cases import cases
from rigs import on_ranks
from small_runs import count_a, model, same, stopped_and_whole, told
from toys import letters

from operant import Learner, Rollout, Task, Turn
from operant.data import Order
from operant.rewards import Judged
from operant.runs.config import TrainOptions, configure
from operant.runs.parts import RunParts
from operant.runs.scored_rollouts import without_variance

PROMPTS = list("abcdefgh")
TASKS = [Task(prompt, prompt) for prompt in PROMPTS]
GIVEN = {"algorithm": "grpo", "samples": 2, "batch": 6, "minibatch": 6}


def parts(reward):
    learner = Learner(model(), tokenizer=letters(), algorithm="grpo", max_tokens=4, seed=3)
    return RunParts(learner, None, TASKS, Order(len(TASKS)), reward, [], None, None)


def by_hand(good, redraw):
    """Step by step: the prompts that are played in each round, and those that stay."""
    shuffled = Order(len(PROMPTS))
    order = iter(lambda: PROMPTS[shuffled.take(1)[0]], None)
    while True:
        rounds, kept = [list(islice(order, 3))], []
        while True:
            kept += [prompt for prompt in rounds[-1] if prompt in good]
            if len(rounds) > redraw or len(kept) == 3:
                break
            rounds.append(list(islice((prompt for prompt in order if prompt not in kept), 3 - len(kept))))
        yield rounds, kept + [prompt for prompt in rounds[-1] if prompt not in good]


@cases(("abcdefgh", 0), ("abcdefgh", 4), ("bdfg", 1), ("bdfg", 4), ("c", 4), ("", 1))
def test_prompts_stay_whose_rewards_differ(good, redraw):
    """A kept prompt is not played twice in a step, and one that was thrown away may come again."""
    played = []

    def reward(rollouts):
        played.append([r.task.id for r in rollouts[::2]])
        found = [float(i % 2 and r.task.id in good) for i, r in enumerate(rollouts)]
        return [None if r.task.id == "a" and i % 2 else x for i, (r, x) in enumerate(zip(rollouts, found))]

    good = good.replace("a", "")  # one of its two replies has no reward
    run, train = parts(reward), TrainOptions(batch=6, samples=2, redraw=redraw)
    for rounds, kept in islice(by_hand(good, redraw), 3):
        played.clear()
        rollouts, judged, metrics = run.play_and_score(train)
        assert played == rounds and [r.task.id for r in rollouts[::2]] == [r.task.id for r in rollouts[1::2]]
        assert sorted(r.task.id for r in rollouts[::2]) == sorted(kept) and judged.scores == reward(rollouts)
        assert len({(r.task.id, tuple(r.ids), r.place) for r in rollouts}) == 6
        again = sum(map(len, rounds[1:]))
        assert metrics == ({"rollout/redrawn": again, "rollout/drawn_per_used": (3 + again) / 3} if redraw else {})
        assert len(judged.notes) == bool(again)
        assert all(repr(prompt) in note for note in judged.notes for prompt in set(rounds[0]) - {*good})


def test_branches_are_compared_one_by_one():
    """One episode of a task, whose two branches are paid differently, teaches; one whose are paid alike does not."""
    both = [Turn([1], [2], [-1.0], parent=-1), Turn([1], [3], [-1.0], parent=-1)]
    episodes = []
    for group, paid in enumerate([(0.0, 1.0), (1.0, 1.0)]):
        turns = [replace(turn, reward=x) for turn, x in zip(both, paid)]
        episodes.append(Rollout(Task(str(group), "a"), group, turns, ["b", "c"], "world"))
    assert list(without_variance(episodes, Judged([0.0, 0.0]))) == ["1"]


def some_a(rollouts):
    return [float("a" in r.reply or "e" in r.reply) for r in rollouts]


def test_chunks_of_the_reward_change_nothing():
    whole, cut = (
        parts(some_a).play_and_score(TrainOptions(batch=6, samples=2, redraw=3, reward_chunks=chunks))
        for chunks in (1, 3)
    )
    assert whole[2]["rollout/redrawn"] and whole[1] == cut[1] and whole[2] == cut[2]
    assert [r.ids for r in whole[0]] == [r.ids for r in cut[0]]


def drawn(*_):
    run, train = parts(some_a), TrainOptions(batch=6, samples=2, redraw=3)
    found = [run.play_and_score(train) for _ in range(3)]
    own = [[(r.task.id, r.place, r.group, r.ids) for r in rollouts] for rollouts, _, _ in found]
    return own, [metrics for *_, metrics in found], [{*judged.notes[0].split(": ")[-1]} for _, judged, _ in found]


@pytest.mark.slow
def test_ranks_draw_what_one_process_draws():
    (alone, *said), ranks = drawn(), on_ranks(drawn, 2)
    assert all(told == said for _, *told in ranks)
    for step, one in enumerate(alone):
        assert sorted(one) == sorted(x for own, *_ in ranks for x in own[step])
        assert not {x[2] for x in ranks[0][0][step]} & {x[2] for x in ranks[1][0][step]}  # no group is divided


def test_a_killed_run_resumes_bit_identically(tmp_path):
    again, whole = stopped_and_whole(tmp_path, 2, some_a, PROMPTS, **GIVEN, redraw=1, retire=0.2, steps=3)
    assert same(again, whole) and told(whole)[1]["rollout/retired"] > 0
    steps = sum(m["rollout/redrawn"] > 0 for m in told(whole))
    assert (tmp_path / "cut/log.txt").read_text(encoding="utf-8").count("redraw: ") == steps > 0


def test_prompts_that_are_solved_come_no_more():
    """a, b, c and d are solved in the first pass; a step needs three, so at most five of the eight are retired."""
    seen = []

    def reward(rollouts):
        seen.extend(r.task.id for r in rollouts[::2])
        return [0.9 if r.task.id in "abcd" else 0.5 for r in rollouts]

    run, train = parts(reward), TrainOptions(batch=6, samples=2, retire=0.9)
    counts = [run.play_and_score(train)[2]["rollout/retired"] for _ in range(8)]
    assert counts[-1] == 4 and counts == sorted(counts)
    assert sorted(seen[:8]) == PROMPTS and not {*seen[9:]} & {*"abcd"}
    other = Order(len(TASKS))
    other.load_state_dict(run.order.state_dict())
    assert other.take(9) == run.order.take(9) and "retired" not in Order(8).state_dict()
    everything = parts(lambda rollouts: [1.0] * len(rollouts))
    assert [everything.play_and_score(train)[2]["rollout/retired"] for _ in range(5)] == [3, 5, 5, 5, 5]


def test_dapo_draws_again_and_grpo_does_not():
    given = {"tasks": PROMPTS, "reward": count_a}
    assert [configure({**given, "algorithm": name, "samples": 2}).train.redraw for name in ("dapo", "grpo")] == [4, 0]
