"""Worlds in worker processes, as functions, behind HTTP and from Gymnasium: the same episodes, and their failures."""

import json
import re
import threading
import time
import zlib
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import hostile_worlds
import pytest
from cases import cases, slow
from hostile_worlds import Draws, Letters, ask
from isolation import marked_processes
from processes import served
from small_runs import told
from toys import letters, lm
from worlds import HOSTILE, LAKE, SMALL, TASKS, content, linux

from operant import Completion, Judgement, OperantError, Rollout, Step, Task, Turn, check_env, train
from operant.envs.functions import FunctionEnv, maker
from operant.envs.http import Http, serve
from operant.envs.isolated import WorkerEnv
from operant.rewards import judge
from operant.rollouts.answers import read_step
from operant.rollouts.play import play
from operant.runs import named_parts
from operant.runs.config import configure
from operant.sandbox.serialise import step_to_plain

HERE = hostile_worlds.__file__
SIX = [Task(f"t/{i}", "x", target="a") for i in range(6)]


# --- workers ----------------------------------------------------------------------------------------------------------
@cases((3, 1), (2, 3))
def test_worlds_in_workers_play_the_same_episodes(workers, waves, kept):
    right = play(SIX, env=Letters(), **kept)
    env = WorkerEnv(f"{HERE}:Letters", workers=workers, waves=waves)
    found = play(SIX, env=env, **kept)
    assert [content(r) for r in found] == [content(r) for r in right]
    assert (found == right) or waves > 1  # smaller batches may change the last bits of log-probs
    assert play(SIX, env=env, part=[5, 2], **kept) == play(SIX, env=Letters(), part=[5, 2], **kept) or waves > 1
    env.close()


def test_what_a_world_says_beside_its_text_crosses_processes():
    step = Step("b", reward=1.0, terminated=True, paid={0: 0.5}, info={"judgement": Judgement(1.0, {"a": 2.0}, "good")})
    made, why = read_step(json.loads(json.dumps(step_to_plain(step))))
    assert why is None and made.paid == {0: 0.5}
    told = judge(None, [Rollout(SIX[0], 0, [Turn([3], [4])], ["b"], info=made.info)], pays=True)
    assert told.parts["world/a"] == [2.0] and told.remark(0)[0] == ("good",)


@linux
@cases(
    ("raised", "raises"),
    ("raised", "reset_raises"),
    ("raised", "sends_an_object"),
    ("crashed", "exits"),
    slow("timeout", "hangs"),
    slow("raised", "fills_memory"),
)
def test_a_failure_costs_an_episode_or_those_of_its_worker(end, fault, kept, mark):
    """Every fault is tried in a worker of its own, in test_worlds.py."""
    right = play(SIX, env=Letters(), **kept)
    limits = {"timeout": 2.0 if end == "timeout" else 20.0, "memory_gb": 2.0}
    env = WorkerEnv(HOSTILE, {"fault": fault}, workers=2, waves=1, isolation=limits)
    alone = end == "raised" and fault not in ("reset_raises", "fills_memory")
    for _ in range(2):  # the second time in a worker that was started again
        found = play(SIX, env=env, **kept)
        beside = "world" if alone else end
        assert [r.end for r in found] == ["world", beside, "world", end, "world", beside], [r.info for r in found]
        lasting = [i for i, r in enumerate(found) if not r.failed]
        assert [content(found[i]) for i in lasting] == [content(right[i]) for i in lasting]
        assert all(r.info["failure"] for r in found if r.failed)
    env.close()
    assert marked_processes(mark, patience=1.0) == []


