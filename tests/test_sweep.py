"""Sweeps: their points and the names of these; real runs that fail, are interrupted and are resumed."""

import collections
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml
from cases import cases, slow
from processes import Forked
from run_folders import run as write_run
from texts import mistyped
from toys import letters, lm, on_disk

from operant import OperantError
from operant.storage import old_names
from operant.tools.cli import main
from operant.tools.report.runs import expand, grouped, read_runs, swept
from operant.tools.sweep import ProgressPrinter, SweepOptions, sweep
from operant.tools.sweep.grid import LONGEST, Axis, Point, Range, canonical, divide, draw, grid, split
from operant.tools.sweep.processes import Exit, RunCommand, environment
from operant.tools.sweep.state import make_plan, progress, remember


def axes_of(**options):
    axes, _ = divide({name.replace("__", "."): text for name, text in options.items()}, "letters")
    return axes


# --- which points -----------------------------------------------------------------------------------------------------
def test_a_grid_has_every_combination_once():
    points = grid(axes_of(kl__coef="0,0.02,2", seed="1,2"))
    assert [p.name for p in points] == [f"kl.coef={c},seed={s}" for c in ("0", "0.02", "2") for s in (1, 2)]
    assert points[3].values == {"kl.coef": "0.02", "learner.seed": "2"}

    (axis,) = axes_of(coef="0.10,1e-1,0.1,.5")
    assert axis == Axis("kl.coef", ("0.1", "0.5")), "a value has one spelling, and counts once"
    axes, fixed = divide({"kl.coef": "0,1", "steps": "3", "sampling.fixed_length": True}, "letters")
    assert [a.name for a in axes] == ["kl.coef"] and fixed == {"steps": "3", "sampling.fixed_length": "true"}


def test_values_with_commas_stand_in_brackets():
    assert split("[0.9,0.95],[0.9,0.99]") == ["[0.9,0.95]", "[0.9,0.99]"]
    assert split("{letters:e: 1, length:5: 0.5},letters:e") == ["{letters:e: 1, length:5: 0.5}", "letters:e"]
    (axis,) = axes_of(betas="[0.9,0.95],[0.9,0.99]")
    assert axis.values == ("0.9,0.95", "0.9,0.99")
    assert grid([axis])[0].name == "optimizer.betas=0.9+0.95"
    axes, fixed = divide({"betas": "0.9,0.95", "seed": "1,2"}, "letters")
    assert fixed == {"optimizer.betas": "0.9,0.95"} and len(axes) == 1, "an option that is a tuple is no axis by itself"
    more = {"data.template": "[INST] {text} [/INST]"}
    assert divide({"seed": "1,2"} | more, "letters")[1] == more, "no brackets around the value"
    assert canonical("s", "[[END],[/INST]]", tuple[str, ...]) == "[END],[/INST]"
    for more in ({"reward": "{letters:e: 1, length:5: 0.5}"}, {"preset": "sdpo", "teacher.rate": "0.1"}):
        assert [axis.name for axis in divide({"seed": "1,2"} | more, "letters")[0]] == ["learner.seed"]


def test_draws_are_distinct_the_same_every_time_and_begin_alike():
    axes = axes_of(lr="1e-5..1e-3", kl__coef="0.1..0.5", max_tokens="5..8", seed="1,2,3")
    names = [p.name for p in draw(axes, 40, seed=7)]
    assert len(set(names)) == 40 and names[:10] == [p.name for p in draw(axes, 10, seed=7)]
    assert names != [p.name for p in draw(axes, 40, seed=8)]
    few = axes_of(kl__coef="0,1", seed="1,2,3")
    assert {p.name for p in draw(few, 6)} == {p.name for p in grid(few)}
    # Fixed here, because a sweep that is resumed with a later version must have the same points.
    assert names[0] == "kl.coef=0.312,optimizer.lr=0.000151,sampling.max_tokens=7,seed=3"


def test_ranges_are_drawn_evenly_on_their_scale():
    def shares(axis, edges):
        values = [float(p.values[axis.name]) for p in draw([axis], 600)]
        assert min(values) >= edges[0] and max(values) <= edges[-1]
        return [sum(a <= v < b for v in values) / len(values) for a, b in itertools.pairwise(edges)]

    log = shares(Axis("optimizer.lr", Range(1e-5, 1e-2, False)), [1e-5, 1e-4, 1e-3, 1.01e-2])
    even = shares(Axis("kl.coef", Range(0.0, 9.0, False)), [0.0, 3.0, 6.0, 9.01])
    assert all(abs(share - 1 / 3) < 0.06 for share in log + even), (log, even)


