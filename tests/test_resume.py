"""Going on with a run: what may change and what may not, what is cut back, what is taken from the checkpoint."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from cases import cases
from small_runs import SMALL, TASKS, Grumpy, count_a, cut, model, options, same, told
from texts import parts
from toys import letters, lm, on_disk

from operant import Learner, OperantError, Task, steps, train
from operant.api import runs
from operant.envs import SingleTurn
from operant.options import parse
from operant.runs.config import as_mapping, configure, describe
from operant.runs.folder import state
from operant.runs.resume import Change, go_on, stored_options
from operant.storage import atomic_io, old_names
from operant.storage.checkpoint_store import newest_whole
from operant.tools.cli import main
from operant.tools.report.diagnosis import read_history
from operant.tools.report.diagnosis.progress import progress


def again(out, reward=count_a, **given):
    return train(model(), TASKS, reward, out=out, resume=True, tokenizer=letters(), **given)


def log(out):
    return (out / "log.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def of_three(tmp_path_factory):
    cut(out := tmp_path_factory.mktemp("runs") / "run", 3)
    return out


@pytest.fixture
def stopped(of_three, tmp_path):
    """A run that was killed after its third step, with a checkpoint of every step."""
    return shutil.copytree(of_three, tmp_path / "run")


@pytest.fixture
def folder(tmp_path):
    """A model's folder and a file of tasks: what the command line needs."""
    on_disk(tmp_path / "model", model())
    (tmp_path / "tasks.txt").write_text("\n".join(TASKS) + "\n", encoding="utf-8")
    return tmp_path


def command(folder, *more):
    given = {"policy": folder / "model", "tasks": folder / "tasks.txt", "reward": "letters:a", "out": folder / "run"}
    given |= {"batch": 4, "max-tokens": 6, "minibatch": 2, "probes": 0, "steps": 2, "samples-every": 0}
    return ["train", *(word for name, value in given.items() for word in (f"--{name}", str(value))), *more]


@cases(
    ("checkpoints/*/tensors.safetensors", False, r"is whole: step-00003 .*, step-00002 .*put back a copy"),
    ("checkpoints/*/tensors.safetensors", True, r"is whole: step-00003 .*, step-00002 .*put back a copy"),
    ("metrics.jsonl", False, "metrics.jsonl, line 1 is not JSON .*delete that line"),
    ("distributions.jsonl", True, "distributions.jsonl, line 1 is not JSON"),
)
def test_a_damaged_run_is_refused_before_anything_loads(files, fresh, said, stopped, monkeypatch):
    for file in stopped.glob(files):
        file.write_bytes(b"?" + file.read_bytes())
    monkeypatch.setattr("operant.runs.trainer.build", lambda *a, **k: pytest.fail("it loads"))
    with pytest.raises(OperantError, match=said):
        again(stopped, fresh_optimizer=fresh)


def test_a_resume_deletes_what_a_killed_save_left_over(tmp_path):
    """The kill came after the last checkpoint was complete, before those that are not kept were deleted."""
    out = tmp_path / "run"
    train(model(), TASKS, count_a, out=out, **options(checkpoint="both", steps=3, keep=1))
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["light-00003", "step-00003"]
    shutil.copytree(out / "checkpoints/light-00003", out / "checkpoints/light-00002.old")
    (out / "checkpoints/light-00001").mkdir()
    again(out)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == names


def test_a_resume_says_where_it_goes_on_and_records_no_change(stopped, capsys):
    before = (stopped / "config.yaml").read_bytes()
    again(stopped, **SMALL)
    assert "it goes on after step 3; Ctrl-C" in capsys.readouterr().out and "others" not in log(stopped)
    assert not (stopped / "changes.jsonl").exists() and (stopped / "config.yaml").read_bytes() == before


def test_a_refused_resume_leaves_the_run_as_it_was(stopped, tmp_path):
    broken = tmp_path / "broken"
    with pytest.raises(OperantError, match="enough"):
        train(model(), TASKS, Grumpy(fails=2), out=broken, **options())
    for out, how in ((stopped, "interrupted"), (broken, "failed")):
        assert state(out, 2, 6) == how
        with pytest.raises(OperantError, match="no file"):
            train(model(), out / "none.txt", count_a, out=out, resume=True, tokenizer=letters())
        assert "the resume failed: tasks: there is no file" in log(out) and state(out, 2, 6) == how


