"""Replies judged in chunks beside generation: the numbers are those of one call after it."""

import threading

import pytest
from cases import cases
from toys import letters, lm

from operant import Judgement, Learner, OperantError, Task, train
from operant.rewards import judge, resolve
from operant.runs.scored_rollouts import chunk_slices, join_judgements, play_and_score

TASKS = [Task(f"t/{i}", text) for i, text in enumerate(["ab", "cde", "fg", "h", "ijk", "ab", "lm"])]
TWICE = [TASKS[0], TASKS[1], TASKS[2], TASKS[1], TASKS[0], TASKS[0]]
"""Tasks that come again in another chunk: each time another sample of the same task."""


def learner() -> Learner:
    model = lm("gpt2", vocab=len(letters()), spread=0.3)
    return Learner(model, tokenizer=letters(), **{"max_tokens": 8, "watch_every": 0})


def vowels(rollouts):
    return [{"vowels": sum(r.reply.count(v) for v in "aeiou") / 8, "length": len(r.ids) / 8} for r in rollouts]


@cases((2, TASKS[:6]), (3, TWICE))
def test_rewards_of_chunks_are_those_of_one_call(chunks, tasks):
    whole, judged = play_and_score(learner(), tasks, vowels)
    parts, also = play_and_score(learner(), tasks, vowels, chunks=chunks)
    for a, b in zip(whole, parts, strict=True):
        assert (a.task.id, a.group, a.ids, a.reply) == (b.task.id, b.group, b.ids, b.reply)
        assert a.turns[0].logprobs == pytest.approx(b.turns[0].logprobs, abs=1e-5)
    assert judged == also


def test_a_chunk_is_judged_while_the_next_one_is_generated():
    """The first call waits until the last chunk is being generated, which in one thread it would do for ever."""
    mine, calls, threads, alone = learner(), [], set(), threading.Lock()
    begun = [threading.Event() for _ in range(3)]
    play = mine.play

    def watched(tasks, part, attempts):
        begun[part[0] // 2].set()
        return play(tasks, part=part, attempts=attempts)

    def reward(rollouts):
        calls.append([r.task.id for r in rollouts])
        threads.add(threading.get_ident())
        assert alone.acquire(blocking=False), "two calls at once"
        assert begun[2].wait(timeout=30), "nothing is generated meanwhile"
        alone.release()
        return [1.0] * len(rollouts)

    mine.play = watched
    rollouts, _ = play_and_score(mine, TASKS[:6], reward, chunks=3)
    assert calls == [["t/0", "t/1"], ["t/2", "t/3"], ["t/4", "t/5"]]
    assert len(threads) == 1 and threads != {threading.get_ident()}
    assert [r.task.id for r in rollouts] == [t.id for t in TASKS[:6]]
    assert set(mine.clock.seconds) == {"generate", "reward"}


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_reward_that_fails_says_the_same_and_stops_the_step(chunks):
    def fails(rollouts):
        if any(r.task.id == "t/1" for r in rollouts):
            raise ValueError("no such word")
        return [0.0] * len(rollouts)

    said = r"'fails' raised ValueError: no such word \(test_scored_.*\) while judging task 't/1'"
    with pytest.raises(OperantError, match=said):
        play_and_score(learner(), TASKS[:6], fails, chunks=chunks)
    assert not [t for t in threading.enumerate() if t.name.startswith("reward")]


def test_chunks_are_nearly_equal_and_keep_groups_together(tmp_path):
    assert [len(range(12)[s]) for s in chunk_slices(12, 5, 1)] == [2, 3, 2, 3, 2]
    assert [range(12)[s] for s in chunk_slices(12, 4, 3)] == [range(0, 3), range(3, 6), range(6, 9), range(9, 12)]
    assert [range(8)[s] for s in chunk_slices(8, 2, 2)] == [range(0, 4), range(4, 8)]
    assert [range(3)[s] for s in chunk_slices(3, 8, 1)] == [range(0, 1), range(1, 2), range(2, 3)]
    with pytest.raises(OperantError, match="reward_chunks=4: a step has only 3 prompts; use at most 3"):
        train("./none", TASKS, vowels, out=tmp_path / "x", batch=6, samples=2, reward_chunks=4)


@cases(
    vowels,
    {"letters:a": 1.0, "length:3": 0.5},
    lambda rs: [None] * len(rs),
    lambda rs: [None if r.task.id in ("t/0", "t/1") else {"a": 1.0, "b": 0.5} for r in rs],
    lambda rs: [None if r.task.id in ("t/0", "t/1") else {"a": 1.0, "b": None} for r in rs],
    lambda rs: [Judgement(i % 2, {"a": i}, "odd" * (i % 2), "no" * i) for r in rs for i in [int(r.task.id[2:])]],
)
def test_judgements_of_chunks_are_joined_as_if_said_at_once(reward):
    """Also where a whole chunk is not judged."""
    rollouts, reward = learner().play(TASKS[:6]), resolve(reward)
    assert join_judgements([judge(reward, rollouts[s]) for s in chunk_slices(6, 3, 1)]) == judge(reward, rollouts)
