"""Dynamic sampling: which prompts stay by hand, the same on two ranks and after a resume, and what is refused."""

from functools import partial

import pytest
import torch
from rigs import on_ranks
from small_runs import TASKS, count_a, model, options, told, weights
from toys import letters, lm

from operant import OperantError, Policy, Rollout, Task, Turn, steps, train
from operant.data import Order
from operant.rewards import Judged
from operant.runs.config import configure
from operant.runs.dynamic_sampling import play_until_scores_differ
from operant.runs.scored_rollouts import play_and_score
from operant.training.learner import Learner

NAMES = "abcdefgh"


def played(scores, indices, attempts):
    """Two replies to each prompt, with the scores of its task in turn; None abstains."""
    made, found = [], []
    for index in indices:
        for reply in range(2):
            task = Task(NAMES[index], [5])
            place, group, sample = attempts.next(task)
            made.append(Rollout(task, group, [Turn([5], [6])], [f"{sample}"], place=place))
            found.append(scores[task.id][reply])
    return made, Judged(found, {"part": list(found)})


@pytest.mark.parametrize(
    ("alike", "count", "rounds", "kept", "thrown", "left"),
    [
        ("", 3, 4, "abc", "", 0),
        ("b", 3, 4, "acd", "b", 0),
        ("bde", 3, 4, "acf", "bde", 0),
        ("bde", 3, 2, "ace", "bd", 1),
        ("abcd", 2, 1, "cd", "ab", 2),
        ("abcdefgh", 3, 2, "gha", "abcdef", 3),
    ],
)
def test_prompts_are_drawn_until_their_scores_differ(alike, count, rounds, kept, thrown, left):
    """By hand, in the order of the tasks: each round draws as many others as have replies that score alike."""
    scores = {name: (0.3, 0.3) if name in alike else (0.0, 1.0) for name in NAMES}
    order = Order(8, shuffle=False)
    rollouts, judged, drawn = play_until_scores_differ(partial(played, scores), order, count, rounds)
    assert "".join(r.task.id for r in rollouts[::2]) == kept and "".join(drawn.thrown) == thrown
    assert drawn.metrics() == {"redraw/prompts": count + len(thrown), "redraw/alike": left}
    assert order.position == drawn.prompts
    assert judged.scores == judged.parts["part"] == [scores[r.task.id][i % 2] for i, r in enumerate(rollouts)]
    assert len({r.place for r in rollouts}) == 2 * count == 2 * len({r.group for r in rollouts})


def test_one_score_or_rounding_is_no_difference():
    scores = {"a": (0.1 + 0.2, 0.3), "b": (None, 1.0), "c": (None, None), "d": (0.0, 1e-3), "e": (1.0, 2.0)}
    rollouts, _, drawn = play_until_scores_differ(partial(played, scores), Order(5, shuffle=False), 2, 9)
    assert [r.task.id for r in rollouts[::2]] == ["d", "e"] and drawn.thrown == ["a", "b", "c"]


def test_a_task_that_comes_again_has_a_group_of_its_own():
    """Two tasks, of which one never differs: the other comes again, with other random numbers."""
    scores = {"a": (0.0, 0.0), "b": (0.0, 1.0)}
    rollouts, _, _ = play_until_scores_differ(partial(played, scores), Order(2, shuffle=False), 2, 3)
    assert [(r.task.id, r.group, r.texts) for r in rollouts] == [
        ("b", 1, ["0"]),
        ("b", 1, ["1"]),
        ("b", 3, ["2"]),
        ("b", 3, ["3"]),
    ]


# --- ranks ------------------------------------------------------------------------------------------------------------


def learnt(chunks: int = 1) -> dict:
    """Two steps of GRPO, in which the replies to two of five prompts score alike."""
    tasks = [Task(name, [5 + i, 6]) for i, name in enumerate("abcde")]
    base = {"max_tokens": 6, "stop_tokens": (2, 7, 9), "seed": 4, "watch_every": 0, "optimizer.lr": 1e-3}
    learner = Learner(Policy(lm(spread=0.2).double()), algorithm="grpo", reference=Policy(lm(seed=1).double()), **base)
    before, order, found = [p.detach().clone() for p in learner.policy.trainable()], Order(5, shuffle=False), []

    def reward(rollouts):
        return [0.5 if r.task.id in "bd" else sum((3 * t + i) % 7 for i, t in enumerate(r.ids)) / 7 for r in rollouts]

    def play(indices, attempts):
        listed = [tasks[i] for i in indices for _ in range(2)]
        return play_and_score(learner, listed, reward, samples=2, chunks=chunks, attempts=attempts)

    for _ in range(2):
        rollouts, judged, drawn = play_until_scores_differ(play, order, 3, 3)
        learner.learn(rollouts, judged.scores)
        found.append((drawn.prompts, drawn.thrown, order.position))
    moved = [(a.detach() - b).flatten() for a, b in zip(learner.policy.trainable(), before, strict=True)]
    return {"found": found, "moved": torch.cat(moved)}


def on_a_rank(number: int, world: int) -> dict:
    return learnt()


def test_two_ranks_and_chunks_draw_and_learn_as_one_process():
    right = learnt()
    assert right["found"][0][1] == ["b", "d"]
    for own in [learnt(chunks=2), *on_ranks(on_a_rank, 2, deadline=300)]:
        assert own["found"] == right["found"]
        torch.testing.assert_close(own["moved"], right["moved"], rtol=1e-6, atol=1e-9)


# --- runs -------------------------------------------------------------------------------------------------------------

GIVEN = {"algorithm": "dapo", "samples": 2, "redraw": 2, "loss.clip": 0.2}


def test_a_resumed_run_draws_as_one_that_was_not_cut(tmp_path):
    whole = train(model(), TASKS, count_a, out=tmp_path / "whole", **options(**GIVEN))
    for metrics in steps(model(), TASKS, count_a, out=tmp_path / "cut", **options(**GIVEN)):
        if metrics["step"] == 2:
            break
    cut = train(model(), TASKS, count_a, out=tmp_path / "cut", resume=True, tokenizer=letters())
    assert told(cut) == told(whole) and max(m["redraw/prompts"] for m in told(whole)) > 2
    assert all(torch.equal(weights(cut)[name], value) for name, value in weights(whole).items())
    lines = (whole.path / "log.txt").read_text(encoding="utf-8")
    drawn = sum(m["redraw/prompts"] for m in told(whole))
    thrown = [line.partition("scored alike: ")[2].split(", ") for line in lines.splitlines() if "scored alike" in line]
    assert sum(map(len, thrown)) == drawn - 4 * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"algorithm": "ppo", "redraw": 1}, "redraw=1 with samples=1: a reply is compared with others"),
        ({"algorithm": "sft", "redraw": 1}, "redraw=1 with algorithm=sft: it learns from given replies"),
        ({"algorithm": "dapo", "rollouts_ahead": 1}, "redraw=4 with rollouts_ahead=1: .*set redraw=0"),
        ({"algorithm": "grpo", "redraw": 1, "partial_rollout_tokens": 2}, "redraw=1 with partial_rollout_tokens=2"),
        ({"algorithm": "grpo", "redraw": -1}, "redraw=-1: it must be at least 0"),
    ],
)
def test_what_cannot_draw_again_is_refused(given, message):
    with pytest.raises(OperantError, match=message):
        configure({"tasks": TASKS, "reward": count_a, "batch": 8, **given})
