"""Each task end to end, on a handful of published rows and with tiny random models, which shows that the recipe, its
form, the training and the evaluation go together, and measures nothing."""

import json
from math import isfinite
from pathlib import Path

import pytest
from cases import slow_but
from published import ROWS, models, write

from operant.metrics.evaluation import metric_names
from operant.runs.config import load_recipe
from operant.tools.cli import main

TASKS = [*ROWS, "numbers", "dates"]
SHORT = (
    "--steps 2 --batch 4 --update.minibatch 4 --update.epochs 1 --probes 0 --sampling.max-tokens 6 "
    "--sampling.min-tokens 0 --data.prompt-tokens 80 --reward letters:e"
)
"""Small enough for the tiny models, with a reward that every installation has in place of those of the recipes."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    models(folder)
    for name in ROWS:
        write(folder, name)
    return folder


@pytest.mark.parametrize("name", slow_but(("extract", "dialog", "numbers"), TASKS))
def test_the_road_of_a_task(name, place, monkeypatch, capsys):
    """Two steps of a causal policy, with held-out tasks and a metric that needs references."""
    monkeypatch.chdir(place)
    run, rows = Path(f"runs/{name}"), ROWS.get(name, [])
    held_out = f"--tasks {name}.jsonl --evaluate {name}.jsonl --evaluation.metrics exact_match" if rows else ""
    code = main(["train", name, "--policy", "./causal", *held_out.split(), *SHORT.split(), "--out", str(run)])
    assert code == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    if rows:
        after = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["after"]
        assert len(after["replies"]) == {"commongen": 2, "dialog": 4}.get(name, len(rows))
        assert 0 <= after["metrics"]["exact_match"] <= 1
    if name == "extract":
        assert {reply["reply"] for reply in after["replies"]} <= {one for row in rows for one in row["source"]}


@pytest.mark.parametrize("name", slow_but(("imdb", "summarize", "extract", "totto", "dialog"), TASKS))
def test_a_recipe_trains_with_its_own_reward_and_metrics(name, place, monkeypatch, capsys):
    """A step of an encoder-decoder."""
    monkeypatch.chdir(place)
    run, rows = Path(f"runs/{name}-own"), ROWS.get(name, [])
    held_out = f"--tasks {name}.jsonl --evaluate {name}.jsonl" if rows else ""
    short = SHORT.partition(" --reward ")[0].replace("--steps 2", "--steps 1").replace("tokens 6", "tokens 20")
    words = ["train", name, "--policy", "./t5", *held_out.split(), *short.split(), "--out", str(run)]
    assert main(words) == 0, capsys.readouterr().err
    [line] = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert isfinite(line["reward/mean"])
    if rows:
        after = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["after"]
        wanted = metric_names((load_recipe(name).get("evaluation") or {}).get("metrics"))
        assert {*wanted} <= {metric.partition("/")[0] for metric in after["metrics"]}