@pytest.mark.slow
def test_the_state_of_every_worker_survives_crash_and_resume(tmp_path):
    env = WorkerEnv(f"{HERE}:Draws", {"fault": "die"}, workers=2)
    tasks, before = dict(enumerate(SIX[:4])), env.state_dict()
    first = env.reset(tasks)
    assert env.state_dict() != before
    env.load_state_dict(json.loads(json.dumps(before)))
    assert env.state_dict() == before and env.reset(tasks) == first
    after, second = env.state_dict(), env.reset(tasks)
    env.load_state_dict(after)
    assert [s.failed for s in env.step({1: "die", 3: "a", 0: "a"}).values()] == ["crashed", "crashed", None]
    assert env.reset(tasks) == second != first  # the worker that was started again has the state that was loaded
    with pytest.raises(OperantError, match=r"that of 2 workers, and there are 3; set workers=2"):
        WorkerEnv(f"{HERE}:Draws", workers=3).load_state_dict(after)
    env.close()

    def started(out, **more):
        world = {"env": f"workers:{HERE}:Draws", "env.workers": 2, "env.waves": 2, "env.tasks": 4}
        given = {"tokenizer": letters(), "out": tmp_path / out, **SMALL, **world, **more}
        return train(lm(vocab=40, spread=0.1), **given)

    whole, half = started("whole"), started("half", steps=1)
    assert half.parts.tasks == Draws(tasks=4).games("train") and half.parts.held_out == Draws().games("test")
    assert told(started("half", resume=True)) == told(whole)
    assert whole.before is not None and whole.learner.env.waves == 2


def test_a_world_for_evaluation_gets_no_state_of_the_training():
    env = WorkerEnv(f"{HERE}:Measured", workers=1)
    env.state_dict()  # as a checkpoint keeps it
    assert env.for_evaluation().reset({0: SIX[0]})[0].text == Letters().reset({0: SIX[0]})[0].text
    env.close()


def test_mistakes_of_worlds_in_workers_are_sentences(tmp_path):
    (tmp_path / "odd.py").write_text(
        "from hostile_worlds import Draws\nclass Odd(Draws):\n    def state_dict(self): return {'x': object()}\n"
        "class Own(Draws):\n    def __init__(self, workers=1): pass\n",
        encoding="utf-8",
    )
    env = WorkerEnv(f"{tmp_path}/odd.py:Odd", workers=1)
    with pytest.raises(OperantError, match=r"a part of it, is of type object, which cannot be sent"):
        env.state_dict()
    env.close()
    with pytest.raises(OperantError, match=r"its argument 'workers' is an option of workers too; rename"):
        named_parts.found("env", f"workers:{tmp_path}/odd.py:Own")
    with pytest.raises(OperantError, match=r"waves=0 for world 'Odd': it must be at least 1"):
        WorkerEnv(f"{tmp_path}/odd.py:Odd", waves=0)


@pytest.mark.parametrize("form", ["", "workers:"])
def test_a_world_with_tasks_of_its_own_needs_none_from_the_run(form, tmp_path):
    config = configure({"env": f"{form}{HERE}:Draws", "evaluation.metrics": "distinct", "best": "reward/mean"})
    env = named_parts.make("env", config.train.env, {"tasks": 3})
    assert named_parts.sources(config.train, {}, env) == (Draws().games("test"), Draws(tasks=3).games("train"))[::-1]
    with pytest.raises(OperantError, match=r"tasks is missing: pass --tasks.* give the world games\(split\)"):
        configure({"env": f"{form}{HERE}:Letters"})
    if form:
        env.close()


# --- overlap ----------------------------------------------------------------------------------------------------------
class Meets(Letters):
    """Its step waits until the engine generates: only if both work at the same time does either go on."""

    waves = 2

    def __init__(self):
        super().__init__()
        self.stepping, self.generating = threading.Event(), threading.Event()

    def on_turns(self, turns):
        self.heard = threading.current_thread(), [*turns]

    def step(self, replies):
        if not self.stepping.is_set():
            self.stepping.set()
            assert self.generating.wait(20)
        assert self.heard == (threading.current_thread(), [*replies]), "not those of the next wave"
        return super().step(replies)


class Counting:
    """An engine whose second call waits for the world's first step."""

    def __init__(self, env=None, fail: int = 0):
        self.env, self.calls, self.fail = env, [], fail

    def generate(self, prompts, sampling, keys):
        self.calls.append(len(prompts))
        if len(self.calls) == self.fail:
            raise RuntimeError("no memory")
        if len(self.calls) == 2 and self.env:
            assert self.env.stepping.wait(20)
            self.env.generating.set()
        return [Completion([5], [-1.0], None, "stop", 0) for _ in prompts]

    def choose(self, prompts, options, sampling, keys):
        return [(0, Completion(among[0], [-1.0], None, "stop", 0)) for among in options]


