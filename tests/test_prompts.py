"""`operant train prompt` and `operant prompt`: folders of labelled texts as one task, the last table, refusals."""

import json

import pytest
import torch
from texts import mistyped
from transformers import AutoTokenizer

from operant import train
from operant.apps.prompts.templates import set_named
from operant.data import load_tasks
from operant.data.sources import held_out_of
from operant.models import output_mlp
from operant.runs.config import configure
from operant.runs.named_parts import form
from operant.tools.cli import main

ROWS = [("a joy", 1), ("a bore", 0), ("great fun", 1), ("dull", 0)]


@pytest.fixture
def place(tmp_path):
    """sst-2/16-13/train.tsv, and sst-2/test.tsv above it, as the splits are published."""
    folder = tmp_path / "sst-2" / "16-13"
    folder.mkdir(parents=True)
    text = "sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in ROWS)
    (folder / "train.tsv").write_text(text)
    (folder.parent / "test.tsv").write_text(text + "not good\t0\n")
    return folder


def test_a_folder_is_one_task_and_its_test_file_held_out(place):
    [task] = load_tasks(str(place), form=form("prompt", {}))
    assert task.prompt == "Prompt:" and task.target["examples"] == [list(row) for row in ROWS]
    assert set_named(task.target["name"]).words == ("terrible", "great")
    assert held_out_of(str(place)) == str(place.parent / "test.tsv")
    assert configure({"tasks": str(place)}, "prompt").train.evaluate == str(place.parent / "test.tsv")
    assert configure({"tasks": str(place), "evaluate": "x.tsv"}, "prompt").train.evaluate == "x.tsv"
    each = load_tasks(str(place), form=form("prompt", {"conditioned": True}))
    assert [one.prompt for one in each] == [text for text, _ in ROWS] and each[1].target["examples"] == [["a bore", 0]]


@pytest.fixture
def opinions(tmp_path):
    paths = []
    for source, name in (("builtin:opinions", "train"), ("builtin:opinions/held-out", "test")):
        [task] = load_tasks(source, form=form("prompt", {}))
        rows = "".join(f"{text}\t{label}\n" for text, label in task.target["examples"][:32])
        paths.append(tmp_path / f"{name}.tsv")
        paths[-1].write_text("sentence\tlabel\n" + rows, encoding="utf-8")
    return paths


@pytest.mark.slow
def test_a_run_ends_with_its_best_prompts_beside_baselines(opinions, tmp_path, capsys):
    """The accuracy of the printed prompt is counted again with transformers, one text at a time."""
    out, (some, held_out) = tmp_path / "run", opinions
    words = ["train", "prompt", "--steps", "2", "--batch", "4", "--samples", "4", "--threads", "1", "--probes", "0"]
    words += ["--tasks", str(some), "--evaluate", str(held_out)]
    words += ["--reward.words", "terrible,great", "--template", "{sentence}{prompt}"]
    assert main([*words, "--reward.examples", "8", "--data.limit", "1", "--out", str(out)]) == 0
    found = json.loads((out / "prompts.json").read_text())
    assert {row["name"] for row in found["baselines"]} == {"none", "manual", "random"}
    spent = {row["name"]: row["calls"] for row in found["baselines"]}
    assert found["calls"] == 2 * 4 * 8 + 32 * len(found["prompts"]), "of training, and of the last choice"
    assert found["calls"] - 32 < spent["random"] <= found["calls"]
    assert {one["source"] for one in found["prompts"]} == {"best in training", "greedy"}
    assert all(len(one["ids"]) == 5 for one in found["prompts"])
    assert sorted(path.name for path in (out / "export").glob("*.safetensors")) == ["adapter_model.safetensors"]
    capsys.readouterr()
    assert main(["prompt", "show", str(out)]) == 0
    shown, best = capsys.readouterr(), found["prompts"][0]
    assert shown.out.rstrip("\n") == "{sentence}" + best["text"]
    assert f"{best['test']:.3f}" in shown.err and "random" in shown.err
    assert recounted(best["text"], opinions) == pytest.approx(best["test"])
    assert main(["prompt", "transfer", str(out), "--task-model", "builtin:reviews-lm", "--best", "1"]) == 0
    moved = [row["test"] for row in json.loads((out / "prompts.json").read_text())["transfer"]]
    assert moved == pytest.approx([{row["name"]: row["test"] for row in found["baselines"]}["none"], best["test"]])
    (out / "prompts.json").write_text(json.dumps(found | {"calibrate": "mean"}))
    transfer = ["prompt", "transfer", str(out), "--task-model", "builtin:reviews-lm", "--best", "1"]
    assert main([*transfer, "--template", "{prompt} {sentence} It was"]) == 0
    rows = json.loads((out / "prompts.json").read_text())["transfer"]
    assert {row["template"] for row in rows} == {"{prompt} {sentence} It was"}
    assert main(transfer) == 0
    calibrated = json.loads((out / "prompts.json").read_text())["transfer"][0]["test"]
    assert (
        calibrated == pytest.approx(recounted("", opinions, calibrated=True)) != pytest.approx(recounted("", opinions))
    )


