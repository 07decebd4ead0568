"""Worlds and programs in actors of Ray, held to those in processes of this machine; actors that die; refusals."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import hostile_worlds
import psutil
import pytest
from cases import cases, slow
from hostile_worlds import Letters
from small_runs import SMALL, TASKS, model, told
from toys import letters
from worlds import HOSTILE, content

from operant import OperantError, Task, train
from operant.apps.code.unit_tests import UnitTests
from operant.envs.isolated import RayEnv, WorkerEnv
from operant.rollouts.play import play
from operant.runs.config import configure
from operant.sandbox import ray as on_ray
from operant.sandbox.jail import Code, Jail, JailOptions, Program, Stdin
from operant.sandbox.ray import ENGINE, PROGRAMS, RayJail, RaySession

if importlib.util.find_spec("ray") is None:
    pytest.skip("the package ray is not installed: pip install 'operant[ray]'", allow_module_level=True)

HERE = hostile_worlds.__file__
SIX = [Task(f"t/{i}", "x", target="a") for i in range(6)]


def below():
    children = psutil.Process().children(recursive=True)
    return {process for process in children if process.is_running() and process.status() != psutil.STATUS_ZOMBIE}


def gone(before, seconds=10.0):
    end = time.monotonic() + seconds
    while (left := below() - before) and time.monotonic() < end:
        time.sleep(0.1)
    return not left


def pid(ray, actor):
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))


@pytest.fixture(scope="module")
def ray():
    before, session = below(), RaySession(ENGINE)
    session.begin()
    import ray

    yield ray
    session.end()
    assert not ray.is_initialized() and gone(before)


class Here:
    """An actor in this process; what it answers lies in a box, which is a function."""

    def __init__(self, kind, *given):
        self.kept = kind(*given)

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *given: partial(lambda answer: answer, getattr(self.kept, name)(*given)))


@pytest.fixture(params=["here", slow("ray")])
def actors(request, monkeypatch):
    """Actors of Ray in CI, and every day ones of this process, which are asked the same and start no Ray."""
    if request.param == "ray":
        request.getfixturevalue("ray")
        return
    monkeypatch.setattr(RaySession, "begin", lambda self: None)
    monkeypatch.setattr(RaySession, "actor", lambda self, kind, *given: Here(kind, *given))
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.kill", lambda actor: None)
    monkeypatch.setattr("ray.wait", lambda asked, **more: (asked[:1], asked[1:]))
    monkeypatch.setattr("ray.get", lambda x, **more: [y() for y in x] if isinstance(x, list) else x())


# --- worlds -----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_run_is_that_of_worker_processes_to_the_bit(ray, tmp_path):
    """Also resumed, and with the state of the workers."""

    def started(form, out, **more):
        world = {"env": f"{form}:{HERE}:Draws", "env.workers": 2, "env.tasks": 4, **SMALL}
        return train(model(), tokenizer=letters(), out=tmp_path / out, **(world | more))

    whole = started("workers", "whole")
    started("ray", "half", steps=1)
    before = below()
    assert told(started("ray", "half", resume=True)) == told(whole) and gone(before) and ray.is_initialized()


def test_rooms_are_those_of_worker_processes(actors):
    given, games = {"test_games": 2, "memory": 0}, []
    for form in (WorkerEnv, RayEnv):
        env = form("operant.apps.games.rooms:Rooms", given, workers=2)
        tasks = dict(enumerate(env.games("test")))
        steps = [env.reset(tasks)]
        for reply in ("look", "go north", "take key", "go south"):
            live = [slot for slot in tasks if not any(step[slot].terminated for step in steps if slot in step)]
            steps.append(env.step(dict.fromkeys(live, reply)))
        games.append((tasks, steps, env.level.partition(":")[0]))
        env.close()
    assert games[0] == games[1] and games[0][2]


@pytest.mark.parametrize(("end", "fault"), [("crashed", "exits"), ("timeout", "hangs"), ("raised", "raises")])
@pytest.mark.slow
def test_a_failed_world_costs_what_it_does_in_a_worker(ray, end, fault, kept):
    right = play(SIX, env=Letters(), **kept)
    env = RayEnv(HOSTILE, {"fault": fault}, workers=2, isolation={"timeout": 1.5 if end == "timeout" else 20.0})
    for _ in range(1 + (end == "crashed")):  # the second time in a worker that was started again
        found = play(SIX, env=env, **kept)
        others = "world" if end == "raised" else end  # of the episodes with the same worker
        assert [r.end for r in found] == ["world", others, "world", end, "world", others], [r.info for r in found]
        pairs = [(content(a), content(b)) for a, b in zip(found, right, strict=True) if not a.failed]
        assert [a for a, _ in pairs] == [b for _, b in pairs]
    env.close()


@pytest.mark.slow
def test_a_killed_actor_ends_its_episodes_and_restarts(ray):
    env, before = RayEnv(f"{HERE}:Letters", workers=2), below()
    tasks = dict(enumerate(SIX[:4]))
    first = env.reset(tasks)
    dead = pid(ray, env._pools[1]._actor)
    inside = psutil.Process(dead).children(recursive=True)
    os.kill(dead, signal.SIGKILL)
    found = env.step(dict.fromkeys(tasks, "a"))
    assert [found[slot].failed for slot in tasks] == [None, "crashed", None, "crashed"]
    assert "its actor of Ray" in found[1].info["failure"]
    assert [s.failed for s in env.step({0: "a", 1: "a"}).values()] == [None, "crashed"]
    assert env.reset(tasks) == first and env.step({1: "a"})[1].failed is None
    os.kill(pid(ray, env._pools[0]._actor), signal.SIGKILL)
    time.sleep(1.0)
    assert env.reset(tasks) == first, "one that dies between episodes costs none"
    assert inside and not psutil.wait_procs(inside, 5.0)[1], "its worker ends with it"
    env.close()
    assert gone(before)


@pytest.mark.slow
def test_an_actor_that_does_not_answer_is_given_up(ray, monkeypatch):
    monkeypatch.setattr(on_ray, "GRACE", 0.2)
    env = RayEnv(f"{HERE}:Letters", workers=1)
    first = env.reset({0: SIX[0]})
    [pool] = env._pools
    stopped = pid(ray, pool._actor)
    os.kill(stopped, signal.SIGSTOP)
    [found] = pool.run([None], until=time.monotonic() + 0.2)
    assert (found.outcome, pool._actor) == ("timeout", None)
    os.kill(stopped, signal.SIGKILL)
    assert env.reset({0: SIX[0]}) == first
    env.close()


@pytest.mark.slow
def test_a_world_without_room_and_another_address_are_refused(ray):
    with pytest.raises(OperantError, match=r"env\.workers=2 with 3000 CPU each: Ray has 4096; .* lower env\.cpus"):
        RayEnv(f"{HERE}:Letters", workers=2, cpus=3000).check()
    with pytest.raises(OperantError, match=r"env\.address='auto': this process uses another Ray .*=None"):
        RayEnv(f"{HERE}:Letters", address="auto").check()
    assert ray.is_initialized()


@pytest.mark.slow
def test_a_world_that_cannot_be_made_ends_its_processes(ray, tmp_path):
    before = below()
    with pytest.raises(OperantError, match=r"isolated world .*:Odd' .*raised ZeroDivisionError"):
        (tmp_path / "odd.py").write_text("class Odd:\n    def __init__(self): 1 / 0\n    reset = step = None\n")
        train(model(), TASKS, env=f"ray:{tmp_path}/odd.py:Odd", tokenizer=letters(), out=tmp_path / "run", **SMALL)
    assert gone(before) and len(RaySession._open) == 1


# --- programs ---------------------------------------------------------------------------------------------------------
DOUBLE = (Code("assert f(2) == 4"), Code("assert f(3) == 6"))


def test_verdicts_are_those_of_the_local_jail(actors, tmp_path):
    """Of right and wrong ones, an infinite loop, one that deletes a file, and one that kills its own processes."""
    (tmp_path / "precious").write_text("here", encoding="utf-8")
    right, before = "def f(x): return 2 * x", below()
    odd = f"import os\nfor name in os.listdir({str(tmp_path)!r}): os.remove({str(tmp_path)!r} + '/' + name)\n"
    kills = "import os, signal\nos.kill(os.getppid(), 9)\nos.kill(0, 9)\n"
    sources = [right, "def f(x): return 4", "def f(x:", "while True: pass", odd + right, kills + right]
    asked = [Program(source, DOUBLE) for source in sources]
    asked.append(Program("print(int(input()) + 1)", (Stdin("1\n", "2\n"), Stdin("2\n", "9\n"))))
    options = JailOptions(seconds=0.5)
    local, jail = Jail(options), RayJail(RaySession(PROGRAMS, count=2), options)
    assert jail.level == local.level
    assert "in each of 2 actors of Ray" in jail.describe() and "1 at once" in jail.describe()

    def told(verdicts):
        return [(v.outcome, v.results, v.failed, v.message.partition(" after ")[0]) for v in verdicts]

    found = told(jail.run(asked))
    assert found == told(local.run(asked)) and len({outcome for outcome, *_ in found}) == 4
    assert (tmp_path / "precious").is_file() or local.level == "process"
    jail.close()
    assert gone(before)


@pytest.mark.slow
def test_no_verdict_is_lost_when_a_judging_actor_is_killed(ray):
    jail = RayJail(RaySession(PROGRAMS, count=2), JailOptions(seconds=2.0))
    slow = "s = 0\nfor i in range(3_000_000): s += i\n"
    asked = [Program(f"{slow}def f(x): return 2 * x + {i} - {i}" + " " * i, DOUBLE) for i in range(4)]
    asked.append(Program("def f(x): return 4", DOUBLE))
    dead = pid(ray, jail.actors[0])
    threading.Timer(0.15, os.kill, (dead, signal.SIGKILL)).start()
    with pytest.warns(UserWarning, match=r"actor 0 of programs on Ray died and is started again"):
        found = jail.run(asked)
    assert [v.outcome for v in found] == ["passed"] * 4 + ["failed test"] and pid(ray, jail.actors[0]) != dead
    jail.close()


def test_the_level_is_that_of_the_weakest_actor(monkeypatch):
    found = [f"{level}: as it is" for level in ("landlock", "process", "namespaces")]
    monkeypatch.setattr(on_ray, "answers", lambda asked, names: found)
    monkeypatch.setattr(RaySession, "begin", lambda self: None)
    monkeypatch.setattr(RaySession, "actor", lambda self, *given: MagicMock())
    jail = RayJail(RaySession(PROGRAMS, count=3), JailOptions())
    assert jail.level == "process"
    assert jail.describe() == "process: as it is; in each of 3 actors of Ray, or at a stronger level"


def test_a_level_that_a_node_lacks_is_a_sentence(actors):
    options = JailOptions(level="container", engine="no-such-engine")
    with pytest.raises(OperantError, match=r"^no program can be isolated here: container: no-such-engine: not found"):
        RayJail(RaySession(PROGRAMS), options)
    assert len(RaySession._open) <= 1


NODE_DIES = """
import os, psutil, signal
from operant.sandbox.jail import Code, JailOptions, Program
from operant.sandbox.ray import PROGRAMS, RayJail, RaySession