def test_the_world_steps_a_wave_while_the_other_is_generated(kept):
    env, threads = Meets(), threading.active_count()
    engine = Counting(env)
    right = play(TASKS, env=Letters(), **kept | {"engine": Counting()})
    assert play(TASKS, env=env, **kept | {"engine": engine}) == right
    assert engine.calls == [3, 2, 3, 2]  # and the third turn is a choice
    with pytest.raises(RuntimeError, match=r"no memory"):
        play(TASKS, env=env, **kept | {"engine": Counting(env, fail=3)})
    assert threading.active_count() == threads


# --- functions --------------------------------------------------------------------------------------------------------
def test_a_generator_function_plays_an_episode(kept):
    env = FunctionEnv(ask, price=2.0)
    assert env.reset({0: SIX[0], 7: SIX[1]}) == {0: Step("x which?"), 7: Step("x which?")}
    assert env.step({7: "b"}) == {7: Step(" no.", reward=-0.5)}
    assert env.step({0: "a", 7: "c"}) == {0: Step(reward=2.0, terminated=True), 7: Step(" no.", reward=-0.5)}
    assert env.step({7: "late"}) == {7: Step("cut.", reward=0.25, truncated=True)}
    assert env.reset({7: SIX[1]}) and env.step({7: "b"}) and env.step({7: "b"})
    assert env.step({7: "b"}) == {7: Step(terminated=True)}
    right = [content(r) for r in play(SIX, env=FunctionEnv(ask, most=2), **kept)]
    for form in ("", "workers:"):
        named = configure({"env": f"{form}{HERE}:ask", "env.most": "2", "tasks": SIX})
        made = named_parts.make("env", named.train.env, named.parts["env"])
        assert [content(r) for r in play(SIX, env=made, **kept)] == right
    made.close()
    failed = FunctionEnv(lambda task: Step(failed="raised") or (yield))
    assert [r.end for r in play(SIX[:1], env=failed, **kept)] == ["raised"]
    with pytest.raises(OperantError, match=r"option 'env.mots' is unknown; did you mean 'env.most'"):
        configure({"env": ask, "env.mots": 2, "tasks": SIX})
    with pytest.raises(OperantError, match="is a partial without reset and step"):
        named_parts.make("env", partial(ask, most=2), {})
    with pytest.raises(OperantError, match="function of a task without yield: an episode yields what the policy reads"):
        maker(lambda task: 1.0)


def greet(task):
    yield task.prompt
    return float(task.prompt == "ab")


def test_a_world_gets_the_text_of_a_prompt_that_a_file_holds(kept, tmp_path):
    (tmp_path / "tasks.csv").write_text("text\nab\n", encoding="utf-8")
    given = {"tokenizer": letters(), **SMALL, "tasks": tmp_path / "tasks.csv", "data": {"text_field": "text"}}
    assert train(lm(vocab=40, spread=0.1), **given, env=greet, out=tmp_path / "run").metrics[-1]["reward/mean"] == 1.0
    task = Task("a", [5, 6])  # what is yielded unchanged keeps its ids, which another split of the text would not have
    (rollout,) = play([task], env=FunctionEnv(greet), **kept)
    assert rollout.turns[0].prompt == [5, 6]


@cases(
    (None, "world 'game' yielded None: yield a text, .text, reward. or a Step"),
    ((1.0, "text"), r"yielded \(1.0, 'text'\): yield a text"),
    ((" a", float("nan")), "with reward=nan"),
    (Step(text=3), "with text=3; it must be a str"),
)
def test_a_function_that_yields_something_else_is_refused(yielded, error, kept):
    def game(task):
        yield yielded

    with pytest.raises(OperantError, match=error):
        play(SIX, env=FunctionEnv(game), **kept)