def test_whole_numbers_stay_whole_and_reach_both_ends():
    values = collections.Counter(Range(5, 8, True).at(i / 1000) for i in range(1000))
    assert set(values) == {"5", "6", "7", "8"} and max(values.values()) - min(values.values()) <= 2
    wide = [int(Range(1, 1000, True).at(i / 20_000)) for i in range(20_000)]
    assert set(wide) == set(range(1, 1001)) and 10 < wide[10_000] < 100, "the middle of a logarithmic range"


@cases("a/b", "..", "letters:e", "x" * 400, "{letters:e: 1.0, 'length:5': 2}", "ü", "a b", "con\n", "a\\b", "*?")
def test_names_are_safe_for_file_systems(value, tmp_path):
    name = Point({"reward": value, "kl.coef": "0.1"}).name
    assert re.fullmatch(r"[\w.,=+-]+", name, re.ASCII) and len(name) <= LONGEST
    (tmp_path / name).mkdir()
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert name != Point({"reward": value + "!", "kl.coef": "0.1"}).name
    assert name == Point({"kl.coef": "0.1", "reward": value}).name


@pytest.mark.parametrize(("words", "sentence"), mistyped("sweep"))
def test_all_is_checked_before_anything_starts(words, sentence, capsys, here):
    assert main(["sweep", *(["letters"] if words else []), *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not list(here.iterdir()), "nothing is left behind"


# --- the folder -------------------------------------------------------------------------------------------------------
def test_a_sweep_may_grow_but_not_change(tmp_path):
    folder = tmp_path / "sweep"
    remember(folder, make_plan({"kl.coef": "0,0.1", "steps": "3"}, "letters"))
    remember(folder, make_plan({"kl.coef": "0.1,2", "seed": "1,1", "steps": "3"}, "letters"))
    remember(folder, make_plan({"kl.coef": "0.1,2", "seed": "1,2", "steps": "3"}, "letters"))
    recorded = yaml.safe_load((folder / "sweep.yaml").read_text(encoding="utf-8"))
    assert recorded["recipe"] == "letters" and recorded["fixed"]["steps"] == 3
    assert "learner.seed" not in recorded["fixed"]
    write_run(folder / "kl.coef=0", steps=3, learner={"seed": 0})
    assert recorded["axes"] == {"kl.coef": ["0", "0.1", "2"], "learner.seed": ["1", "2"]}
    for given, printed in (
        ({"kl.coef": "0,0.1", "steps": "4"}, "steps 3, now 4"),
        ({"kl.coef": "0,0.1", "steps": "3", "seed": "5"}, "learner.seed 0, now 5"),
        ({"kl.coef": "0,0.1", "steps": "3", "max_tokens": "7"}, "sampling.max_tokens 20, now 7"),
    ):
        with pytest.raises(OperantError, match=printed):
            remember(folder, make_plan(given, "letters"))
    with pytest.raises(OperantError, match="recipe 'letters', now 'sentiment'"):
        remember(folder, make_plan({"kl.coef": "0,0.1", "steps": "3"}, "sentiment"))


def test_a_sweep_that_was_recorded_with_old_names_is_continued_and_compared(tmp_path):
    folder = tmp_path / "sweep"
    for seconds in (5, 6):
        write_run(folder / f"guests.timeout={seconds}", guests={"timeout": float(seconds), "workers": 2})
    old = "recipe: letters\naxes: {guests.timeout: ['5', '6']}\nfixed: {guests.workers: 2, steps: 2}\n"
    (folder / "sweep.yaml").write_text(old, encoding="utf-8")
    assert swept([folder]) == ["isolation.timeout"]
    groups = grouped(read_runs([folder]), swept([folder]))
    assert [group.values for group in groups] == [{"isolation.timeout": 5.0}, {"isolation.timeout": 6.0}]

    with pytest.raises(OperantError, match=r"isolation\.workers 2, now 3"):
        remember(folder, make_plan({"isolation.timeout": "5,6,7", "isolation.workers": "3", "steps": "2"}, "letters"))
    remember(folder, make_plan({"isolation.timeout": "5,6,7", "isolation.workers": "2", "steps": "2"}, "letters"))
    recorded = yaml.safe_load((folder / "sweep.yaml").read_text(encoding="utf-8"))
    assert recorded["schema"] == old_names.SCHEMA and recorded["axes"] == {"isolation.timeout": ["5", "6", "7"]}
    assert [path.name for path in expand([folder])] == ["isolation.timeout=5", "isolation.timeout=6"], "not run again"


@cases(
    ("sweep.yaml", "axes: {guests.timeout: [1, 2], isolation.timeout: [3]}", r"sweep\.yaml .*both 'guests.timeout'"),
    ("sweep.yaml", "schema: 99\naxes: {}", r"sweep\.yaml .*has schema 99"),
    ("sweep.yaml", "axes: [kl.coef]", r"sweep\.yaml .*must be a mapping"),
    ("thesis.tex", "years of work", r"is not empty and has no sweep\.yaml"),
)
def test_a_record_of_a_sweep_that_cannot_be_read_is_refused(name, text, sentence, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(OperantError, match=sentence):
        remember(tmp_path, make_plan({"kl.coef": "0,1"}, "letters"))


def test_how_far_a_run_is(tmp_path):
    folder = tmp_path / "run"
    assert progress(folder) == "missing"
    folder.mkdir()
    (folder / "probe").touch()
    assert progress(folder) == "missing" and not folder.exists(), "a start that was killed is cleared away"
    folder.mkdir()
    (folder / "notes.txt").touch()
    with pytest.raises(OperantError, match="is in the way"):
        progress(folder)
    (folder / "config.yaml").write_text("steps: 2\nevaluate: builtin:openings/held-out\n", encoding="utf-8")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n', encoding="utf-8")
    (folder / "export").mkdir()
    (folder / "export/config.json").touch()
    assert progress(folder) == "begun", "the held-out tasks were not judged yet"
    (folder / "evaluation.json").touch()
    assert progress(folder) == "done"
    (folder / "lock").touch()
    assert progress(folder) == "begun", "a process was killed while it wrote the model"
    (folder / "lock").unlink()
    (folder / "config.yaml").write_text("steps: 3\n", encoding="utf-8")
    assert progress(folder) == "begun"


def test_children_share_the_cores(monkeypatch):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [environment(n)["OMP_NUM_THREADS"] for n in (1, 64 * cores)] == [str(cores), "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert environment(1)["OMP_NUM_THREADS"] == "3", "a value that is already set stays"


# --- real runs --------------------------------------------------------------------------------------------------------
REWARDS = """
from pathlib import Path

HERE = Path(__file__).parent


def fine(rollouts):
    return [len(r.reply) for r in rollouts]


def broken(rollouts):  # fails from the second step on, until the file `mended` exists
    if any(HERE.glob("sweep/*broken*/metrics.jsonl")) and not (HERE / "mended").exists():
        raise RuntimeError("the sensor is dirty")
    return fine(rollouts)
"""


@pytest.fixture
def place(here):
    """The working folder, with a recipe for a tiny language model and rewards of its own."""
    on_disk("model", lm("gpt2", vocab=len(letters()), spread=0.02))
    (here / "tasks.txt").write_text("ab\ncde\nfg\nh\n", encoding="utf-8")
    (here / "rewards.py").write_text(REWARDS, encoding="utf-8")
    recipe = {"policy": "model", "tasks": "tasks.txt", "evaluate": "tasks.txt", "reward": "rewards.py:fine"}
    recipe |= {"steps": 2, "batch": 4, "probes": 0, "sampling": {"max_tokens": 6}}
    recipe |= {"update": {"minibatch": 4, "epochs": 1}}
    (here / "tiny.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return here


def steps_of(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@cases(("resume", "1 done, 1 to resume;"), ("light", "1 done, 1 to resume with a new optimizer;"))
def test_a_run_that_fails_ends_no_other_and_goes_on_once_it_is_mended(kept, said, place, monkeypatch, capfd):
    Forked.instead(monkeypatch)
    given, options = {"reward": "rewards.py:broken,rewards.py:fine", "checkpoint": kept}, SweepOptions(out="sweep")
    assert sweep(given, "tiny.yaml", options) == 1
    printed = capfd.readouterr().out
    broken, fine = (next(place.glob(f"sweep/*{name}*")) for name in ("broken", "fine"))
    assert f"{broken.name} failed: it ended with exit code 2" in printed and "the sensor is dirty" in printed
    assert f"1/2 {fine.name}" in printed and "1 of 2 runs failed" in printed
    assert steps_of(broken) == [1] and steps_of(fine) == [1, 2]
    assert (place / "sweep/report.html").exists() and fine.name in printed.split("\n\n")[1]

    (place / "mended").touch()
    written = (fine / "metrics.jsonl").stat().st_mtime_ns
    assert sweep(given, "tiny.yaml", options) == 0
    printed = capfd.readouterr().out
    assert said in printed and "2/2" in printed
    assert steps_of(broken) == [1, 2] and (fine / "metrics.jsonl").stat().st_mtime_ns == written
    assert sorted(p.name for p in (place / "sweep").iterdir() if p.is_dir()) == sorted([broken.name, fine.name, "logs"])


@cases(
    ("none.txt", 2),  # whatever the other values are
    slow("none.txt,tasks.txt", 4),  # the last combination is not refused
    slow("none.txt,nil.txt", 4),  # refused with another sentence
)
def test_a_sweep_whose_runs_are_all_refused_alike_stops_after_the_second(tasks, begun, place, monkeypatch, capfd):
    Forked.instead(monkeypatch)
    more = {} if "," in tasks else {"kl.coef": "0,0.1"}
    assert sweep({"tasks": tasks, "seed": "1,2", "steps": "1", **more}, "tiny.yaml", SweepOptions(out="sweep")) == 1
    printed = capfd.readouterr().out
    assert len([*place.glob("sweep/logs/*.txt")]) == begun
    assert ("so the other 2 were not started" in printed) is (begun == 2), printed


def test_only_the_first_and_the_last_combination_can_stop_a_sweep(tmp_path):
    printer, refused = ProgressPrinter(4, 0, {"a", "b"}), Exit(2, 1.0, ["there is no such model"])
    assert [printer.ended(RunCommand(n, tmp_path / n, []), refused, False) for n in "acb"] == [True, True, False]


def started(place, *more):
    words = [sys.executable, "-m", "operant", "sweep", "tiny.yaml", "--steps", "400", "--out", "sweep", "--seed", "1,2"]
    return subprocess.Popen([*words, *more], cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_steps(process, folder, count):
    deadline = time.monotonic() + 180
    while not (folder / "metrics.jsonl").exists() or len(steps_of(folder)) < count:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_an_interrupt_ends_the_step_and_says_how_to_go_on(place):
    process = started(place)
    wait_for_steps(process, place / "sweep/seed=1", 2)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "Traceback" not in printed, printed
    assert "seed=1: stopped after step" in printed and "the same command resumes the sweep" in printed
    first = place / "sweep/seed=1"
    assert list(first.glob("checkpoints/step-*")) and not (first / "lock").exists()
    assert not (place / "sweep/seed=2").exists(), "what had not begun does not begin"


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_a_second_interrupt_kills_and_a_killed_run_goes_on(place):
    process = started(place, "--at-once", "2", "--batch", "200")
    for seed in (1, 2):
        wait_for_steps(process, place / f"sweep/seed={seed}", 1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "the same command resumes the sweep" in printed, printed
    process = started(place, "--at-once", "2", "--batch", "200")
    for seed in (1, 2):
        wait_for_steps(process, place / f"sweep/seed={seed}", 2)
    os.kill(json.loads((place / "sweep/seed=1/lock").read_text(encoding="utf-8"))["pid"], signal.SIGKILL)
    wait_for_steps(process, place / "sweep/seed=2", len(steps_of(place / "sweep/seed=2")) + 2)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert "seed=1 failed: it was killed" in printed and "seed=2: stopped" in printed, printed


@pytest.mark.slow
def test_two_at_a_time_make_what_one_after_the_other_makes(place):
    given = {"kl.coef": "0,0.5", "learner.seed": "1"}
    for name, at_once in (("one", 1), ("two", 2)):
        assert sweep(given, "tiny.yaml", SweepOptions(out=name, at_once=at_once)) == 0
    for point in ("kl.coef=0", "kl.coef=0.5"):
        last = [max((place / name / point / "rollouts").iterdir()) for name in ("one", "two")]
        assert last[0].name == last[1].name and last[0].read_bytes() == last[1].read_bytes()
