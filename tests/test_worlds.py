"""Worlds: a failure costs its episode, answers are checked, a context may be outgrown, a turn may be left untrained."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import hostile_worlds
import numpy as np
import pytest
import torch
from cases import cases, slow, slow_but
from hostile_worlds import Hostile, Letters
from isolation import STRONG, WEAK, marked_processes
from page_commands import snippets
from toys import letters, lm, on_disk
from worlds import FAILING, HOSTILE, LAKE, SMALL, TASKS, Turns, content, linux

from operant import Learner, OperantError, Policy, Rollout, Step, Task, Turn, ValueOptions, check_env, train
from operant.envs import ENVS, Extract
from operant.envs.functions import FunctionEnv
from operant.envs.http import Http, serve
from operant.envs.isolated import IsolatedEnv, WorkerEnv
from operant.objectives.advantages import with_gae
from operant.rewards import judge
from operant.rollouts import answers
from operant.rollouts.collate import collate
from operant.rollouts.play import play
from operant.sampling import TokenCount
from operant.sandbox.pool import Response
from operant.training.scoring import bootstrap_prompts, with_bootstraps

# --- failures ---------------------------------------------------------------------------------------------------------
FAULTS = [(STRONG, *case.values) for case in FAILING]
FAULTS += [(WEAK, "timeout", fault) for fault in ("hangs", "hangs_with_a_server", "reset_hangs")]
USUAL = ("raises", "sends_an_object", "fails_by_itself", "exits", "reset_exits")


@linux
@pytest.mark.parametrize(("level", "end", "fault"), slow_but([row for row in FAULTS if row[2] in USUAL], FAULTS))
def test_an_isolated_world_that_fails_costs_its_episode_alone(level, end, fault, kept, mark):
    right = play(TASKS, env=Letters(), **kept)
    limits = {"timeout": 2.0 if end == "timeout" else 20.0, "memory_gb": 2.0, "level": level}
    env = IsolatedEnv(HOSTILE, {"fault": fault}, isolation=limits)
    for _ in range(2 if fault == "exits" else 1):  # and the next step is not harmed by it
        found = play(TASKS, env=env, **kept)
        assert [r.end for r in found] == ["world", "world", "world", end, "world"], [r.info for r in found]
        assert [content(r) for r in found if r != found[3]] == [content(r) for r in right if r != right[3]]
        turns = 0 if fault.startswith("reset_") else 2
        assert found[3].failed and len(found[3].turns) == turns and found[3].info["failure"]
        assert [t.action for t in found[3].turns] == [t.action for t in right[3].turns[:turns]]
    assert env.level.startswith(level)
    env.close()
    assert marked_processes(mark, patience=1.0) == []


@linux
def test_a_world_that_dies_between_two_calls_has_crashed(mark):
    env = IsolatedEnv(HOSTILE, {"fault": "reset_dies_after_its_answer"})
    assert not any(first.failed for first in env.reset(dict(enumerate(TASKS))).values())
    while env._pool_of[3].workers[0].process.ended is None:
        env._pool_of[3].workers[0].receive()
    assert [env.step({slot: "up"})[slot].failed for slot in (2, 3, 4)] == [None, "crashed", None]
    env.close()
    assert marked_processes(mark, patience=1.0) == []


def test_a_failed_episode_is_not_judged_and_not_trained_on():
    learner = Learner(lm(vocab=40, spread=0.1), tokenizer=letters(), env=Hostile("fails_by_itself"), max_tokens=3)
    rollouts, seen = learner.play(TASKS), []
    two = lambda given: [float(len(seen.append(r.task.id) or "ab")) for r in given]  # noqa: E731
    judged = judge(two, rollouts, "two", pays=True)
    assert seen == ["t/0", "t/1", "t/2", "t/4"] and judged.scores == [2.0, 2.0, 2.0, None, 2.0]
    assert judged.parts["two"][3] is judged.parts["world"][3] is None
    assert judged.notes == ["raised: 1 of 5 episodes left out: the world has lost its server"]
    for scores in (judged.scores, [1.0] * 5):  # also where a loop of one's own gives it a score
        metrics = learner.step(rollouts, scores)
        assert metrics["rollout/world_raised"] == 1 and metrics["rollout/count"] == 4
        assert metrics["reward/abstained"] == pytest.approx(0.2)
    late = replace(rollouts[3], end="timeout")
    metrics = learner.step([*rollouts, late, late], [1.0] * 7)
    assert (metrics["rollout/world_raised"], metrics["rollout/world_timeout"], metrics["rollout/count"]) == (1, 2, 4)
    with pytest.raises(OperantError, match=r"no reply is left.*their world failed \(1 episodes"):
        learner.step(rollouts[3:4], [0.0])


class Breaks(Letters):
    """Raises a bare exception in the second step of the run."""

    def reset(self, tasks):
        self.resets = getattr(self, "resets", 0) + 1
        return super().reset(tasks)

    def step(self, replies):
        if self.resets == 2:
            raise KeyError("no such room")
        return super().step(replies)


def test_a_world_that_raises_ends_the_run_with_a_checkpoint(tmp_path):
    where = r"world 'Breaks': step raised KeyError: 'no such room' \(test_worlds.py, line \d+\) for slot 0 \(task 't/"
    with pytest.raises(OperantError, match=where + r".*and 1 more; fix the world, or let it answer Step\(failed="):
        train(lm(vocab=40), TASKS, tokenizer=letters(), env=Breaks(), out=tmp_path / "run", **SMALL)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*")] == ["step-00001"]


@linux
@cases(
    (lambda: os._exit(0), r"os._exit\(0\)"),
    (lambda: os.abort(), r"os.abort\(\)"),
    (lambda: os.kill(os.getpid(), signal.SIGKILL), r"os.kill\(\d+, (9|Signals.SIGKILL)\)"),
    (lambda: os.kill(-os.getpgrp(), signal.SIGUSR1), r"os.kill\(-\d+, (10|Signals.SIGUSR1)\)"),
    (lambda: os.execv("/bin/true", ["true"]), r"os.execv\(/bin/true, \['true'\]\)"),
    (lambda: os.execlp("true", "true"), r"os.execv\(.*true.*\)"),
)
def test_a_world_that_ends_the_process_is_a_sentence(end, called):
    class Quits:
        def reset(self, tasks):
            if not (child := os.fork()):
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            return {slot: Step("go on") for slot in tasks}

        def step(self, replies):
            end()

    usual, tasks = os._exit, {0: Task("t", "")}
    answers.reset(Quits(), tasks)
    with pytest.raises(OperantError, match=rf"world 'Quits' called {called} \(test_worlds.py, line \d+\).*workers:"):
        answers.step(Quits(), {0: "a"}, tasks)
    assert os._exit is usual
    with pytest.raises(OperantError, match=rf"reward 'Quits' called {called} \(test_worlds.py.*isolated: before"):
        judge(lambda rollouts: end(), [Rollout(tasks[0], 0, [Turn([1], [2])], ["a"])], "Quits")


def test_calls_that_overlap_in_threads_leave_nothing_behind():
    usual = {name: getattr(os, name) for name in answers.USUAL}
    first, second = (answers.heard(f"reward {name!r}", "fix it") for name in "ab")
    with ThreadPoolExecutor(1) as other:
        first.__enter__()
        other.submit(second.__enter__).result()
        first.__exit__(None, None, None)
        with pytest.raises(OperantError, match=r"reward 'b' called os\._exit\(0\)"):
            other.submit(lambda: os._exit(0)).result()
        other.submit(second.__exit__, None, None, None).result()
    assert {name: getattr(os, name) for name in usual} == usual


def test_a_run_logs_what_failed_and_leaves_no_process(tmp_path, mark):
    env = IsolatedEnv(HOSTILE, {"fault": "exits"})
    given = {"tokenizer": letters(), "env": env, "isolation.timeout": 30.0, "batch": 5, "evaluate": TASKS[2:4]}
    given |= {"steps": 1}
    run = train(lm(vocab=40, spread=0.1), TASKS, out=tmp_path / "run", **SMALL | given)
    assert [m["rollout/world_crashed"] for m in run.metrics] == [1]
    assert run.learner.env._limits["timeout"] == 30.0 and [s is None for s in run.before.scores] == [False, True]
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert "crashed: 1 of 5 episodes left out: the world ended with exit status 3" in log
    assert "isolation of world 'Hostile': " in log and marked_processes(mark, patience=1.0) == []


def begun(form):
    env = form("hostile_worlds:Fails", isolation={"on_error": "stop"})
    return env.reset(dict(enumerate(TASKS[:2]))) and env


@cases(
    (lambda: IsolatedEnv("no_such.py:World"), "there is no file 'no_such.py'"),
    (lambda: IsolatedEnv(lambda: Letters()), "no other process can find <lambda>"),
    (lambda: IsolatedEnv(HOSTILE, isolation={"timeout": 0}), "timeout=0 for world 'Hostile': it must be a number"),
    (lambda: IsolatedEnv(HOSTILE, isolation={"each": True}), "isolation.each does not apply to a world"),
    (lambda: IsolatedEnv(HOSTILE, workers=0), "workers=0 for world 'Hostile': it must be at least 1"),
    (lambda: IsolatedEnv(HOSTILE, {"colour": 1}).check(), r"options {'colour': 1} raised TypeError.*'colour'"),
    (lambda: IsolatedEnv("hostile_worlds:Lettres").check(), "has no 'Lettres'; did you mean 'Letters'"),
    (lambda: begun(IsolatedEnv).on_leave([0, 1]), "^world 'Fails': on_leave raised KeyError: 'no door'"),
    (lambda: begun(WorkerEnv).on_leave([0, 1]), "^world 'Fails': on_leave raised KeyError: 'no door'"),
    (lambda: begun(WorkerEnv).step({0: "a"}), "world 'Fails' failed: Fails.step answered for an episode with reward"),
    (lambda: begun(WorkerEnv).measure(TokenCount(letters()), 9), "Fails' with options {} raised KeyError: 'no door'"),
    (lambda: IsolatedEnv("operant.apps.agents.tools:ToolWorld").check(), "^world 'ToolWorld' reads tokens, which no w"),
)
def test_an_isolated_world_that_cannot_be_made_is_refused(make, error):
    with pytest.raises(OperantError, match=error):
        make()


def test_a_turn_has_the_key_of_the_state_that_it_replies_to(kept):
    class Keyed(Letters):
        most = 2  # it plays two at a time

        def reset(self, tasks):
            assert len(tasks) <= 2
            return {slot: replace(first, key="begun") for slot, first in super().reset(tasks).items()}

        def answer(self, slot, reply):
            return replace(super().answer(slot, reply), key=f"after {self.turns[slot]}")

    narrow, wide = (play(TASKS, env=env, **kept) for env in (Keyed(), Letters()))
    assert [content(r) for r in narrow] == [content(r) for r in wide]
    for rollout in narrow:
        assert [turn.key for turn in rollout.turns] == ["begun", "after 1", "after 2"]


@cases(("on_timeout", Response("timeout", None, "is late"), "timeout"), ("on_error", Response("error"), "crashed"))
def test_late_and_failed_episodes_are_dropped_or_stop_the_run(stops, response, failed):
    assert IsolatedEnv(HOSTILE)._read(response, None).failed == failed
    with pytest.raises(OperantError, match=r"world 'Hostile' .*; fix it, or let such episodes be dropped"):
        IsolatedEnv(HOSTILE, isolation={stops: "stop"})._read(response, None)


# --- answers ----------------------------------------------------------------------------------------------------------
class Scripted:
    """Answers with what it was made with."""

    def __init__(self, first=None, later=None):
        self.first, self.later = first, later

    def reset(self, tasks):
        return {slot: Step() for slot in tasks} if self.first is None else self.first

    def step(self, replies):
        return dict.fromkeys(replies, self.later) if isinstance(self.later, Step) else self.later


@cases(
    ({"first": [Step()]}, r"reset returned \[Step.*; it must return a dict from slot to Step"),
    ({"first": {0: Step()}}, r"called with slots \[0, 1\], and it has not answered for slot 1 \(task 't/1'\)"),
    ({"later": {0: Step(), 1: Step(), 7: Step()}}, r"it answered for slots \[7\], which it was not asked about"),
    ({"later": {0: Step(), "1": Step()}}, r"not answered for slot 1 .* and it answered for slots \['1'\]"),
    ({"later": {0: Step(), 1: "on"}}, r"step answered for slot 1 \(task 't/1'\) with 'on'; it must be an operant.Step"),
    ({"later": {0: Step(text=["on"]), 1: Step()}}, r"slot 0 .* with text=\['on'\]; it must be a str"),
    ({"later": {0: Step(reward="1"), 1: Step()}}, "with reward='1'; it must be a finite number"),
    ({"later": {0: Step(), 1: Step(reward=float("nan"))}}, "with reward=nan; it must be a finite number"),
    ({"later": {0: Step(), 1: Step(reward=10**400)}}, "with reward=1000.*; it must be a finite number"),
    ({"first": {0: Step("\ud800"), 1: Step()}}, "with text='.ud800', which holds half a surrogate pair"),
    ({"later": {0: Step(terminated="no"), 1: Step()}}, "with terminated='no'; it must be True or False"),
    ({"later": {0: Step(options=[]), 1: Step()}}, r"with options=\[\]; it must be a list of one text or more"),
    ({"later": {0: Step(options=["up", ""]), 1: Step()}}, "with options=.*none of them empty"),
    ({"later": {0: Step(failed="oops"), 1: Step()}}, "with failed='oops'; it must be one of .*'crashed'"),
    ({"later": {0: Step(at=0), 1: Step()}}, "goes on from an earlier turn: it must have branches = True"),
    ({"later": {0: Step(at=-1), 1: Step()}}, "with at=-1; it must be the number of a turn, or None"),
    ({"first": {0: Step(), 1: Step(terminated=True)}}, r"reset ended slot 1 \(task 't/1'\) before any reply"),
    ({"later": Step("on")}, "has not ended .*after 9 turns.*terminated=True"),
)
def test_a_wrong_answer_is_refused_in_play_and_by_check_env(answers, error, kept):
    with pytest.raises(OperantError, match="Scripted.*" + error):
        play(TASKS[:2], env=Scripted(**answers), max_turns=9, **kept)
    with pytest.raises(OperantError, match="Scripted.*" + error):
        seeds = range(20)  # a part of the live episodes is stepped at a time, so not every seed asks about both
        [check_env(Scripted(**answers), TASKS[:2], max_turns=9, seed=s) for s in seeds]


def test_numbers_of_numpy_are_answers(kept):
    later = {i: Step(reward=np.float32(0.5), terminated=np.bool_(True)) for i in range(2)}
    assert [r.paid for r in play(TASKS[:2], env=Scripted(later=later), **kept)] == [0.5, 0.5]
    with pytest.raises(OperantError, match="the policy has no tokenizer for 'on': give one"):
        play([Task("t", [3])], env=Scripted(later=Step("on")), **kept | {"tokenizer": None})


PAGE = snippets("docs/worlds.md")


@pytest.mark.slow
def test_the_snippets_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guess.py").write_text(PAGE[0], encoding="utf-8")
    on_disk(tmp_path / "model", lm("llama", 40, spread=0.1))
    space, runs = {}, {}
    for snippet in PAGE:
        exec(snippet.replace('"builtin:reviews-lm"', '"model"'), space)
        if "run" in space:
            run = space.pop("run")
            runs[run.path.name] = run
    assert [len(run.metrics) for run in runs.values()] == [2] * 5
    assert list(runs) == ["guess", "function", "http", "isolated-guess", "workers"]
    assert runs["http"].metrics[1]["reward/mean"] == runs["guess"].metrics[1]["reward/mean"]
    assert runs["workers"].learner.env.options == runs["isolated-guess"].learner.env.options == {"guesses": 3}
    for name in ("reward/mean", "rollout/turns", "rollout/outgrown", "loss/total"):
        near = pytest.approx([m[name] for m in runs["isolated-guess"].metrics], abs=1e-4)
        assert [m[name] for m in runs["workers"].metrics] == near


def page_world():
    space = {}
    exec(PAGE[0], space)
    return space["Guess"]()


NEEDS = {
    "feedback": {"reward": "letters:e"},
    "gymnasium": LAKE,
    "program": {"play": lambda task, client: len(client.complete("a", n=2))},
}
ELSEWHERE = ("gem", "jericho", "openenv", "scienceworld", "textarena", "textworld")
"""They need an extra, and a game: tests/test_textworld.py and tests/test_suites.py check them."""
SHIPPED = {name: partial(ENVS.find(name), **NEEDS.get(name, {})) for name in ENVS.built_in if name not in ELSEWHERE}
SHIPPED["http"] = lambda: Http(serve(Letters()).url)
OTHERS = {
    "page": page_world,
    "stateful": hostile_worlds.Draws,
    "function": lambda: FunctionEnv(hostile_worlds.ask),
    "isolated": lambda: IsolatedEnv(HOSTILE, {"fault": "exits"}),
    "isolated rooms": lambda: IsolatedEnv("operant.apps.games.rooms:Rooms", {}),
    "workers with a state": lambda: WorkerEnv(f"{hostile_worlds.__file__}:Draws", workers=2),
}
EVERY = [slow(m, id=n) if n.startswith("isolated") else pytest.param(m, id=n) for n, m in (SHIPPED | OTHERS).items()]


@pytest.mark.parametrize("make", EVERY)
def test_every_world_that_comes_with_operant_passes_the_check(make):
    if make is SHIPPED["gymnasium"]:
        pytest.importorskip("gymnasium")
    env = make()
    own = getattr(env, "games", None)
    target = ["3", "4"] if isinstance(env, Extract) else {"tests": ["f()"]} if make is SHIPPED["programs"] else "3"
    check_env(env, None if own else [Task(f"t/{i}", "12", target=target) for i in range(5)])
    if isinstance(env, IsolatedEnv):
        env.close()


def fails(*_):
    raise KeyError("gone")


@cases(
    ({"measure": fails}, r"measure raised KeyError: 'gone'"),
    ({"games": fails}, r"games\('train'\) raised KeyError: 'gone'"),
    ({"for_evaluation": fails}, r"for_evaluation raised KeyError: 'gone'"),
    ({"waves": "2"}, "waves='2'; it must be a number of at least 1"),
    ({"games": lambda self, split: [Task("\ud800", "1")] * (split == "train")}, "the id holds half a surrogate pair"),
)
def test_a_broken_part_of_a_world_is_a_sentence(parts, error):
    with pytest.raises(OperantError, match=f"world 'Odd': {error}"):
        check_env(type("Odd", (Letters,), parts))  # a class too, as `train` takes one


@cases("on_turns", "on_leave", "step on_leave")
def test_what_a_world_raises_first_is_a_sentence(names, kept):
    world, first = type("Odd", (Letters,), dict.fromkeys(names.split(), fails)), names.split()[0]
    with pytest.raises(OperantError, match=f"world 'Odd': {first} raised KeyError: 'gone'"):
        play(TASKS[:1], env=world(), **kept)


def test_the_check_takes_a_function_and_says_what_it_played(capsys):
    def once(task):
        yield task.prompt
        yield "more", -0.5
        return 2.0

    check_env(once, TASKS[:2], replies=["ab"])
    assert capsys.readouterr().out == "world 'once' is fine: 2 episodes, 4 turns, rewards of -0.5 to 2\n"

    def gym(task):
        yield "go"
        return Step(done=True)

    with pytest.raises(OperantError, match=r"'done' .*\(an episode ends by terminated=True\)"):
        check_env(gym, TASKS[:2])


# --- context and credit -----------------------------------------------------------------------------------------------
FAR = Step("ab" * 40, fresh=True, reward=1.0)
"""A prompt that no toy's context holds."""