# --- HTTP -------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_world_behind_http_plays_the_same_episodes(kept, tmp_path):
    right = [content(r) for r in play(SIX, env=Letters(), **kept)]
    server = serve(Letters())
    one, two = Http(server.url), Http(server.url, waves=2)
    for env in (one, two, one):  # two runs with the same slots
        env.reset({0: SIX[4], 1: SIX[5]})
        assert [content(r) for r in play(SIX, env=env, **kept)] == right
    assert one.pays and one.most is None and one.games is None
    with pytest.raises(OperantError, match=f"cannot be served at 127.0.0.1:{server.server_port}: .*another port"):
        serve(Letters(), port=server.server_port)
    server.close()
    games = serve(Draws())
    named = {"env": "http", "env.url": games.url, "env.waves": 2}
    run = train(lm(vocab=40, spread=0.1), tokenizer=letters(), out=tmp_path / "run", **SMALL | named)
    assert run.parts.tasks == Draws().games("train") and len(run.metrics) == 2
    games.close()
    with pytest.raises(OperantError, match=r"cannot be reached: .*refused \(3 tries\); does the server run"):
        train(lm(vocab=40), SIX, tokenizer=letters(), out=tmp_path / "refused", **SMALL | named)


SAID = {
    "text": b"<html>Welcome</html>",
    "slots": b'{"steps": {"0": {}, "7": {}}}',
    "none": b"{}",
    "field": b'{"steps": {"0": {"colour": 1}}}',
    "nan": b'{"steps": {"0": {"reward": NaN}}}',
    "error": b'{"error": "KeyError: no such room"}',
}


