"""What `train` shows from Python: the command line's lines in a terminal, a live chart in a notebook, or nothing."""

import json
import re
import sys
from html import escape, unescape
from types import SimpleNamespace

import pytest
import torch
from cases import cases
from toys import letters, lm

from operant import Observer, steps, train
from operant.runs.trackers import notebook
from operant.runs.trackers.notebook import Chart, in_notebook
from operant.tools.report.display import summary

SMALL = {"policy": None, "tokenizer": None, "tasks": ["ab"], "reward": len, "steps": 2, "batch": 4, "max_tokens": 4}


def given(folder, **more):
    reward = lambda rollouts: [float(len(r.ids)) for r in rollouts]  # noqa: E731
    return SMALL | {"policy": lm(vocab=40), "tokenizer": letters(), "reward": reward, "probes": 0, "out": folder} | more


def test_python_shows_what_the_command_line_shows_unless_it_is_quiet(tmp_path, capsys):
    train(**given(tmp_path / "a"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'a'}: ppo trains <") and "2 steps of 4 replies" in lines[0]
    assert [line.split("  ")[0] for line in lines if line.startswith("step")] == ["step 1/2", "step 2/2"]
    assert any(line.startswith("Too early to say (2 steps).") for line in lines)
    assert lines[-1].startswith(f"report: {tmp_path / 'a'}/report.html")
    assert len(list(steps(**given(tmp_path / "b", quiet=True)))) == 2
    assert capsys.readouterr().out == ""
    assert "IPython" not in sys.modules or not in_notebook()


@cases((124e6, 3e-4, True), (124e6, 1e-5, False), (124e6, 5e-5, False), (5e6, 3e-4, False))
def test_the_start_says_that_the_rate_of_a_small_model_is_high_for_a_large_one(weights, rate, said):
    model = torch.nn.ParameterList([torch.empty(int(weights), device="meta")])
    policy = SimpleNamespace(model=model, trainable=lambda: list(model))
    needs = SimpleNamespace(needs=SimpleNamespace(labels=False))
    learner = SimpleNamespace(algorithm=needs, option_values=lambda: {"optimizer.lr": rate})
    learner.progress = SimpleNamespace(step=0)
    train = SimpleNamespace(algorithm="ppo", policy="./mine", steps=2, batch=4)
    parts, config = SimpleNamespace(tasks=["a"]), SimpleNamespace(train=train)
    text = summary(SimpleNamespace(config=config, policy=policy, learner=learner, parts=parts))
    assert ("a rate of 0.0003 suits models of a few million parameters, so try --optimizer.lr 1e-5; " in text) is said


class Finds(Observer):
    """Writes what a run of prompts has found."""

    def at_end(self, run):
        known = {"task_model": "./gpt2", "measure": "gap", "set": "mine/train", "calls": 1234, "baselines": []}
        best = {"text": " a<b", "source": "greedy", "train": 0.75, "test": 0.5}
        found = json.dumps({"texts": {"train": 4, "test": 2, "of": "mine/test"}, "prompts": [best]} | known)
        (run.path / "prompts.json").write_text(found, encoding="utf-8")


@pytest.fixture
def cell(monkeypatch):
    """Stand in for IPython with a kernel; the list of what its cell has shown."""
    shown = []

    def display(bundle, raw, display_id):
        shown.append(bundle)
        return SimpleNamespace(update=lambda newer, raw: shown.append(newer))

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object())))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    return shown


def test_a_notebook_shows_a_chart_in_one_cell(here, capsys, cell):
    train(**given("runs/a", steps=4))
    last = cell[-1]["text/html"]
    assert capsys.readouterr().out == "" and len(cell) >= 3
    assert "step 4/4" in last and last.count("<svg") == 2 and 'href="runs/a/report.html"' in last
    assert "newest replies" in last and "4 steps" in unescape(re.sub("<[^>]+>", "", last))


def test_held_out_tasks_are_counted_and_each_is_shown_before_any_twice(tmp_path, capsys):
    train(**given(tmp_path / "a"), evaluate=["x a", "x b"], evaluation={"samples": 3})
    said = capsys.readouterr().out
    assert re.findall(r"^(x [ab])\n  before", said, re.MULTILINE) == ["x a", "x b"] * 3
    assert "mean reward on 2 held-out tasks (6 replies): " in said


ABOUT = "prompts for ./gpt2, chosen by gap on 4 texts of mine/train; held-out: mine/test"
TABLE = [
    "prompt  from                     calls  train (4)  held-out (2)",
    "' a<b'  likeliest of the policy  1,234  0.750      0.500",
]


def test_a_run_of_prompts_ends_with_their_table(tmp_path, capsys):
    train(**given(tmp_path / "a", steps=1), observers=[Finds()])
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index(TABLE[0]) + 1] == TABLE[1]


def test_a_notebook_shows_the_table_of_prompts(tmp_path, cell):
    train(**given(tmp_path / "a", steps=1), observers=[Finds()])
    assert f"<pre>{escape(chr(10).join([ABOUT, *TABLE]))}</pre>" in cell[-1]["text/html"]


def test_the_curve_is_the_metric(monkeypatch, cell):
    """By hand: 100 pixels a step; a reward of 1 +- 0.98 and one of 3, so 0.02 is at the bottom and 3.98 at the top."""
    monkeypatch.setattr(notebook, "WIDTH", notebook.LEFT + 108)
    monkeypatch.setattr(notebook, "HEIGHT", notebook.TOP + notebook.BOTTOM + 99)
    chart = Chart()
    chart.start({"steps": 2})
    for step, reward in ((1, 1.0), (2, 3.0)):
        chart.log(step, {"reward/mean": reward, "reward/std": 1.0, "rollout/count": 4, "kl/per_reply": float("nan")})
    chart.note("<script>alert(1)</script>")
    chart.close()
    html = cell[-1]["text/html"]
    assert html.count("<svg") == 1 and "<script>" not in html and "&lt;script&gt;" in html
    ((first, last),) = [line.split() for line in re.findall(r'polyline points="([^"]+)"', html)]
    assert first == f"46.0,{20 + 99 - 0.98 / 3.96 * 99:.1f}" and last == f"146.0,{20 + 0.98 / 3.96 * 99:.1f}"
    assert re.findall(r'text-anchor="end">([\d.]+)<', html) == ["3.98", "0.02", "2"]


def test_a_long_run_draws_few_points_and_the_last(cell):
    chart = Chart()
    chart.start({"steps": 1000})
    for step in range(1, 1001):
        chart.log(step, {"reward/mean": step / 1000})
    chart.close()
    points = re.findall(r'polyline points="([^"]+)"', cell[-1]["text/html"])[0].split()
    assert 200 < len(points) <= notebook.POINTS and points[-1].startswith("352.0,") and len(cell) < 20
