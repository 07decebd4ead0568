"""Whole runs: a reward that fails once, resuming, evaluation apart from training, presets, and what is logged."""

import json
from types import SimpleNamespace

import pytest
import torch
from cases import cases, slow_but
from rigs import alike
from small_runs import SMALL, TASKS, count_a, killed, model, same, stopped_and_whole, told
from texts import parts
from tokenizers_of_words import word_tokenizer
from toys import letters, lm, on_disk

from operant import Observer, OperantError, steps, train
from operant.algorithms import METHODS, find, presets
from operant.data import load_tasks
from operant.engines.native.engine import NativeEngine
from operant.metrics.registry import describe
from operant.runs.checkpoints import snapshot
from operant.runs.config import as_mapping, configure, recipes
from operant.runs.folder import read_config
from operant.runs.notes import high_rate, idle, unknown_prompts
from operant.tools.cli import main
from operant.types import StoppedError

SHORT = SMALL | {"steps": 3, "tokenizer": letters()}


@cases((0, True), (1, False))
def test_a_reward_that_fails_once_changes_no_number(ahead, abstains, tmp_path):
    """The step that failed, or of which nothing was left, is played again: the numbers are those without a failure."""
    options = {**SHORT, "score.normalise": True, "kl.control": "adaptive", "rollouts_ahead": ahead}
    whole = train(model(), TASKS, count_a, out=tmp_path / "whole", **options)
    calls = []

    def flaky(rollouts):
        calls.append(1)
        if len(calls) == 3:
            if abstains:
                return [None] * len(rollouts)
            raise RuntimeError("the judge is out")
        return count_a(rollouts)

    with pytest.raises(OperantError, match="abstained" if abstains else r"flaky.*the judge is out"):
        train(model(), TASKS, flaky, out=tmp_path / "broken", **options)
    assert len((tmp_path / "broken/metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    again = train(model(), TASKS, flaky, out=tmp_path / "broken", resume=True, tokenizer=letters())
    assert told(again) == told(whole) and same(again, whole)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train(model(), TASKS, count_a, out=tmp_path_factory.mktemp("runs") / "plain", **SHORT)


def test_a_failed_sync_leaves_no_checkpoint_of_half_a_step(plain, tmp_path, monkeypatch):
    """The weights have moved by then: the last checkpoint is of the step before, and a resume plays it again."""
    take, gone = NativeEngine.sync, []

    def sync(self, policy, version):
        if version == 2 and not gone:
            gone.append(version)
            raise OperantError("the server is gone")
        take(self, policy, version)

    monkeypatch.setattr(NativeEngine, "sync", sync)
    with pytest.raises(OperantError, match="the server is gone"):
        train(model(), TASKS, count_a, out=tmp_path / "broken", **SHORT)
    again = train(model(), TASKS, count_a, out=tmp_path / "broken", resume=True, tokenizer=letters())
    assert gone and told(again) == told(plain) and same(again, plain)


HOW = {
    "trunk": {"model.train_layers": 1},
    "bfloat16 trunk, states computed again, 8 bit": {"model.precision": "bfloat16", "model.train_layers": 1}
    | {"model.states_gb": 0.0, "optimizer.states": "8bit"},
    "bfloat16 muon": {"model.precision": "bfloat16", "optimizer.kind": "muon"},
    "groups, in chunks": {"algorithm": "grpo", "samples": 2, "reward_chunks": 2},
    "an adapter, checkpointed": {"lora.rank": 2, "model.gradient_checkpointing": True},
    "a critic of its own, packed, 8 bit, allowed ids": {"value.critic": "copy", "value.init": "normal"}
    | {"model.packing": "on", "optimizer.states": "8bit", "top_p": 0.8, "truncation": "stored"},
    "all that follows": {"kl.control": "adaptive", "kl.horizon": 20, "score.scale": True, "score.normalise": True}
    | {"optimizer.schedule": "cosine", "optimizer.warmup": 0.5, "kl.loss_coef": 0.1, "best": "reward/mean"},
    "supervised": {"algorithm": "sft"},
    "watched": {"probes": 2, "probe_every": 1, "evaluate": TASKS, "evaluate_every": 1, "watch_every": 1},
}


@pytest.mark.parametrize("how", slow_but([how for how in HOW if how not in ("bfloat16 muon", "supervised")], HOW))
def test_stopping_and_resuming_is_the_run_that_never_stopped(tmp_path, how):
    ends = [snapshot(run.state, run.state.parts) for run in stopped_and_whole(tmp_path, 2, steps=3, **HOW[how])]
    assert alike(*ends), "everything that changes in a run, to the bit"


def test_a_run_from_python_is_resumed_from_python(plain, capsys):
    assert main(["train", "--resume", str(plain.path)]) == 2
    assert "resume it from Python, with operant.train" in capsys.readouterr().err
    held = read_config(plain.path)
    assert held["reward"].startswith("<function") and held["kl"]["coef"] == 0.1 and held["loss"]["clip"] == 0.2


class Watching(Observer):
    """Records its calls, and raises in each of them if it is broken."""

    def __init__(self, name, broken=False):
        self.name, self.broken, self.calls = name, broken, []

    def called(self, what):
        self.calls.append(what)
        if self.broken:
            raise ValueError(f"no {what}")

    def at_start(self, run):
        self.called("late start" if run.evaluation.started else "start")

    def after_step(self, run):
        self.called(f"step {run.metrics[-1]['step']:.0f}")

    def at_failure(self, run):
        self.called("failure")

    def at_end(self, run):
        assert (run.path / "export/config.json").is_file() and (run.path / "report.html").is_file()
        self.called("end")


@pytest.mark.parametrize("way", [train, lambda *given, **more: list(steps(*given, **more))])
def test_observers_are_called_and_one_that_raises_is_logged(tmp_path, way, capsys):
    watching = [Watching("broken one", broken=True), Watching("sound one")]
    way(model(), TASKS, count_a, out=tmp_path / "run", observers=watching, **SHORT | {"steps": 2})
    assert [watcher.calls for watcher in watching] == [["start", "step 1", "step 2", "end"]] * 2
    log = (tmp_path / "run/log.txt").read_text(encoding="utf-8")
    assert all(f"broken one failed: ValueError: no {x}" in log for x in watching[0].calls) and "sound one" not in log
    told_of = [line for line in capsys.readouterr().err.splitlines() if "failed" in line]
    assert told_of == ["operant: the broken one failed: ValueError: no start (later failures are in log.txt alone)"]


@cases((3, 1, 1, 1), (4, 1, 1, 2), (4, 0, 3, 3))
def test_an_error_of_a_step_or_of_an_evaluation_is_heard_and_reported(call, every, done, logged, tmp_path):
    """The calls of the reward: before training, then in each step for its replies and for the held-out ones."""
    watching, calls, report = Watching("observer"), [], tmp_path / "run/report.html"

    def fails(rollouts):
        calls.append(len(rollouts))
        if len(calls) <= call:
            return count_a(rollouts)
        report.unlink(missing_ok=True)
        return 1 / 0

    given = {"out": tmp_path / "run", "evaluate": TASKS, "evaluate_every": every, "probes": 0}
    with pytest.raises(OperantError, match="ZeroDivisionError"):
        train(model(), TASKS, fails, observers=[watching], **SHORT | given)
    assert watching.calls == ["start", *(f"step {i + 1}" for i in range(done)), "failure"] and report.is_file()
    assert len((tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()) == logged


def test_an_error_of_torch_is_reported_too(tmp_path, monkeypatch):
    watching = Watching("observer")
    monkeypatch.setattr("operant.runs.run.reward_metrics", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(model(), TASKS, count_a, out=tmp_path / "run", observers=[watching], **SHORT)
    assert watching.calls == ["start", "failure"] and (tmp_path / "run/report.html").is_file()


def test_a_reward_that_stops_ends_the_run_as_a_signal_does(plain, tmp_path):
    calls = []

    def stops(rollouts):
        calls.append(0)
        if len(calls) == 2:
            raise StoppedError("nobody is there")
        return count_a(rollouts)

    run = train(model(), TASKS, stops, out=tmp_path / "run", **SHORT)
    assert run.interrupted and len(run.metrics) == 1 and "nobody is there" in (run.path / "log.txt").read_text()
    again = train(model(), TASKS, count_a, out=run.path, resume=True, tokenizer=letters())
    assert told(again) == told(plain) and same(again, plain)


@pytest.mark.parametrize("observers", [Observer(), [Observer], [print], None])
def test_what_is_no_observer_is_refused(tmp_path, observers):
    with pytest.raises(OperantError, match=r"observers=.*subclass of operant\.Observer"):
        train(model(), TASKS, count_a, out=tmp_path / "run", observers=observers)
    assert not (tmp_path / "run").exists()


def test_an_evaluation_has_the_held_out_queries_in_order_and_begins_at_the_reference(tmp_path):
    watched = train(model(), TASKS, count_a, out=tmp_path / "run", evaluate=TASKS, **SHORT)
    held = json.loads((watched.path / "evaluation.json").read_text(encoding="utf-8"))
    assert [r["query"] for r in held["before"]["replies"]] == TASKS == [r["query"] for r in held["after"]["replies"]]
    assert held["before"]["kl"] == pytest.approx(0.0, abs=1e-5)


def test_leaving_the_loop_of_steps_saves_the_run(plain, tmp_path, capsys):
    for metrics in steps(model(), TASKS, count_a, out=tmp_path / "run", **(SHORT | {"checkpoint_minutes": 60})):
        if metrics["step"] == 2:
            break
    assert "stopped after step 2 and saved; resume with: operant train --resume" in capsys.readouterr().out
    assert (tmp_path / "run/checkpoints/step-00002").is_dir() and (tmp_path / "run/report.html").is_file()
    again = train(model(), TASKS, count_a, out=tmp_path / "run", resume=True, tokenizer=letters())
    assert told(again) == told(plain) and same(again, plain)


def test_another_seed_says_something_else(plain, tmp_path):
    next(steps(model(), TASKS, count_a, out=tmp_path / "run", seed=4, **SHORT))
    assert told(tmp_path / "run")[0] != told(plain)[0]


def test_every_logged_name_is_in_the_registry(tmp_path):
    reward, more = {"letters:a": 1.0, "length:3": 0.5}, {"evaluate": TASKS, "evaluate_every": 2}
    run = train(model(), TASKS, reward, out=tmp_path / "r", **more, **SHORT)
    names = {name for line in run.metrics for name in line}
    assert not [name for name in sorted(names) if describe(name) is None]
    assert "evaluate/reward" in names and sum(n.startswith("reward/letters") for n in names) >= 2, names


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_loads(name):
    learns = find(presets()[name].get("algorithm", "ppo")).source != "data"
    config = configure({"preset": name, "tasks": TASKS, **({"reward": count_a} if learns else {})})
    flat = as_mapping(config)
    for option, value in presets()[name].items():
        group, _, field = option.rpartition(".")
        if {group, field} & {"tasks", "reward"}:  # given above
            continue
        assert (flat[group] if group else flat)[field] == value, option
    assert idle(config) == []


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_recipe_loads_and_is_written_whole(name):
    brings = {"letters", "keyword", "sentiment", "chat", "rooms", "textworld", "numbers", "dates"}
    own = {} if name in brings else {"tasks": "mine.jsonl"}  # the user's rows
    config = configure(own, name)
    assert as_mapping(configure(as_mapping(config))) == as_mapping(config) and idle(config) == []


def test_what_is_later_wins():
    given = {"tasks": TASKS, "reward": count_a}
    assert configure(given | {"preset": "trl"}).learner["kl"].coef == 0.2
    assert configure(given | {"preset": "trl", "kl.coef": 0.3}).learner["kl"].coef == 0.3
    assert configure({"preset": "trl"}, "sentiment").learner["kl"].coef == 0.2
    assert configure({}, "sentiment").learner["kl"].coef == 0.1


ABSENT = "absent"
GIVEN = [{"prompt": text, "completion": " " + text} for text in TASKS]
STARTS = {
    "sft": {"tasks": GIVEN},
    "dpo": {"tasks": [{"prompt": text, "chosen": "a", "rejected": "b"} for text in TASKS]},
    "kto": {"tasks": [row | {"label": bool(i % 2)} for i, row in enumerate(GIVEN)]},
    "reward-model": {"tasks": [{"prompt": text, "chosen": "a", "rejected": "b"} for text in TASKS]},
    "outcome-critic": {"tasks": [row | {"outcome": i % 2} for i, row in enumerate(GIVEN)]},
    "distill": {"teacher.hint": lambda rollout: " a"},
    "coderl": {"tasks": GIVEN, "advantage.gamma": 1.0},
    "trpo": {"minibatch": ABSENT},
}
"""What a method needs beside `SMALL`."""
REWARDED = {True: {"reward": "letters:e"}, False: {}}
RELATIVES = "dapo dr-grpo gspo cispo sapo dppo opo maxrl pass-at-k vapo reinforce++ reinforce++-baseline".split()
"""Their losses and advantages alone are others than those of GRPO, PPO and REINFORCE."""


@pytest.mark.parametrize("method", slow_but([name for name in METHODS if name not in RELATIVES], METHODS))
def test_every_method_starts_a_run_and_says_what_nothing_reads(method, tmp_path):
    row = find(method)
    options = SMALL | {"steps": 1, "minibatch": 8, "importance_cap": 3.0, "tasks": TASKS, "algorithm": method}
    options |= {"policy": model(), "samples": row.needs.samples if row.source != "data" else 1}
    if row.needs.policy:
        trunk = on_disk(tmp_path / "trunk", lm("gpt2", vocab=len(letters())))
        options["policy"] = {"name": method.replace("-", "_"), "trunk": trunk}
    else:
        options |= {"tokenizer": letters()} | ({"reward": count_a} if row.needs.reward else {})
    given = {name: value for name, value in (options | STARTS.get(method, {})).items() if value is not ABSENT}
    killed(**given, after=1, out=tmp_path / "run", quiet=True)  # what comes behind the last step is the same for all
    assert told(tmp_path / "run")[0]["update/refused"] == 0
    said = (tmp_path / "run/log.txt").read_text(encoding="utf-8")
    assert "learner.importance_cap=3.0 without learner.importance: nothing reads it" in said
    assert ("update.minibatch=8 is above batch=4" in said) == ("minibatch" in given)


@pytest.mark.parametrize("method", ["ppo", "a2c", "trpo", "grpo", "rejection"])
def test_a_critic_that_sees_the_best_replies_alone_is_said(method):
    given = {"algorithm": method, "tasks": "x.txt", "reward": "letters:e", "learner.select": "top:50%"}
    notes = idle(configure(given | ({"kl.loss_kind": "reverse"} if method == "grpo" else {})))
    said = [note for note in notes if "the critic learns from the replies that stay alone" in note]
    assert len(said) == len(notes) == find(method).needs.critic


@cases(*[tuple(json.loads(row)) for row in parts("options.txt")["read by nobody"].splitlines()])
def test_an_option_that_nothing_reads_is_said(method, given, needed):
    options = {"algorithm": method, "tasks": "x.txt", **given} | REWARDED[find(method).source != "data"]
    (note,) = idle(configure(options))
    name, value = list(given.items())[-1]
    assert f"{name}={value} {needed}" in note or f"{name}={value} without {needed}: nothing reads it" in note


def test_a_rate_of_zero_is_said():
    (note,) = idle(configure({"tasks": "x.txt", "reward": "letters:e", "optimizer.lr": 0.0}))
    assert note.startswith("optimizer.lr=0.0: the weights stay")


@cases(
    (124, 3e-4, "ppo", "1e-05, about the usual rate of 124M"),
    (124, 1e-5, "ppo", None),
    (5.3, 3e-4, "grpo", None),
    (5.3, 3e-3, "grpo", "3e-04, about the usual rate of 5.3M"),
    (7000, 1e-5, "rloo", "1e-06, about the usual rate of 7e+03M"),
    (124, 3e-4, "sft", None),
)
def test_a_rate_far_above_those_of_its_size_is_said(millions, rate, method, usual):
    weights = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(int(millions * 1e6), device="meta"))])
    learner = SimpleNamespace(policy=SimpleNamespace(model=weights), algorithm=find(method))
    given = {"algorithm": method, "tasks": "x.txt", "optimizer.lr": rate} | REWARDED[find(method).source != "data"]
    assert [usual in note for note in high_rate(configure(given), learner)] == [True] * (usual is not None)


@cases((["the film", "der Film"], "prompts of unknown tokens alone ([UNK]): 1 of 2; "), (["the film", "a Film"], None))
def test_prompts_that_the_policy_cannot_read_are_said(texts, said):
    tokenizer = word_tokenizer()
    learner = SimpleNamespace(policy=SimpleNamespace(tokenizer=tokenizer))
    found = unknown_prompts(SimpleNamespace(learner=learner, tasks=load_tasks(texts, tokenizer)))
    assert [said in note for note in found] == [True] * (said is not None)