class Long(Turns):
    """Pays 1 for each reply and appends a text of 12 tokens, for ever, or answers with another step."""

    first = Step("go on")

    def __init__(self, options=None, then=None):
        self.then, self.left = then or Step("abcdefghijkl", reward=1.0, options=options), []

    def on_leave(self, slots):
        self.left.append([*slots])

    def answer(self, slot, reply):
        return self.then


@cases({}, {"then": FAR}, {"options": ["u", "go on up"]}, ids=str)
def test_an_episode_that_outgrows_the_context_is_bootstrapped(more):
    learner = Learner(lm("llama", 40, spread=0.3), tokenizer=letters(), env=Long(**more), max_tokens=3)
    rollouts = learner.play(TASKS[:3])
    *outgrown, at_the_end = learner.env.left
    assert at_the_end == [0, 1, 2] and sorted(slot for left in outgrown for slot in left) == [0, 1, 2]
    for rollout in rollouts:
        last = rollout.turns[-1]
        whole = last.prompt + last.action + letters()("abcdefghijkl", add_special_tokens=False)["input_ids"]
        whole = letters()(FAR.text)["input_ids"] if "then" in more else whole
        assert rollout.end == "outgrown" and all(t.reward == 1.0 for t in rollout.turns)
        # A context of 64, of which a reply needs 3, and the longest option with its end as many as it has.
        room = 64 - (1 + len(letters()("go on up", add_special_tokens=False)["input_ids"]) if "options" in more else 3)
        assert len(whole) > room >= len(last.prompt) and rollout.following == whole[:63]
        assert len(rollout.turns) == (1 if "then" in more else 4) or "options" in more
    learner.options["advantage"] |= {"gamma": 0.9, "turn_gamma": 0.5, "lam": 1.0, "whiten_scope": "none"}
    metrics = learner.step(rollouts, [0.0] * 3)
    assert metrics["rollout/outgrown"] == 3 and metrics["rollout/ended_cut"] == 0
    policy = Policy(lm("llama", 40, spread=0.3), letters(), value=ValueOptions(init="normal"))
    batch = with_bootstraps(collate(rollouts, [0.0] * 3), bootstrap_prompts(rollouts), policy)
    with torch.no_grad():
        states = policy.model.base_model(torch.tensor([rollouts[0].following])).last_hidden_state[0, -1]
        assert float(batch.bootstrap[0]) == pytest.approx(float(policy.value_head(states)), abs=1e-4)