@pytest.mark.parametrize("given", ["checkpoints/step-00001", "export"])
def test_a_folder_inside_a_run_is_answered_with_the_run(tmp_path, given, capsys):
    (tmp_path / "run" / given).mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text("{}", encoding="utf-8")
    assert main(["train", "--resume", str(tmp_path / "run" / given)]) == 2
    assert f"it lies in the run folder {tmp_path / 'run'}: give that" in " ".join(capsys.readouterr().err.split())


@cases("reward", "tasks")
def test_a_resume_elsewhere_names_the_folder_of_the_start(option, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "own.py").write_text("def score(rollouts): return [1.0] * len(rollouts)\n", encoding="utf-8")
    words = command(folder)
    words[words.index("--steps") + 1] = "1"
    if option == "tasks":
        Path("tasks.txt").rename("my tasks.txt")
    words[words.index(f"--{option}") + 1] = {"reward": "own.py:score", "tasks": "my tasks.txt"}[option]
    assert main(words) == 0
    (folder / "other").mkdir()
    monkeypatch.chdir(folder / "other")
    assert main(["train", "--resume", "../run", "--steps", "3"]) == 2
    said = f"../run was started in {folder}, so resume it there: cd {folder} && operant train --resume"
    assert said in " ".join(capsys.readouterr().err.split())
    if option != "reward":  # which is looked for first
        assert main(["train", "--resume", "../run", "--steps", "many"]) == 2
        assert "was started in" not in capsys.readouterr().err


# --- changed options ------------------------------------------------------------------------------------------------
def test_a_run_without_a_reference_resumes_beside_a_kl_price(tmp_path):
    """Earlier versions wrote the default price down; nothing was charged, as there was nothing to measure to."""
    cut(out := tmp_path / "run", 1, reference=None)
    path = out / "config.yaml"
    held = yaml.safe_load(path.read_text(encoding="utf-8"))
    held["kl"]["coef"] = 0.1
    path.write_text(yaml.safe_dump(held), encoding="utf-8")
    assert again(out, steps=2).learner.kl.coef == 0.0
    with pytest.raises(OperantError, match="nothing to measure KL to"):
        again(out, steps=3, **{"kl.coef": 0.2})