class Answers(BaseHTTPRequestHandler):
    """Answers with what the path asks for; each fault of the transport once, then as it should."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body["number"])
        fault, first = self.path.split("/")[1], self.server.seen.count(body["number"]) == 1
        if fault == "drops" and first:
            return self.connection.close()
        if fault == "busy" and first:
            return self.send_error(503)
        time.sleep(0.2 * (fault == "sleeps"))
        self.send_response(500 if fault == "error" else 200)
        self.end_headers()
        for _ in range(20 * (fault == "drips")):
            self.wfile.write(b" ")
            self.wfile.flush()
            time.sleep(0.02)
        self.wfile.write(SAID.get(fault, b'{"steps": {"0": {"text": "on"}}}'))

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def hostile_server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.seen, server.daemon_threads = [], True
    with served(server):
        yield server


@cases(
    ("drops", None, ""),
    ("busy", None, ""),
    ("sleeps", "timeout", r"has not answered in 0.1 s \(2 tries\)"),
    ("drips", "timeout", r"has not answered in 0.1 s"),
    ("text", "raised", "answered '<html>Welcome</html>', which is no JSON object; does another program listen"),
    ("none", "raised", r"/step was called with slots \['0'\] and answered for None"),
    ("slots", "raised", r"/step was called with slots \['0'\] and answered for \['0', '7'\]"),
    ("field", "raised", "answered with {'colour': 1}, which are not the fields of a Step"),
    ("nan", "raised", "reward=nan; it must be a finite number"),
    ("error", "raised", "answered with status 500: .*KeyError: no such room"),
)
def test_a_server_that_fails_costs_episodes_with_a_sentence(fault, failed, reason, hostile_server):
    timeout = 0.1 if failed == "timeout" else 20.0
    env = Http(f"http://127.0.0.1:{hostile_server.server_port}/{fault}", timeout=timeout, tries=2)
    step = env.step({0: "two\nlines" + "x" * 10_000})[0]
    assert (step.failed, step.text) == (failed, "" if failed else "on")
    assert re.search(reason, step.info.get("failure", ""))


def test_a_request_that_is_sent_again_steps_nothing():
    world = Letters()
    server = serve(world)
    env = Http(server.url)
    env.reset({0: SIX[0]})
    once = env.step({0: "a"})
    env.number -= 1  # as if the answer had been lost
    assert env.step({0: "a"}) == once and world.turns == {0: 1} and env.step({0: "a"})[0].options == ["up", "go"]
    assert "slot 4 has no episode here; was the server started again?" in env.step({4: "a"})[4].info["failure"]
    fails, world.step = world.step, lambda replies: 1 / 0
    assert "ZeroDivisionError" in (failed := env.step({0: "a"})[0].info["failure"])
    world.step, env.number = fails, env.number - 1
    assert env.step({0: "a"})[0].info["failure"] == failed and world.turns == {0: 2}
    server.close()


# --- Gymnasium --------------------------------------------------------------------------------------------------------
@pytest.fixture
def lake():
    pytest.importorskip("gymnasium")
    from operant.apps.games.gymnasium import COLOURS, Gymnasium

    return partial(Gymnasium, **LAKE), COLOURS


def test_an_episode_is_that_of_gymnasium_itself(lake):
    import gymnasium

    make, colours = lake
    env, task = make(answer="{observation}", prompt="{observation}"), Task("lake/3", "Go!")
    peer = gymnasium.make("FrozenLake-v1", render_mode="ansi")
    peer.reset(seed=zlib.crc32(b"lake/3"))
    steps = [env.reset({5: task})[5]]
    assert steps[0].text == colours.sub("", peer.render()) and steps[0].options == list(LAKE["actions"])
    for move in ["down", "right", "down", "down", "right", "right", "right", "up"] * 20:
        _, reward, terminated, truncated, info = peer.step(LAKE["actions"].index(move))
        step = env.step({5: move})[5]
        assert (step.text, step.reward) == (colours.sub("", peer.render()), reward) and step.info == info
        assert (step.terminated, step.truncated) == (terminated, truncated and not terminated)
        if terminated or truncated:
            break
    assert step.terminated
    env.close()


def test_texts_masks_and_the_end_of_an_episode(lake):
    import gymnasium
    import numpy as np

    class Echo(gymnasium.Env):
        """Ends by `end` and by its limit at once; the mask forbids the second action."""

        observation_space = gymnasium.spaces.Text(100)

        def __init__(self, discrete=False):
            free = gymnasium.spaces.Text(9, charset="abcdefghijklmnopqrstuvwxyz ")
            self.action_space = gymnasium.spaces.Discrete(3, start=5) if discrete else free
            masked, named = {"action_mask": np.array([1, 0, 1], np.int8)}, {"admissible_commands": ["end", "go on"]}
            self.info = masked if discrete else named

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return f"begin {self.np_random.integers(1000)}", self.info

        def step(self, action):
            return f"did {action}", 0.5, action == "end", action in ("end", "cut"), self.info

    kind = lake[0].func
    free = kind(Echo, choose=False, invalid=-1.0, max_turns=3)
    first = free.reset({0: SIX[0], 1: SIX[1], 2: SIX[0]})
    assert first[0].text == first[2].text != first[1].text and first[0].text.startswith("x\nbegin ")
    said = free.step({0: " end\n", 1: "two\nlines", 2: "x" * 10_000})
    assert said[0] == Step("\ndid end\n> ", reward=0.5, terminated=True)
    assert said[1] == Step(first[1].text.removeprefix("x"), reward=-1.0) and said[2].reward == -1.0
    assert free.step({1: "cut"})[1] == Step("\ndid cut\n> ", reward=0.5, truncated=True)
    assert not free.step({2: "go on"})[2].truncated and free.step({2: ""})[2].truncated
    assert kind(Echo).reset({0: SIX[0]})[0].options == ["end", "go on"]
    masked = kind(partial(Echo, True), actions=("up", "down", "stay"))
    assert masked.reset({0: SIX[0]})[0].options == ["up", "stay"] and masked.step({0: "stay"})[0].text == "\ndid 7\n> "
    assert masked.step({0: "down"})[0].reward == 0.0 and masked.turns[0] == 2  # not possible now
    with pytest.raises(OperantError, match="acts by texts; leave it out"):
        kind(Echo, actions=("up", "down"))


@cases(
    ({"id": "FrozenLoch-v1"}, "env.id='FrozenLoch-v1' cannot be made: .*FrozenLoch"),
    ({"id": "FrozenLake-v1"}, "observes Discrete.16., which is no text: .*render_mode: ansi"),
    ({**LAKE, "actions": ("a", "b")}, r"env.actions=\('a', 'b'\): 'FrozenLake-v1' has 4 actions; name each"),
    ({**LAKE, "kwargs": {"size": 3}}, "cannot be made: .*size"),
    ({**LAKE, "prompt": "{observation} {hint}"}, "env.prompt=.*it may name {task} and {observation}.*'hint'"),
    ({**LAKE, "prompt": "{observation[a]}"}, "env.prompt=.*it may name {task} and {observation}.*TypeError"),
    ({**LAKE, "max_turns": 0}, "env.max_turns=0: it must be at least 1"),
    ({"id": lambda: __import__("gymnasium").make_vec("CartPole-v1", 2)}, "makes a vector, which steps all its"),
)
def test_an_environment_that_cannot_be_played_is_refused(given, error, lake):
    with pytest.raises(OperantError, match=error):
        lake[0].func(**given)


def test_a_run_in_gymnasium_by_name(lake, tmp_path):
    named = {"env": "workers:gymnasium", "env.workers": 2, **{f"env.{name}": value for name, value in LAKE.items()}}
    given = {"tokenizer": letters(), "out": tmp_path / "run", "evaluation.metrics": "distinct", "env.max_turns": 4}
    given |= {"env.prompt": "{observation}", "env.fresh": True, "env.train_games": 5}
    run = train(lm("llama", vocab=40, spread=0.1, max_position_embeddings=256), **SMALL | named | given)
    assert [t.id for t in run.parts.tasks] == [f"FrozenLake-v1/train/{i}" for i in range(5)]
    assert len(run.parts.held_out) == 16 and 0 < run.metrics[-1]["rollout/turns"] <= 4


# --- the check --------------------------------------------------------------------------------------------------------
class Shares(Letters):
    """What an episode is paid depends on the episodes that are stepped with it."""

    def step(self, replies):
        return {slot: replace(step, reward=len(replies)) for slot, step in super().step(replies).items()}


def test_the_check_finds_episodes_that_depend_on_each_other():
    with pytest.raises(OperantError, match=r"'Shares': step.*with reward=.*let no episode depend on those beside it"):
        check_env(Shares(), SIX)


def without(**parts):
    """A class of worlds that differs from `Draws` in these parts alone."""
    return type("Odd", (Draws,), parts)


NUMBER = iter(range(100))
ODD_STATE = without(state_dict=lambda self: {"x": object()}, load_state_dict=lambda self, state: None)
COUNTS = without(reset=lambda self, given: {s: Step(f"game {next(NUMBER)}") for s in Draws.reset(self, given)})


@cases(
    (without(games=lambda self, part: [Task(part, "")]), "task 'train' has the prompt '', and a run leaves", True),
    (without(games=lambda self, part: ["x"]), r"games\('train'\) returned \['x'\]; it must be a list of", True),
    (without(games=lambda self, part: Draws().games("train")), "both have the task 'train/0', so an evalu", False),
    (without(games=lambda self, split: [Task("a", "x")] * 2 * (split == "train")), "the id 'a' occurs twice", True),
    (without(most=0), "most=0; it must be a number of at least 1", True),
    (without(waves=0), "waves=0; it must be a number of at least 1", True),
    (without(check=lambda self: 1 / 0), "check raised ZeroDivisionError: division by zero", True),
    (ODD_STATE, r"\.x is of type object, which no checkpoint can", True),
    (without(step=lambda self, r: {s: Step(failed="raised") for s in r}), "has failed in every episode", True),
    (without(games=lambda self, s: [Task(f"{s}{next(NUMBER)}", "x")]), r"'train\d+'.* in its place the", False),
    (COUNTS, "reset answered slot 0 .*'game .*, and the second time.*keep their state with state_dict", False),
    (without(step=lambda self, r: {s: Step(fresh=True) for s in r}), "an empty prompt; fresh=True needs", False),
)
def test_the_check_refuses_what_a_run_refuses(world, error, refused, tmp_path):
    """Each world's sentence in the check; a run with it ends before its first step."""
    with pytest.raises(OperantError, match=f"(?s)world 'Odd'.*{error}|the state of world 'Odd'{error}|{error}"):
        check_env(world())
    if refused:
        with pytest.raises(OperantError):
            train(lm(vocab=40, spread=0.1), tokenizer=letters(), env=world(), out=tmp_path / "run", **SMALL)