def test_a_world_is_left_by_the_episodes_of_this_rank(kept):
    env = Long(then=Step(terminated=True))
    play(TASKS, env=env, part=[3, 1], **kept)
    assert [slot for left in env.left for slot in left] == [3, 1]


def test_a_first_prompt_that_does_not_fit_names_its_task():
    learner = Learner(lm("llama", 40), tokenizer=letters(), env=type("Far", (Long,), {"first": FAR})(), max_tokens=3)
    with pytest.raises(OperantError, match="the first prompt of task 't/0' has 80 tokens, and with 3 of the"):
        learner.play(TASKS[:1])


D = 0.9 * 0.5
"""The discount between turns: gamma 0.9, turn_gamma 0.5."""


def test_a_choice_before_an_untrained_turn_is_discounted_once():
    choice = Turn([4], [6, 7], [-1.0], [0.5], options=[[5], [6, 7]], chosen=1, reward=1.0)
    skipped = Turn([4, 6, 7, 30], [9], [-1.0], [0.5], reward=4.0, trained=False)
    after = Turn([4, 6, 7, 30, 9, 30], [8], [-1.0], [0.5], reward=2.0)
    batch = collate([Rollout(Task("t", "x"), 0, [choice, skipped, after], [""] * 3, "world")], [0.0], turn_discount=D)
    credited = with_gae(batch, gamma=0.9, turn_gamma=0.5, lam=1.0, whiten_scope="none")
    assert credited.returns[batch.actions].tolist() == pytest.approx([1 + D * 4 + D**2 * 2, 2.0], abs=1e-6)
    assert batch.skipped.tolist() == [[0, 1, 0, 0, 0, 0, 0]]