def test_a_changed_option_is_recorded_and_in_force(tmp_path):
    cut(out := tmp_path / "run", 2, **{"kl.control": "adaptive", "optimizer.eps_placement": "tensorflow"})
    more = {"betas": (0.8, 0.9), "steps": 3, "optimizer.eps_placement": "torch"}
    run = again(out, **{"lr": 5e-4, "kl": {"coef": 0.7}, "weight_decay": 0.5}, **more)
    changed = [json.loads(x) for x in (out / "changes.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(change["step"] == 2 for change in changed)
    assert {c["name"]: (c["old"], c["new"]) for c in changed} == {
        "optimizer.lr": (1e-3, 5e-4),
        "kl.coef": (0.1, 0.7),
        "optimizer.weight_decay": (0.0, 0.5),
        "optimizer.betas": ([0.9, 0.999], [0.8, 0.9]),
        "optimizer.eps_placement": ("tensorflow", "torch"),
        "steps": (4, 3),
    }
    held = yaml.safe_load((out / "config.yaml").read_text(encoding="utf-8"))
    assert held["optimizer"]["lr"] == 5e-4 and held["kl"]["coef"] == 0.7
    assert held["kl"]["control"] == "adaptive", "what was not named stays"
    assert "changed from step 3 on: " in log(out) and "kl.coef is 0.7, was 0.1" in log(out)
    last = told(run)[-1]
    assert last["step"] == 3 and last["update/lr"] == 5e-4 and last["kl/coef"] == 0.7
    assert [group["weight_decay"] for group in run.learner.optimizer.param_groups] == [0.5, 0.0]
    assert all((group["betas"], group["eps"]) == ((0.8, 0.9), 1e-8) for group in run.learner.optimizer.param_groups)


def test_a_change_outlives_a_kill_before_the_next_checkpoint(tmp_path):
    """The checkpoint still holds the old coefficient, and config.yaml the new one."""
    cut(out := tmp_path / "run", 2, **{"kl.control": "adaptive"})
    for _ in steps_of(out, resume=True, **{"kl.coef": 0.7}):
        break
    for run in steps_of(out, resume=True):
        assert run.learner.controller.coef == 0.7
        folder = SimpleNamespace(path=tmp_path / "of another rank", checkpoints=out / "checkpoints")
        rank = SimpleNamespace(**vars(run) | {"folder": folder, "first": False})
        go_on(rank, newest_whole(folder.checkpoints), [Change("seed", 0, 0)], fresh_optimizer=False)
        assert run.learner.controller.coef == 0.7, "the checkpoint has restored the old one"
        run.step()
        run.checkpoints.save()
        moved = run.learner.controller.coef
        break
    for run in steps_of(out, resume=True):
        assert run.learner.controller.coef == moved != 0.7, "from then on the checkpoint's counts"
        break


def test_a_change_recorded_by_an_old_name_still_applies(tmp_path, monkeypatch):
    cut(out := tmp_path / "run", 2, **{"kl.control": "adaptive"})
    monkeypatch.setattr(old_names, "RENAMED", {1: {"kl.price": "kl.coef"}, 2: {}})
    config = yaml.safe_load((out / "config.yaml").read_text(encoding="utf-8"))
    del config["schema"], config["kl"]["coef"]
    config["kl"]["price"] = 0.7
    (out / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    line = '{"step": 2, "name": "kl.price", "old": 0.1, "new": 0.7}\n'
    (out / "changes.jsonl").write_text(line + '{"step": 2, "na', encoding="utf-8")  # a full disk left half a line
    for run in steps_of(out, resume=True, **{"optimizer.lr": 5e-4}):
        assert run.learner.controller.coef == 0.7
        break
    first, second = map(json.loads, (out / "changes.jsonl").read_text(encoding="utf-8").splitlines())
    assert "schema" not in first and second["schema"] == old_names.SCHEMA and second["name"] == "optimizer.lr"


@cases(*[tuple(json.loads(row)) for row in parts("options.txt")["fixed on resume"].splitlines()])
def test_what_cannot_change_is_refused_before_anything_loads(given, sentence, stopped, monkeypatch):
    def held():
        return {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}

    before = held()
    monkeypatch.setattr("operant.runs.trainer.build", lambda *a, **k: pytest.fail("it loads"))
    with pytest.raises(OperantError, match=sentence):
        again(stopped, **given)
    assert held() == before


def test_the_command_line_goes_on_changes_and_ends(folder, capsys):
    assert main(command(folder)) == 0
    run = str(folder / "run")
    capsys.readouterr()
    assert main(["train", "--resume", run]) == 0
    assert "is finished: 2 of 2 steps; --steps 4 would continue it" in capsys.readouterr().out
    (folder / "run/lock").touch()  # a process was killed before its end, and what it had exported is of fewer steps
    assert main(["train", "--resume", run]) == 0 and not (folder / "run/lock").exists()
    assert main(["train", "--resume", run, "--steps", "3", "--kl.coef", "0.5"]) == 0
    lines = [json.loads(x) for x in (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[-1]["kl/coef"] == 0.5
    assert main(["train", "--resume", run, "--steps", "2", "--kl.coef", "0.7"]) == 0
    said = "is finished: 3 of 3 steps; --steps 6 would continue it; kl.coef would change with it, and is not stored"
    assert said in capsys.readouterr().out
    for words, sentence in (
        (["--policy", "builtin:reviews-lm"], "policy='builtin:reviews-lm' with --resume"),
        (["--out", "elsewhere"], "--out elsewhere beside --resume"),
        (["--steps", "many"], "steps='many'"),
    ):
        assert main(["train", "--resume", run, *words]) == 2 and sentence in capsys.readouterr().err
    assert main(["train", "letters", "--fresh-optimizer"]) == 2
    assert "fresh_optimizer without resume" in capsys.readouterr().err


def test_what_was_evaluated_before_training_is_compared_with_its_like(folder, capsys):
    held = folder / "held.txt"
    held.write_text("ab\ncd\n", encoding="utf-8")
    assert main(command(folder, "--evaluate", str(held))) == 0
    more = ["train", "--resume", str(folder / "run"), "--steps", "3"]
    for option, value in (("evaluation.samples", "2"), ("evaluate", str(folder / "tasks.txt"))):
        assert main([*more, f"--{option}", value]) == 2 and f"{option}=" in capsys.readouterr().err
    held.write_text("ab\ncd\nef\n", encoding="utf-8")
    assert main(more) == 0 and "the held-out tasks are others than before training" in log(folder / "run")
    judged = json.loads((folder / "run/evaluation.json").read_text(encoding="utf-8"))
    assert judged["before"] is None and len(judged["after"]["replies"]) == 3
    assert main([*more[:-1], "4", "--evaluate", "none"]) == 0
    assert not (folder / "run/evaluation.json").exists(), "it was of step 3"


def test_metrics_that_a_resume_adds_keep_the_evaluation_before(tmp_path):
    rows = [{"prompt": text, "completion": "a"} for text in TASKS]
    given = {"tokenizer": letters(), "algorithm": "sft", "evaluate": rows, "out": tmp_path / "run"}
    first = train(model(), rows, **SMALL | given | {"steps": 1})
    run = train(model(), rows, resume=True, steps=2, **given, **{"evaluation.metrics": "distinct"})
    assert run.before.loss == first.before.loss > run.after.loss and len(run.after.rollouts) == 5


def test_scores_of_another_reward_or_metric_are_not_compared(tmp_path):
    given = {"tokenizer": letters(), "evaluate": TASKS, "out": tmp_path / "run", "optimizer.lr": 0.0}
    train(model(), TASKS, "letters:a", **SMALL | given | {"steps": 2, "evaluation.metrics": "distinct"})
    more = given | {"resume": True, "evaluation.metrics": {"distinct": {"n": 1}}}
    run = train(model(), TASKS, "letters:a", steps=3, **more)
    assert run.before.mean == run.after.mean and run.after.measured.of_all and not run.before.measured.of_all
    again = train(model(), TASKS, {"letters:a": 2.0}, steps=15, max_tokens=4, **more)
    assert again.before is None and "probe/reward_before" not in again.metrics[-1]
    assert "reward, sampling.max_tokens changed: held-out results from before training" in log(tmp_path / "run")
    assert int(progress(read_history(tmp_path / "run")).steps[0].split()[2]) > 3, "a verdict begins behind the change"


def test_fewer_steps_than_a_stopped_run_has_done_are_refused(stopped):
    with pytest.raises(OperantError, match="steps=2 with --resume: the run has done 3 steps; give at least as many"):
        again(stopped, steps=2)


# --- what is cut back -----------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_what_came_after_the_checkpoint_is_cut_to_the_byte(tmp_path):
    """A longer log, a torn one, and one with garbage: the run that follows is the one that never stopped."""
    whole = train(model(), TASKS, count_a, out=tmp_path / "whole", **options(probes=2, probe_every=1))
    cut(tmp_path / "cut", 3, probes=2, probe_every=1)
    for number, tail in enumerate((b"", b'{"step": 4, "rew', b"\x00\xff\xfe garbage\nmore\n")):
        out = tmp_path / f"cut-{number}"
        shutil.copytree(tmp_path / "cut", out)
        shutil.rmtree(out / "checkpoints/step-00003", ignore_errors=True)
        for name in ("metrics.jsonl", "distributions.jsonl"):
            with open(out / name, "ab") as file:
                file.write(tail)
        (out / "rollouts/.step-00004.parquet.1.tmp").write_bytes(b"PAR1")
        (out / "refused/step-00003").mkdir(parents=True)
        run = again(out)
        assert told(run) == told(whole), tail
        assert same(run, whole)
        for kind in ("rollouts", "probes"):
            names = sorted(path.name for path in (whole.path / kind).iterdir())
            assert sorted(path.name for path in (out / kind).iterdir()) == names
        assert not list((out / "refused").iterdir())


def test_rollouts_and_probes_of_later_steps_are_deleted(tmp_path):
    cut(tmp_path / "run", 1, probes=2, probe_every=1, checkpoint_minutes=60.0)
    given = {"policy": model(), "tasks": TASKS, "reward": count_a, "tokenizer": letters(), "resume": True}
    for run in runs(tmp_path / "run", **given):
        assert not list(run.folder.rollouts_path.iterdir())
        assert [p.name for p in run.folder.probes_path.glob("step-*")] == ["step-00000.parquet"]
        break


@cases(
    ("metrics.jsonl", lambda lines: lines[0] + lines[1][:9], [2, 3]),
    ("metrics.jsonl", None, [1, 2, 3]),
    ("distributions.jsonl", lambda lines: lines[0] + lines[2] + b'{"step": 4, "pad": "%s"}\n' % (9999 * b"x"), [2]),
)
def test_lost_lines_are_said_and_the_others_stay(name, left, lost, stopped, capfd):
    path = stopped / name
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(left(lines)) if left else path.unlink()
    again(stopped)
    named = ", ".join(map(str, lost))
    assert f"{name} lacks its lines of {len(lost)} of 3 steps ({named})" in capfd.readouterr().err
    assert [record["step"] for record in atomic_io.records(path)] == [n for n in (1, 2, 3, 4) if n not in lost]


def test_a_kill_before_the_first_checkpoint_is_a_fresh_start(tmp_path):
    whole = train(model(), TASKS, count_a, out=tmp_path / "whole", **options(steps=2))
    cut(tmp_path / "cut", 1, steps=2, checkpoint_minutes=60.0)
    assert newest_whole(tmp_path / "cut/checkpoints") is None
    (tmp_path / "cut/metrics.jsonl").write_bytes(b"\xff garbage")
    run = again(tmp_path / "cut")
    assert told(run) == told(whole) and same(run, whole)


# --- what was found out by measuring --------------------------------------------------------------------------------
def test_what_was_measured_is_taken_from_the_checkpoint(tmp_path, monkeypatch):
    """Threads, the ways of computing that the probe found to agree, and the tokens that memory held."""
    out, ran = tmp_path / "run", torch.get_num_threads()
    threads = [ran]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for run in steps_of(out):
        run.policy.modes = replace(run.policy.modes, cached=False, pooled=False)
        run.learner.budget.tokens = 512
        assert run.step()["step"] == 1
        torch.set_num_threads(2)
        run.checkpoints.save()
        torch.set_num_threads(ran)
        break
    for run in steps_of(out, resume=True):
        assert torch.get_num_threads() == 2
        assert not run.policy.modes.cached and not run.policy.modes.pooled and run.policy.modes.padded
        assert run.learner.reference.policy.modes.cached is not False, "each model has its own"
        assert run.learner.budget.tokens == 512
        break
    assert torch.get_num_threads() == ran and "torch computes with 2 threads as when the run began" in log(out)
    assert "not bit-identically" not in log(out)
    for run in steps_of(out, resume=True, **{"update.micro_tokens": 2048}):
        assert run.learner.budget.tokens == 2048, "also above what the checkpoint has"
        run.learner.budget.tokens //= 2  # memory ran out
        run.step()
        run.checkpoints.save()
        break
    for run in steps_of(out, resume=True):
        assert run.learner.budget.tokens == 1024, "the checkpoint has what fitted"
        break


def steps_of(out, **given):
    begun = {} if given.get("resume") else SMALL
    return runs(out, policy=model(), tasks=TASKS, reward=count_a, tokenizer=letters(), **begun, **given)


def test_writing_a_checkpoint_changes_nothing_in_the_run(tmp_path):
    often = train(model(), TASKS, count_a, out=tmp_path / "often", **options(steps=3, checkpoint="both"))
    never = train(model(), TASKS, count_a, out=tmp_path / "never", **options(steps=3, checkpoint_minutes=60.0))
    assert told(often) == told(never) and same(often, never)


@pytest.mark.parametrize("init", ["torch", "normal"])
def test_a_new_critic_is_drawn_from_the_seed(init):
    def head(seed):
        given = {"tokenizer": letters(), "value.init": init, "seed": seed}
        return Learner(lm("gpt2", vocab=len(letters())), **given).policy.value_head.state_dict()

    torch.manual_seed(1)
    first = head(3)
    torch.manual_seed(2)
    second, other = head(3), head(4)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


# --- a user's own state -----------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda r: r, lambda r: {"grumpy": (r, 2.0)}], ids=["alone", "in a sum"])
def test_a_reward_that_changes_goes_on_where_it_was(tmp_path, wrap):
    from operant.rewards.combine import weighted

    def reward(**given):
        made = wrap(Grumpy(**given))
        return weighted(made) if isinstance(made, dict) else made

    looks = {"probes": 2, "probe_every": 1, "evaluate": TASKS, "evaluate_every": 1}
    whole = train(model(), TASKS, reward(), out=tmp_path / "whole", **options(**looks))
    cut(tmp_path / "cut", 2, reward(), **looks)
    assert told(again(tmp_path / "cut", reward(), evaluate=TASKS)) == told(whole)
    plain = train(model(), TASKS, reward(), out=tmp_path / "plain", **options())
    assert [m["reward/mean"] for m in told(plain)] == [m["reward/mean"] for m in told(whole)], "looks count for nothing"


def test_a_world_and_a_source_register_too_and_a_module_does_not(tmp_path):
    class World(SingleTurn):
        state_dict, load_state_dict = Grumpy.state_dict, Grumpy.load_state_dict
        asked = 5

    class Source(list):
        state_dict, load_state_dict = Grumpy.state_dict, Grumpy.load_state_dict
        asked = 7

    class Fixed(torch.nn.Linear):
        def forward(self, rollouts):
            return [1.0] * len(rollouts)

    given = options(reward=Fixed(1, 1), env=World(), tasks=Source(TASKS))
    for run in runs(tmp_path / "run", policy=model(), **given):
        assert run.state.stateful == ["env", "source"]
        run.checkpoints.save()
        break
    given["env"].asked = given["tasks"].asked = 0
    for _ in runs(tmp_path / "run", policy=model(), resume=True, **given):
        assert (given["env"].asked, given["tasks"].asked) == (5, 7)
        break


def test_a_checkpoint_is_not_written_again_at_the_end(tmp_path):
    written = []
    for run in runs(tmp_path / "run", policy=model(), tasks=TASKS, reward=count_a, **options()):
        if not run.metrics:
            save = run.state.save
            run.state.save = lambda *given, save=save, **more: (written.append(given[1]), save(*given, **more))[1]
    assert written == [1, 2, 3, 4]


def test_a_reward_that_fails_is_asked_again_as_it_was_before(tmp_path):
    whole = train(model(), TASKS, Grumpy(), out=tmp_path / "whole", **options(steps=2))
    with pytest.raises(OperantError, match="enough"):
        train(model(), TASKS, Grumpy(fails=2), out=tmp_path / "cut", **options(steps=2))
    assert told(again(tmp_path / "cut", Grumpy())) == told(whole)


def test_held_out_tasks_that_nobody_judges_stop_no_checkpoint(tmp_path):
    def only_training(rollouts):
        return [None if r.task.id.startswith("held") else 1.0 for r in rollouts]

    held = [Task(f"held/{i}", text) for i, text in enumerate(TASKS)]
    cut(tmp_path / "run", 1, only_training, steps=2, evaluate=held)
    config = tmp_path / "run/config.yaml"
    for listed in ("<list of 5>", "[<Task>, <Task>]", "[{text: a, target: <int64>}]"):  # the last by earlier versions
        config.write_text(re.sub("(?m)^evaluate: .*", f"evaluate: {listed}", config.read_text(encoding="utf-8")))
        with pytest.raises(OperantError, match="was started from Python with evaluate="):
            again(tmp_path / "run", only_training)
    run = again(tmp_path / "run", only_training, evaluate=held)
    assert len(told(run)) == 2 and run.before.mean != run.before.mean


# --- light ------------------------------------------------------------------------------------------------------------
def test_a_light_checkpoint_goes_on_with_a_fresh_optimizer_alone(tmp_path, capsys):
    cut(out := tmp_path / "run", 2, checkpoint="light", **{"kl.control": "adaptive", "kl.horizon": 10})
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == ["light-00001", "light-00002"]
    with pytest.raises(OperantError, match="--fresh-optimizer"):
        again(out)
    run = again(out, fresh_optimizer=True, steps=3, **{"optimizer.states": "8bit"})
    assert "light-00002, with a fresh optimizer" in log(out)
    lines = told(run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert run.parts.order.position == 3 * 4, "tasks go on where they were"
    assert lines[2]["kl/coef"] != lines[1]["kl/coef"] != 0.1, "and so does what KL costs"
    steps_taken = {int(state["step"]) for state in run.learner.optimizer.state.values()}
    assert steps_taken == {4}, "of one step: 2 epochs of 2 minibatches"


@cases(
    ({"algorithm": "soft_q"}, True),
    ({"algorithm": "nlpo", "top_p": 0.9}, True),
    ({"algorithm": "nlpo", "top_p": 0.9, "mask.every": 0}, False),
)
def test_copies_follow_the_weights_of_a_light_checkpoint(given, follows, tmp_path):
    cut(out := tmp_path / "run", 1, checkpoint="light", **given)
    for run in steps_of(out, resume=True, fresh_optimizer=True):
        [copied] = [copied for name, copied in run.learner.copies.items() if name != "reference"]
        assert same(copied, run) is follows
        break


# --- which checkpoints ------------------------------------------------------------------------------------------------
def test_checkpoints_by_step_those_that_stay_and_the_best(tmp_path):
    scores = {3: 5.0}

    def rigged(rollouts):
        rigged.step += 1
        return [scores.get(rigged.step, 1.0)] * len(rollouts)

    rigged.step = 0
    given = {"checkpoint_minutes": 60.0, "checkpoint_every": 2, "keep": 1, "keep_every": 4, "best": "reward/mean"}
    run = train(model(), TASKS, rigged, out=tmp_path / "run", **options(**given) | {"steps": 9})
    left = sorted(path.name for path in (run.path / "checkpoints").iterdir())
    assert left == ["step-00003", "step-00004", "step-00008", "step-00009"]
    sizes = {line["step"]: line["checkpoint/bytes"] for line in run.metrics if "checkpoint/bytes" in line}
    assert list(sizes) == [2, 3, 4, 5, 7, 9], "after the first and third as the best, the even ones"
    assert sizes[9] == sum(file.stat().st_size for file in (run.path / "checkpoints/step-00008").iterdir())
    again(run.path, rigged, steps=10, best="rollout/count")  # 4.0 of it are compared with no reward of 5.0
    assert json.loads((run.path / "best/best.json").read_text(encoding="utf-8"))["step"] == 10
    assert all(("time/checkpoint" in line) == (line["step"] in sizes) for line in run.metrics)


def test_a_loop_over_steps_goes_on_behind_the_last_one(tmp_path):
    train(model(), TASKS, count_a, out=(out := tmp_path / "run"), **options(evaluate="40%") | {"steps": 3})
    found = steps(model(), TASKS[::-1], count_a, out=out, resume=True, steps=4, tokenizer=letters(), quiet=True)
    assert [metrics["step"] for metrics in found] == [4] and "the tasks are others than those before" in log(out)
    assert "it may have trained on some that are held out now" in log(out)


def test_a_text_in_angle_brackets_is_no_object(tmp_path):
    (tmp_path / "world.py").write_text("class Mode: pass\n\n\ndef world(task, cue='', mode=Mode()):\n    yield 'a'\n")
    given = {"tokenizer": letters(), "env": f"{tmp_path}/world.py:world", "env.cue": "<answer>"}
    run = train(model(), TASKS, "letters:a", out=tmp_path / "run", **given, **SMALL | {"steps": 1})
    options = stored_options(run.path, {"policy": model(), "steps": 2})
    assert options["env.cue"] == "<answer>" and "env.mode" not in options


@cases(
    ([Task("a", "b")] * 3, "<list of 3>"),
    ([{"prompt": "a", "target": np.float64(0.5)}, np.str_("b"), np.int64(2)], [{"prompt": "a", "target": 0.5}, "b", 2]),
    ids=["objects", "numpy"],
)
def test_lists_are_written_so_that_they_can_be_read(given, written):
    assert parse(yaml.safe_dump(describe(given)), "x") == written
    long = configure({"policy": "builtin:reviews-lm", "tasks": ["b"] * 100_000, "reward": "letters:e"})
    assert as_mapping(long)["tasks"] == "<list of 100000>"