jail = RayJail(RaySession(PROGRAMS), JailOptions())
[raylet] = [p for p in psutil.Process().children(recursive=True) if p.name() == "raylet"]
raylet.kill()
jail.run([Program("for x in range(10_000_000): pass", (Code("assert x"),))] * 200)
"""


@pytest.mark.slow
def test_a_ray_whose_node_is_killed_is_a_sentence_and_no_wait():
    done = subprocess.run([sys.executable, "-c", NODE_DIES], capture_output=True, text=True, timeout=240, check=False)
    assert "OperantError: programs on Ray: Ray has no node left" in done.stderr, done


@pytest.mark.slow
def test_a_run_has_one_ray_for_its_engine_world_and_programs(ray, tmp_path):
    row = {"prompt": "a", "tests": ["assert f(2) == 4"], "completion": "def f(x): return 2 * x"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    options = {"form": "code", "reward": "tests", "reward.ray": 2, **SMALL, "steps": 1}
    options |= {"engine": "ray", "engine.actors": 1, "env": "ray:programs", "env.workers": 1, "env.turns": 2}
    before = below()
    done = train(model(), str(tmp_path / "rows.jsonl"), tokenizer=letters(), out=tmp_path / "run", **options)
    assert any("in each of 2 actors of Ray" in note for note in done.parts.notes)
    assert len(RaySession._open) == 1, "only that of this module is left"
    assert gone(before) and "jail" not in vars(done.parts.reward.verdicts)


# --- refusals ---------------------------------------------------------------------------------------------------------
@cases(
    (lambda: RayEnv(HOSTILE, workers=0), r"workers=0 for world 'Hostile': it must be at least 1"),
    (lambda: RayEnv(HOSTILE, cpus=-1.0), r"env\.cpus=-1\.0: it must be at least 0"),
    (lambda: RayEnv(HOSTILE, cpus=float("nan")), r"env\.cpus=nan: it must be at least 0"),
    (lambda: RayEnv(HOSTILE, workers=9), r"env\.workers=9: this machine has 2 cores, .*cluster \(env\.address\)"),
    (lambda: UnitTests(ray=9), r"reward\.ray=9: this machine has 2 cores, .*cluster \(reward\.ray_address\)"),
    (lambda: UnitTests(ray=-1), r"reward\.ray=-1 with .*ray is a number of actors"),
    (lambda: UnitTests(ray_address="auto"), r"reward\.ray=0 with reward\.ray_address='auto'.* without an address"),
    (lambda: configure({"env": "ray:rooms", "env.cpus": "many"}), r"env\.cpus='many': it must be a finite number"),
    (lambda: configure({"env": "ray:rooms", "env.actors": 3}), r"env\.actors.* unknown|unknown.*env\.actors"),
    (lambda: configure({"reward": "tests", "reward.ray": "x"}), r"reward\.ray='x': it must be a whole number"),
)
def test_wrong_options_are_refused_before_ray_starts(make, message, monkeypatch):
    monkeypatch.setattr(on_ray, "cores", lambda: 2)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(RaySession, "begin", lambda self: pytest.fail("Ray was started"))
    with pytest.raises(OperantError, match=message):
        make()


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(OperantError, match=r"env\.address='127\.0\.0\.1:9': no Ray answers there"):
        RayEnv(HOSTILE, address="127.0.0.1:9").check()
    with pytest.raises(OperantError, match=r"reward\.ray_address='127\.0\.0\.1:9': no Ray answers there"):
        UnitTests(ray=1, ray_address="127.0.0.1:9").check()
    monkeypatch.setattr(on_ray, "find_spec", lambda name: None)
    for make in (lambda: RayEnv(HOSTILE), lambda: UnitTests(ray=2)):
        with pytest.raises(OperantError, match=r"on Ray needs the package ray: pip install 'operant\[ray\]'"):
            make()