class Helps(Turns):
    """The first and the third of four turns are the world's own: they are played and not trained on."""

    first = Step()

    def answer(self, slot, reply):
        n = self.turn[slot]
        return Step(" go.", reward=float(n), terminated=n == 4, trained=n in (2, 4))


def test_untrained_turns_have_context_and_no_gradient_or_kl():
    options = {"gamma": 0.9, "turn_gamma": 0.5, "lam": 1.0, "max_tokens": 3, "optimizer.lr": 0.0}
    reference = Policy(lm("llama", 40, seed=1))
    learner = Learner(lm("llama", 40), tokenizer=letters(), reference=reference, env=Helps(), **options)
    rollouts = learner.play(TASKS)
    metrics, batch = learner.step(rollouts, [0.0] * 5), learner.last_step.batch
    assert len(batch) == 5 and sorted(set(batch.turns[batch.actions].tolist())) == [1, 3]
    assert metrics["rollout/untrained"] == 10 and metrics["rollout/unpaid"] == 5 and metrics["rollout/turns"] == 4
    assert metrics["reward/mean"] == 1 + 2 + 3 + 4 and metrics["rollout/logprob_gap"] < 1e-4
    assert not batch.kl[~batch.actions].any() and not batch.advantages[~batch.actions].any()
    paid = (batch.rewards + learner.kl.coef * batch.kl) * batch.actions
    for row in range(5):
        assert [paid[row][batch.turns[row] == n][-1].item() for n in (1, 3)] == pytest.approx([2 + D * 3, 4], abs=1e-5)
    untrained = [turn for turn in rollouts[0].turns if not turn.trained]
    metrics = learner.step([*rollouts, Rollout(rollouts[0].task, 9, untrained, rollouts[0].texts[:2])], [0.0] * 6)
    assert metrics["rollout/count"] == 5 and metrics["rollout/dropped"] == pytest.approx(1 / 6)
