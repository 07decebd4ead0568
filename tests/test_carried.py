"""Replies that are carried over (`--partial-rollout-tokens`): pieces make whole replies, nothing is
lost, and the log-probs are those of the weights that drew each token."""

import copy
from contextlib import nullcontext
from itertools import chain
from typing import ClassVar

import pytest
import torch
from canaries import end_of_run
from cases import cases
from small_runs import TASKS, count_a, cut, model, options, same, stopped_and_whole, told
from toys import bare_logprobs, letters, lm
from worlds import Turns

from operant import Completion, OperantError, Policy, Sampling, Task, train
from operant.engines.native.engine import NativeEngine
from operant.rollouts.carried import PartialGroup, continue_replies, new_groups
from operant.runs.scored_rollouts import demonstration_rollouts

GIVEN = {"partial_rollout_tokens": 3, "steps": 6}


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
@cases(
    {"stop_tokens": (2,), "min_tokens": 5},
    {"stop_tokens": (2,), "top_k": 4, "truncation": "stored"},
    {"stop_strings": tuple("aeiou"), "min_tokens": 4},
    ids=["least", "top-k", "strings"],
)
def test_pieces_of_any_lengths_make_the_reply_of_generate(more, kind):
    """Also where another piece has begun a stop string, or has not reached the least length."""
    engine = NativeEngine(Policy(lm(kind, len(letters())), letters()), batch=3)
    sampling = Sampling(max_tokens=12, **more)
    prompts, keys = [[5, 6, 7], [8, 9], [5, 6, 7], [11]], [1, 2, 3, 4]
    whole, live = engine.generate(prompts, sampling, keys), [0, 1, 2, 3]
    ids, logprobs, allowed = [[] for _ in prompts], [[] for _ in prompts], [[] for _ in prompts]
    while live:
        few = [2 + i for i in live]
        asked = ([prompts[i] for i in live], [ids[i] for i in live], few, sampling, [keys[i] for i in live])
        for i, piece in zip(list(live), engine.generate_more(*asked), strict=True):
            assert 1 <= len(piece.action) <= 2 + i
            ids[i], logprobs[i] = ids[i] + piece.action, logprobs[i] + piece.logprobs
            allowed[i] += map(list, piece.allowed or ())
            if piece.end == "stop" or len(ids[i]) == 12:
                assert piece.end == whole[i].end
                live.remove(i)
    for i, reply in enumerate(whole):
        assert ids[i] == reply.action and logprobs[i] == pytest.approx(reply.logprobs, abs=2e-5)
        assert allowed[i] == [list(kept) for kept in reply.allowed or ()]


class Recorded(NativeEngine):
    """Keeps the model of each version."""

    models: ClassVar = {}

    def generate_more(self, prompts, begun, more, sampling, keys):
        self.models.setdefault(self.version, copy.deepcopy(self.policy.model))
        return super().generate_more(prompts, begun, more, sampling, keys)


def counted(seen):
    def judge(rollouts):
        seen.append(rollouts)
        return count_a(rollouts)

    return judge


def test_each_token_has_the_log_prob_of_the_weights_that_drew_it(tmp_path, monkeypatch):
    """The version that fits a token best never falls along a reply, begins with the oldest, and fits to 1e-5."""
    monkeypatch.setattr(Recorded, "models", {})
    seen, changed = [], 0
    train(model(), TASKS, counted(seen), out=tmp_path / "run", **options(**GIVEN, engine=Recorded, max_tokens=9))
    for rollout in chain(*seen):
        (turn,) = rollout.turns
        drawn = [bare_logprobs(Recorded.models[v], turn.prompt, turn.action) for v in range(GIVEN["steps"])]
        gaps = (torch.stack(drawn) - torch.tensor(turn.logprobs)).abs()
        best = gaps.argmin(0).tolist()
        assert gaps.min(0).values.max() < 1e-5 and best == sorted(best) and best[0] == turn.version
        changed += best[0] != best[-1]
    assert changed >= 4  # several replies have tokens of several versions