def recounted(written, sources, calibrated=False):
    """The accuracy of a prompt on the second source; calibrated: less the mean log-probs on the first one."""
    from transformers import AutoModelForCausalLM

    from operant.storage.hub import find_model

    folder = find_model("builtin:reviews-lm")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    answers = [tokenizer.encode(f" {word}")[0] for word in ("terrible", "great")]
    known = []
    for source in sources:
        [task] = load_tasks(str(source), form=form("prompt", {}))
        texts = [torch.tensor([tokenizer.encode(text + written)]) for text, _ in task.target["examples"]]
        with torch.no_grad():
            known.append(torch.stack([model(ids).logits[0, -1].log_softmax(-1)[answers] for ids in texts]))
    labels = torch.tensor([label for _, label in task.target["examples"]])
    return float(((known[1] - known[0].mean(0) if calibrated else known[1]).argmax(-1) == labels).double().mean())


@pytest.mark.parametrize(("words", "message"), mistyped("prompts"))
def test_what_cannot_be_is_a_sentence_and_leaves_nothing(words, message, tmp_path, monkeypatch, capsys):
    asked = "def fails(texts):\n    return {}['answer']\ndef other(texts):\n    return ['positive'] * len(texts)\n"
    (tmp_path / "asked.py").write_text(asked, encoding="utf-8")
    (tmp_path / "two.tsv").write_text("sentence\tlabel\ndull\t0\na joy\t1\n", encoding="utf-8")
    (tmp_path / "none.tsv").write_text("sentence\tlabel\n", encoding="utf-8")
    (tmp_path / "none.csv").touch()
    (tmp_path / "three.tsv").write_text("sentence\tlabel\ndull\t0\na joy\t1\nso\t2\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main([*words, *(["--steps", "1"] if words[0] == "train" else [])]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_a_search_compares_named_baselines_at_equal_calls(place, tmp_path, capsys):
    words = ["prompt", "search", "--tasks", str(place), "--task-model", "builtin:reviews-lm", "--calls", "40"]
    names = ["--baselines", "none,random+mean,halving", "--seeds", "2", "--out", str(tmp_path / "rows.json")]
    assert main([*words, *names, "--template", "{sentence}{prompt}"]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["name"], row["seed"]) for row in rows] == [
        ("none", 0), ("random", 0), ("random", 1), ("halving", 0), ("halving", 1),
    ]  # fmt: skip
    assert all(row["calls"] <= 40 for row in rows) and "random, mean calibration" in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_keeps_its_best_prompts(opinions, tmp_path):
    options = {"reward.examples": 8, "batch": 4, "samples": 4, "threads": "1", "quiet": True, "probes": 0}
    options |= {"tasks": str(opinions[0]), "evaluate": str(opinions[1]), "reward.words": "terrible,great"}
    whole = train(recipe="prompt", out=tmp_path / "a", steps=3, **options)
    train(recipe="prompt", out=tmp_path / "b", steps=2, **options)
    again = train(out=tmp_path / "b", resume=True, steps=3, quiet=True)
    mine, theirs = (json.loads((run.path / "prompts.json").read_text()) for run in (again, whole))
    assert mine["calls"] == theirs["calls"] and mine["prompts"] == theirs["prompts"]
    mlps = [output_mlp.find(run.policy.model).state_dict() for run in (again, whole)]
    assert all(torch.equal(mlps[0][name], mlps[1][name]) for name in mlps[0])