class Script:
    """An engine whose replies to the prompt [n] have n tokens: their places. Each call is a version."""

    def __init__(self):
        self.keys = []

    def generate_more(self, prompts, begun, more, sampling, keys):
        version, pieces = len(self.keys), []
        self.keys.append(keys)
        for (n,), ids, most in zip(prompts, begun, more, strict=True):
            at = range(len(ids), min(len(ids) + most, n, sampling.max_tokens))
            numbers, end = [version + place / 10 for place in at], "stop" if at.stop == n else "length"
            pieces.append(Completion([*at], numbers, numbers, end, version, [[place, n] for place in at]))
        return pieces


def test_groups_that_were_begun_first_end_first():
    """Three steps of three tokens, with the state of a checkpoint between them; some tasks are begun twice."""
    engine, sampling = Script(), Sampling(max_tokens=7, stop_tokens=(2,))
    lengths, told, groups = [2, 7, 1, 3, 9], [], []

    def attempts(tasks):
        return [Task(f"t/{i}", [lengths[i]]) for i in tasks for _ in range(2)]

    for step, (begun, count) in enumerate([([0, 1, 2, 3, 4], 2), ([2, 0, 2], 2), ([], 4)]):
        groups += new_groups(step, begun)
        known = {"attempts": attempts, "engine": engine, "tokenizer": None, "sampling": sampling, "seed": 0}
        rollouts, done, groups = continue_replies(groups, count, 3, **known)
        told.append([(group.task, group.step, group.first) for group in done])
        expected = [(f"t/{done[place // 2].task}", place // 2, place) for place in range(2 * count)]
        assert [(r.task.id, r.group, r.place) for r in rollouts] == expected
        for rollout, group in zip(rollouts, [group for group in done for _ in range(2)], strict=True):
            (turn,), n = rollout.turns, min(lengths[group.task], 7)
            numbers = [group.step + place // 3 + place / 10 for place in range(n)]
            assert (turn.action, turn.logprobs, turn.values) == ([*range(n)], numbers, numbers)
            assert turn.allowed == [[place, lengths[group.task]] for place in range(n)] and turn.version == group.step
        kept = [PartialGroup.of(group.state_dict()) for group in groups]
        assert kept == groups
        groups = kept
    assert told == [[(0, 0, 0), (2, 0, 0)], [(3, 0, 0), (2, 1, 0)], [(1, 0, 0), (4, 0, 0), (0, 1, 0), (2, 1, 1)]]
    assert not groups
    assert [len(keys) for keys in engine.keys] == [10, 10, 4]  # nothing is asked of replies that have ended
    first, second, third = engine.keys
    assert len({*first, *second}) == 16 and second[:4] == third == first[2:4] + first[8:]


@pytest.mark.parametrize("more", [{}, {"rollouts_ahead": 1}, {"sampling.top_k": 9, "sampling.truncation": "stored"}])
@pytest.mark.slow
def test_a_killed_run_resumes_bit_identically(more, tmp_path):
    again, whole = stopped_and_whole(tmp_path, 3, **GIVEN, **more)
    assert same(again, whole) and whole.config.learner["learner"].importance == "token"
    assert told(whole)[0]["rollout/carried"] == 0 < told(whole)[-1]["rollout/carried"]


def test_a_resume_loses_no_reply_that_has_begun(tmp_path):
    none = {"partial_rollout_tokens": 0}
    cut(tmp_path / "begun", 3, **GIVEN)
    cut(tmp_path / "whole", 3, **GIVEN | none | {"rollouts_ahead": 1})
    for place, new, message in (
        ("begun", none, "partial_rollout_tokens=0 with --resume: the run has 3, and it can have another number, but"),
        ("begun", {"max_tokens": 4}, "max_tokens=4 with --resume: .* replies that have begun were drawn with it"),
        ("begun", {"samples": 2}, "samples=2 with --resume: the run has 1, and so many replies to each prompt have"),
        ("whole", {"partial_rollout_tokens": 3}, "tokens=3 with --resume: the run has 0"),
    ):
        with pytest.raises(OperantError, match=message):
            train(model(), TASKS, count_a, out=tmp_path / place, resume=True, tokenizer=letters(), **new)


def test_a_resume_with_another_batch_has_replies_to_carry_over(tmp_path, monkeypatch):
    """It ends also where steps were planned for the other batch, and then has twice the batch in flight."""
    cut(tmp_path / "run", 2, **GIVEN, rollouts_ahead=1)
    batches, sizes = [], []

    def recorded(groups, *args, **known):
        sizes.append(len(groups))
        assert [group.step for group in groups] == sorted(group.step for group in groups)  # the oldest first
        return continue_replies(groups, *args, **known)

    monkeypatch.setattr("operant.runs.ahead.continue_replies", recorded)
    more = {"batch": 16, "partial_rollout_tokens": 4, "tokenizer": letters()}
    again = train(model(), TASKS, counted(batches), out=tmp_path / "run", resume=True, **more)
    assert [len(batch) for batch in batches[1:]] == [16] * 3 and sizes[-1] == 32
    assert told(again)[-1]["rollout/carried"] > 0


def test_a_step_names_what_an_earlier_step_has_begun(tmp_path):
    """One ahead, the first two steps have the same weights, and the second goes on with replies of the first."""
    run = train(model(), TASKS, count_a, out=tmp_path / "run", **options(**GIVEN, rollouts_ahead=1, fixed_length=True))
    assert [m["rollout/carried"] for m in told(run)] == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("ahead", [0, 1])
def test_demonstrations_are_those_of_the_trained_tasks(ahead, tmp_path, monkeypatch):
    """Also in the first step, which begins twice as many, and later, when older tasks end first."""
    played, given = [], []

    def shown(demonstrations, tasks):
        given.append([task.id for task in tasks])
        return demonstration_rollouts(demonstrations, tasks)

    monkeypatch.setattr("operant.runs.parts.demonstration_rollouts", shown)
    tasks = [Task(f"t/{i}", "abcdef"[i % 6], replies=["ab"]) for i in range(24)]
    more = options(partial_rollout_tokens=2, steps=4, rollouts_ahead=ahead, max_tokens=8, algorithm="coderl", gamma=1)
    train(model(), tasks, counted(played), out=tmp_path / "run", **more)
    assert given == [[r.task.id for r in rollouts] for rollouts in played] and all(len(tasks) == 4 for tasks in given)


def test_several_ranks_are_refused_before_a_model_loads(tmp_path, monkeypatch):
    def launched(minutes):
        for name, found in {"world": lambda: 2, "rank": lambda: 0, "gathered": lambda thing: [thing] * 2}.items():
            monkeypatch.setattr(f"operant.distributed.{name}", found)
        return nullcontext()

    monkeypatch.setattr("operant.distributed.launched", launched)
    monkeypatch.setattr("operant.runs.build.Learner", None)
    with pytest.raises(OperantError, match="partial_rollout_tokens=3 with 2 ranks: their steps would end unequally"):
        train(model(), TASKS, count_a, out=tmp_path / "run", **options(**GIVEN))
    assert not (tmp_path / "run").exists()


class Whole(NativeEngine):
    """An engine that cannot continue a reply."""

    generate_more = property()


@cases(
    ({"engine": Whole}, "partial_rollout_tokens=3 with the engine Whole: it cannot continue a reply; use native"),
    ({"env": Turns()}, "partial_rollout_tokens=3 with the world Turns: it plays more than one reply"),
)
def test_what_cannot_be_carried_leaves_no_folder(given, message, tmp_path):
    with pytest.raises(OperantError, match=message):
        train(model(), TASKS, count_a, out=tmp_path / "run", **options(**GIVEN, **given))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_policy_finds_the_optimum_in_pieces(tmp_path):
    assert end_of_run(tmp_path / "run", seed=1, partial_rollout_tokens=2) > 0.9
