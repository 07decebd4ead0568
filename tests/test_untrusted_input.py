"""Untrusted files, folders and texts: each works or is refused with an explanation; no code in them is ever run."""

import gzip
import io
import json
import os
import pickle
import random
import re
import shutil
import struct
from itertools import pairwise
from pathlib import Path

import pytest
import run_folders
import torch
import yaml
from browsing import chromium, visit
from cases import cases
from safetensors.torch import load_file, save_file
from toys import letters, lm

from operant import Learner, OperantError, Task, ValueOptions, export, load_policy, rewards, steps, train
from operant.data import DataOptions, load_tasks
from operant.models.safe_loading import check_finite
from operant.runs.folder import RunFolder, read_config
from operant.runs.trackers.console import Console, before_after, emit, emit_json
from operant.tools.cli import main
from operant.tools.report import run_report
from operant.tools.report.compare import write_comparison

TINY = {"steps": 1, "batch": 4, "probes": 2, "max_tokens": 4, "epochs": 1, "minibatch": 2}


def refused(work, *arguments, **named) -> str:
    with pytest.raises(OperantError) as caught:
        work(*arguments, **named)
    message = str(caught.value)
    assert "\n" not in message and "Traceback" not in message and 20 < len(message) < 900, message
    return message


# --- tasks ------------------------------------------------------------------------------------------------------------
DEEP = "[" * 100_000
TASKS = [
    ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "line 3: invalid JSON"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "b"}{"text": "c"}\n', "line 2: invalid JSON (Extra data"),
    ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', "row 2: there is no field 'text'; did you mean 'txt'"),
    ("a.jsonl", b'{"text": null}\n{"text": ""}\n', "the field 'text' is empty everywhere"),
    ("a.jsonl", b'{"text": ["a", 1]}\n', "row 1: the field 'text' is of type list"),
    ("a.jsonl", b'{"text": [1, true]}\n', "row 1: the field 'text' is of type list"),
    ("a.jsonl", b'{"text": [1, {"role": "user", "content": "a"}]}\n', "row 1: the field 'text' is of type list"),
    ("a.jsonl.gz", b"\x1f\x8b\x08" + bytes(7) + b"x" * 40, "a.jsonl.gz"),
    ("a.jsonl", b'{"text": "cut \\ud83d off"}\n', "row 1: the prompt holds half a surrogate pair"),
    ("a.jsonl", b'{"text": ' + b"9" * 5000 + b"}\n", "line 1: this JSON cannot be read"),
    ("a.jsonl", DEEP.encode(), "line 1: this JSON cannot be read"),
    ("a.json", DEEP.encode(), "a.json: this JSON cannot be read"),
    ("a.json", b"", "invalid JSON"),
    ("a.json", b'"text"', "is of type str; it must be a list"),
    ("a.jsonl", b"\n\n\n", "has no rows"),
    ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "is not UTF-8"),
    ("a.jsonl", '{"text": "a"}\n'.encode("utf-16-le"), "line 1 has a NUL"),
    ("a.jsonl", '{"text": "déjà"}\n'.encode() + '{"text": "déjà"}\n'.encode("latin-1"), "is not UTF-8"),
    ("a.txt", "plain\n".encode("utf-16-le"), "line 1 has a NUL"),
    ("a.txt", b"a\nb\0c\n", "line 2 has a NUL"),
    ("a.csv", b"", "has no rows"),
    ("a.csv", b"text,label\n", "a.csv has a header (['text', 'label']), and has no rows below it"),
    ("a.csv", b"text,label\n,1\n,2\n", "the field 'text' is empty everywhere"),
    ("a.csv", b"text,label\na,1\nb,c,2\n", "line 3: 3 cells and 2 columns; put a cell that holds ',' in quotes"),
    ("a.csv", b"label,text\n1,a\n2\n", "line 3: 1 cells and 2 columns; an empty cell needs its ',' too"),
    ("a.csv", b'text,label\nx,0\n"a,1\nb,2\n', "a.csv, line 3: a quote in the row that begins here is not closed"),
    ("a.csv", b'text,label\n"a,1\n"b",2\n', "not closed correctly before line 3 (',' expected"),
    ("a.csv", b"text,text\na,b\n", "has two columns of one name"),
    ("a.csv", b"a\0b", "line 1 has a NUL"),
    ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999)[:-9], "cannot be read"),
    ("a.jsonl.gz", b"no gzip", "cannot be read"),
    ("a.parquet", b"PAR1" + b"x" * 100, "is not a readable Parquet file"),
]


@pytest.mark.parametrize(("name", "content", "sentence"), TASKS, ids=[f"{i}-{t[0]}" for i, t in enumerate(TASKS)])
def test_a_broken_file_of_tasks_is_named_with_its_line(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    assert sentence in refused(load_tasks, tmp_path / name)


def test_unusual_but_valid_input(tmp_path):
    """Marks of spreadsheets, control characters, huge numbers beside the text, rows with more or fewer fields."""
    for name, content, prompts in (
        ("a.jsonl", b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b", "n": ' + b"9" * 400 + b"}\r\n", ["a", "b"]),
        ("b.jsonl", b'{"text": "\\u0000\\u001b[31m\\t\\u202e"}\n{"text": "b", "n": [[]]}', ["\0\x1b[31m\t\u202e", "b"]),
        ("c.csv", b'\xef\xbb\xbftext,label\r\n"a, ""b""\r\nc",1\r\n\r\nd,\r\n', ['a, "b"\r\nc', "d"]),
        ("d.txt", b"\xef\xbb\xbfa\x07\r\rb\n", ["a\x07", "b"]),
        ("e.json", b'["a", {"text": "b"}]', ["a", "b"]),
    ):
        (tmp_path / name).write_bytes(content)
        assert [task.prompt for task in load_tasks(tmp_path / name)] == prompts, name


def test_a_parquet_file_that_is_cut_or_flipped_is_no_traceback(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    path, chance = tmp_path / "a.parquet", random.Random(0)
    parquet.write_table(pa.table({"text": [f"text {i}" for i in range(500)]}), path)
    whole = path.read_bytes()
    for cut in (3, 8, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:cut])
        assert "a.parquet" in refused(load_tasks, path)
    for _ in range(20):
        flipped = bytearray(whole)
        for _ in range(5):
            flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        try:
            load_tasks(path)
        except OperantError as error:
            assert "\n" not in str(error)


def test_folders_pipes_and_devices_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").mkdir()
    assert "pipe or device" in refused(load_tasks, tmp_path / "a.jsonl")
    assert "pipe or device" in refused(load_tasks, "/dev/zero")
    assert "is a folder" in refused(load_tasks, tmp_path / "b.jsonl")
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text("{}", encoding="utf-8")
    os.mkfifo(tmp_path / "m/model.safetensors")
    assert "pipe or device" in refused(load_policy, str(tmp_path / "m"))
    os.mkfifo(tmp_path / "recipe.yaml")
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 2


@cases("a" * 5000, "~nobody-of-this-name/x.jsonl", "a\0b.jsonl", "\ud800.txt", "", "/", "a/" * 3000)
def test_invalid_names(name):
    refused(load_tasks, name)
    refused(load_policy, name)


@pytest.mark.parametrize("words", ["train --resume", "train", "report", "generate", "doctor --plan", "sweep", "replay"])
def test_invalid_paths_on_the_command_line(words, capsys):
    for name in ("a" * 5000, "~nobody-of-this-name/x", "\ud800", "/dev/null/x"):
        assert main([*words.split(), name]) == 2 and capsys.readouterr().err.count("\n") == 1


@cases(
    (["x" * 10**6], "at most 1000 characters"),
    (["\ud800"], "the id holds half a surrogate"),
    ([10**400, 10**400], "occurs twice"),
    ([Task(["x"], "a")], "is not valid"),
    ([Task("x", {"role": "user", "content": "a"})], "it must be text, token ids, or a list of messages"),
)
def test_invalid_ids_and_prompts(given, sentence):
    rows = [one if isinstance(one, Task) else {"id": one, "text": "a"} for one in given]
    assert sentence in refused(load_tasks, rows, options=DataOptions(id_field="id"))


def test_a_prompt_of_a_million_characters_is_quick():
    text = "the end a " * 100_000
    said = refused(load_tasks, [text, "ab"], letters(), context=64, max_new=8)
    assert "'tasks/0'" in said and "context of 64" in said
    (task,) = load_tasks([text], letters(), DataOptions(query_tokens=5))
    assert len(task.prompt) == 5
    assert load_tasks([text, "ab"], options=DataOptions(max_chars=100))[0].prompt == "ab"
    learner = Learner(lm("gpt2", vocab=len(letters())), tokenizer=letters(), max_tokens=4)
    assert "context of 64" in refused(learner.generate, [text])


# --- models -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    place = tmp_path_factory.mktemp("models") / "whole"
    export(load_policy(lm("gpt2", vocab=len(letters())), tokenizer=letters(), value=ValueOptions()), place)
    return place


@pytest.fixture
def model(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def load(place):
    return load_policy(str(place), value=ValueOptions())


class Program:
    """A pickle that creates a folder when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


OF_A_MODEL = """model.safetensors config.json tokenizer.json tokenizer_config.json generation_config.json
critic/head.safetensors critic/critic.json pytorch_model.bin zipped""".split()


@pytest.mark.parametrize("name", OF_A_MODEL)
def test_no_pickle_is_ever_read(model, tmp_path, name):
    mark = tmp_path / "mark"
    if name == "zipped":
        (model / "model.safetensors").unlink()
        torch.save({"transformer.wte.weight": Program(mark)}, model / "pytorch_model.bin")
    else:
        if name == "pytorch_model.bin":
            (model / "model.safetensors").unlink()
        (model / name).write_bytes(pickle.dumps(Program(mark)))
    assert str(model) in refused(load, model) and not mark.exists()
    pickle.loads(pickle.dumps(Program(mark)))
    assert mark.exists(), "the pickle works when it is read"


NO_WEIGHTS = [
    b"",
    struct.pack("<Q", 10**12) + b"{}",
    struct.pack("<Q", 2**64 - 1),
    struct.pack("<Q", 2) + b"[]",
    struct.pack("<Q", 61) + b'{"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}',
    struct.pack("<Q", 50_000) + b'{"x": ' + b"[" * 49_994,
]
NO_CONFIGS = ["", "[]", "{}", DEEP]
NO_CONFIGS += [json.dumps({"model_type": kind}) for kind in ("no-such-kind", ["gpt2"], "bert", None)]
NO_CONFIGS += [json.dumps({"model_type": "gpt2"} | odd) for odd in ({"n_layer": "many"}, {"n_head": 0})]
NO_CONFIGS += ['{"model_type": "gpt2", "vocab_size": 1e400}']
BROKEN = [(name, content) for name in ("model.safetensors", "critic/head.safetensors") for content in NO_WEIGHTS]
BROKEN += [("config.json", text.encode()) for text in NO_CONFIGS]
BROKEN += [("tokenizer.json", text.encode()) for text in ("{}", "[]", '{"model": 5}', "", DEEP)]


@pytest.mark.parametrize(("name", "content"), BROKEN, ids=range(len(BROKEN)))
def test_broken_weights_and_configs_are_refused(model, name, content):
    (model / name).write_bytes(content)
    said = refused(load, model)
    assert str(model) in said and (name != "tokenizer.json" or "tokenizer" in said)


def changed(place, **more):
    place.write_text(json.dumps(json.loads(place.read_text(encoding="utf-8")) | more), encoding="utf-8")


@cases(float("nan"), -float("inf"))
def test_weights_with_nan_or_infinity_are_named(bad, model):
    held = load_file(model / "model.safetensors")
    held["transformer.h.1.mlp.c_fc.weight"][3, 4] = bad
    save_file(held, model / "model.safetensors", metadata={"format": "pt"})
    assert "transformer.h.1.mlp.c_fc.weight holds 1 numbers of" in refused(load, model)
    head = load_file(model / "critic/head.safetensors")
    name = next(iter(head))
    head[name].view(-1)[0] = bad
    save_file(head, model / "critic/head.safetensors")
    held["transformer.h.1.mlp.c_fc.weight"][3, 4] = 0.1
    save_file(held, model / "model.safetensors", metadata={"format": "pt"})
    assert name in refused(load, model)
    live = lm("gpt2")
    with torch.no_grad():
        live.transformer.wte.weight[0, 0] = bad
    assert "transformer.wte.weight" in refused(load_policy, live)
    check_finite({"x": torch.full((9,), 3e38)}, "a sum that overflows is no number that does")


def test_an_index_that_leads_out_of_the_folder(model, tmp_path):
    (model / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = model / "model.safetensors.index.json"
    names = load_file(tmp_path / "outside.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "../outside.safetensors")}), encoding="utf-8")
    assert "leads out of its folder" in refused(load, model)
    for content in ("", "[]", "{}", '{"weight_map": {"a": 5}}', DEEP):
        index.write_text(content, encoding="utf-8")
        assert str(model) in refused(load, model)


def test_an_untrusted_classifier(model, tmp_path):
    reward = rewards.resolve(f"classifier:{model}")
    (model / "model.safetensors").write_bytes(pickle.dumps(Program(tmp_path / "mark")))
    assert "classifier" in refused(rewards.check, reward)
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "any program" in refused(rewards.check, reward) and not (tmp_path / "mark").exists()


def test_weights_of_another_shape_or_name(model):
    held = load_file(model / "model.safetensors")
    name = "transformer.h.0.attn.c_attn.weight"
    save_file(held | {name: held[name][:, :-1].contiguous()}, model / "model.safetensors", metadata={"format": "pt"})
    assert str(model) in refused(load, model)
    head = load_file(model / "critic/head.safetensors")
    save_file({k: torch.zeros(2, 7) for k in head}, model / "critic/head.safetensors")
    save_file(held, model / "model.safetensors", metadata={"format": "pt"})
    assert "does not hold the critic's weights" in refused(load, model)


def test_programs_in_a_folder_are_not_run(model, tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    program = f"import os\nos.mkdir({str(mark)!r})\nclass Config: pass\nclass Model: pass\nclass Tokenizer: pass\n"
    (model / "own.py").write_text(program, encoding="utf-8")
    monkeypatch.setattr("builtins.input", lambda *asked: pytest.fail("somebody was asked whether to trust it"))
    named = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Tokenizer", None]}
    changed(model / "tokenizer_config.json", auto_map=named, tokenizer_class="Tokenizer")
    changed(model / "config.json", auto_map=named)
    assert load(model) is not None  # its type is a known one: transformers' own class computes it
    changed(model / "config.json", auto_map=named, model_type="own")
    assert str(model) in refused(load, model) and not mark.exists()


def test_attention_from_elsewhere_is_not_fetched(model):
    changed(model / "config.json", attn_implementation="someone/kernel")
    assert "attn_implementation" in refused(load, model)


@pytest.mark.parametrize("missing", ["pad", "both", "template"])
def test_tokenizers_that_lack_something(model, missing, tmp_path):
    path = model / "tokenizer_config.json"
    told = json.loads(path.read_text(encoding="utf-8"))
    gone = {"pad": "pad_token", "both": "eos_token pad_token", "template": "chat_template"}
    path.write_text(json.dumps({k: v for k, v in told.items() if k not in gone[missing].split()}), encoding="utf-8")
    if missing == "template":
        said = refused(train, str(model), [[{"role": "user", "content": "ab"}]] * 2, "letters:a", out=tmp_path / "chat")
        assert "chat template" in said
    if missing == "both":
        for name in ("config.json", "generation_config.json"):
            changed(model / name, eos_token_id=None)
    for metrics in steps(str(model), ["ab", "cde"], "letters:a", out=tmp_path / "run", **TINY):
        assert metrics["rollout/count"] == 4


@cases("{{ messages.nothing.at.all }}", "{% for", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}")
def test_chat_templates_that_fail(template):
    tokenizer = letters(template)
    learner = Learner(lm("gpt2", vocab=len(tokenizer)), tokenizer=tokenizer, max_tokens=4)
    try:
        learner.generate([Task("t", [{"role": "user", "content": "ab"}])])
    except OperantError as error:
        assert "template" in str(error) or "no tokens" in str(error)


def test_vocabularies_that_do_not_fit(tmp_path):
    small = lm("gpt2", vocab=20)
    said = refused(train, small, ["ab", "xyz"], "letters:a", tokenizer=letters(), out=tmp_path / "a", **TINY)
    assert "holds the id" in said and "0 to 19" in said and not (tmp_path / "a").exists()
    learner = Learner(small, tokenizer=letters(), max_tokens=4)
    assert "0 to 19" in refused(learner.generate, ["xyz"])
    assert "0 to 19" in refused(learner.generate, [[5, -1]])
    assert "0 to 19" in refused(learner.step, [[5], [6]], [[7], [10**30]], [1.0, 2.0])
    large = Learner(lm("gpt2", vocab=70), tokenizer=letters(), max_tokens=4, stop_strings=("ab",))
    replies = large.generate(["ab", "cd"])  # and says what no piece of text stands for
    assert large.step(replies, [1.0, 0.0])["step"] == 1


def test_an_untrusted_adapter(tmp_path, model):
    pytest.importorskip("peft")
    place, mark = tmp_path / "adapter", tmp_path / "mark"
    place.mkdir()
    for config in ("[]", "{}", DEEP, '{"peft_type": "LORA"}', '{"peft_type": "LORA", "base_model_name_or_path": 5}'):
        (place / "adapter_config.json").write_text(config, encoding="utf-8")
        (place / "adapter_model.safetensors").write_bytes(pickle.dumps(Program(mark)))
        refused(load_policy, str(place))
        refused(Learner, str(model), **{"lora.adapter": str(place)})
    assert not mark.exists()


# --- runs -------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def trained(whole):
    tasks = whole.parent / "tasks.txt"
    tasks.write_text("ab\ncde\n", encoding="utf-8")
    return train(str(whole), str(tasks), "letters:a", out=whole.parent / "run", **TINY).path


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


PAIRS = [(b, ", ".join(["*" + a] * 9)) for a, b in pairwise("abcdefghijklmnop")]
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(f"{b}: &{b} [{before}]\n" for b, before in PAIRS)
MERGES = "a: &a {x: 1}\n" + "".join(f"{b}: &{b} {{<<: [{before}]}}\n" for b, before in PAIRS)
CONFIGS = ["!!python/object/apply:os.mkdir [MARK]", "steps: !!python/name:os.system ''", LAUGHS, MERGES, "&a [*a]"]
CONFIGS += ["[1, 2]", "", "steps: 2001-99-99", "{" * 1000, "steps: [", "true: 1", "steps: 1\nkl: 5"]
CONFIGS += ["steps: " + "9" * 5000, "a: !!binary x"]


@pytest.mark.parametrize("content", CONFIGS, ids=range(len(CONFIGS)))
def test_an_untrusted_config(run, tmp_path, content):
    mark = tmp_path / "mark"
    (run / "config.yaml").write_text(content.replace("MARK", str(mark)), encoding="utf-8")
    assert main(["train", "--resume", str(run)]) == main(["train", str(run / "config.yaml")]) == 2
    assert main(["report", str(run)]) in (0, 2) and not mark.exists()


def test_a_config_in_another_encoding(run):
    (run / "config.yaml").write_bytes("steps: 1 # é".encode("latin-1"))
    assert "config.yaml" in refused(read_config, run)


RECORDS = ["[1, 2]", "5", '{"reward/mean": 1}', '{"step": "x"}', '{"step": 1, "reward/mean": "<b>"}', DEEP]
RECORDS += ['{"step": 1, "reward/mean": {"a": 1}}', '{"step": ' + "9" * 5000 + "}", '{"step": 1e400}']
FILES = ["metrics.jsonl", "distributions.jsonl", "evaluation.json", "environment.json"]


@pytest.mark.parametrize("line", RECORDS, ids=range(len(RECORDS)))
def test_untrusted_records(run, line, capsys):
    evaluated = json.dumps({"before": line, "after": {"replies": [{"task": 1}, line]}})
    for name, content in (*((name, line) for name in FILES), ("evaluation.json", evaluated)):
        whole = (run / name).read_text(encoding="utf-8") if (run / name).exists() else ""
        (run / name).write_text(f"{content}\n{whole}" if name.endswith("l") else content, encoding="utf-8")
        assert main(["report", str(run)]) in (0, 2) and "Traceback" not in capsys.readouterr().err
        (run / name).write_text(whole, encoding="utf-8") if whole else (run / name).unlink()


WRITTEN = "metrics.jsonl distributions.jsonl log.txt config.yaml lock rollouts probes checkpoints .report.html.PID.tmp"


@cases(*WRITTEN.split())
def test_a_link_out_of_the_run_folder_is_never_written_through(name, run, tmp_path):
    outside, inside = tmp_path / "outside", run / name.replace("PID", str(os.getpid()))
    inside.rename(outside) if inside.exists() else outside.write_text("mine\n", encoding="utf-8")
    if outside.is_dir():
        (outside / ".mine.tmp").touch()
    inside.symlink_to(outside)
    before = [(path, path.is_file() and path.read_bytes()) for path in (outside, *sorted(outside.rglob("*")))]
    main(["report", str(run)])
    main(["train", "--resume", str(run), "--steps", "2"])
    assert before == [(path, path.is_file() and path.read_bytes()) for path in (outside, *sorted(outside.rglob("*")))]


def test_looking_at_a_run_runs_no_code_that_it_names(run, tmp_path):
    mark, named = tmp_path / "mark", dict.fromkeys(("policy", "engine", "reward", "env"), f"{run / 'own.py'}:part")
    (run / "own.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n", encoding="utf-8")
    (run / "config.yaml").write_text(yaml.safe_dump(dict(read_config(run)) | named), encoding="utf-8")
    asked = [
        "train",
        "--policy",
        str(run),
        "--tasks",
        "builtin:openings/train",
        "--reward",
        "letters:e",
        "--steps",
        "1",
    ]
    for words in (["runs", str(run.parent)], *([name, str(run)] for name in ("report", "compare", "diagnose")), asked):
        main([*words, "--out", str(tmp_path / "other")] if words[0] == "train" else words)
    assert not mark.exists()


def test_a_link_in_place_of_replies_shows_nothing(run, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the secret itself", encoding="utf-8")
    for folder in ("rollouts", "probes"):
        for path in list((run / folder).glob("*.parquet")):
            path.unlink()
            path.symlink_to(secret)
    main(["report", str(run)])
    assert "the secret itself" not in (run / "report.html").read_text(encoding="utf-8")


# --- texts ------------------------------------------------------------------------------------------------------------
EVIL = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script></script><b>{{data}}</b>`$&"
NAME = "<img src=x onerror=document.title='run'>"


def row(i, text):
    odd = {"task": f"{EVIL}{i}", "query": f"{EVIL}?{i}", "end": EVIL, "tokens": [EVIL, "<script>"], "ids": [1, 2]}
    odd |= {"reward": 0.5 + i, f"reward/{NAME}": 0.5, "reward/other": 0.1}
    return run_folders.row(i, 2, reply=text, values=[0.1, 0.2], advantages=[1.0, -1.0], **odd)


@pytest.fixture
def told(tmp_path):
    """A run whose every text is a program for a browser."""
    config = {"steps": 2, "recipe": EVIL, "reward": {NAME: 1.0}, "kl": {"coef": 0.1}}
    folder = RunFolder.create(tmp_path / NAME, config, environment={"command": EVIL, NAME: [EVIL]})
    for step in (1, 2):
        named = {NAME: 1.0, f"reward/{NAME}/mean": 1.0, f"own/{EVIL}": 2.0}
        folder.log(step, named | {"kl/per_reply": 40.0 * step, "reward/mean": 0.5})
        histogram = {"width": 1.0, "start": 0, "counts": [1, 2]}
        blocks = {"gradient": {EVIL: 1.0, NAME: 2.0}}
        folder.distributions(step, {"histograms": {"reward": histogram}, "blocks": blocks})
        folder.rollouts(step, [row(i, EVIL) for i in range(3)])
        folder.probes(step, [row(i, EVIL) for i in range(3)])
    folder.probes(None, [row(i, EVIL) for i in range(3)])
    evaluation = {"mean": 0.5, "kl": 1.0, "replies": [{"task": EVIL, "query": EVIL, "reply": EVIL, "score": 0.5}]}
    text = json.dumps({"before": evaluation, "after": evaluation})
    (folder.path / "evaluation.json").write_text(text, encoding="utf-8")
    folder.log_message(EVIL)
    folder.close()
    return folder.path


def pages_of(told, tmp_path):
    other = shutil.copytree(told, tmp_path / "other")
    (other / "config.yaml").write_text(f"steps: 2\nkl: {{coef: {json.dumps(EVIL)}}}\n", encoding="utf-8")
    return [run_report.write_report(told), write_comparison([told, other], tmp_path / "comparison.html")]


def test_no_text_of_a_run_is_part_of_a_page(told, tmp_path):
    for path in pages_of(told, tmp_path):
        html = path.read_text(encoding="utf-8")
        around = re.sub(r"<(script|title).*?</\1>", "", html, flags=re.S)
        assert "<img" not in html and "onerror" not in around and "<b>" not in around
        assert html.count("<script") == html.count("</script") == 2


OPEN = """() => {
    document.querySelectorAll("details").forEach((it) => (it.open = true));
    document.querySelectorAll("button, summary, tbody tr, th, select").forEach((it) => it.click());
}"""


@pytest.mark.slow
def test_no_script_of_a_run_runs_in_a_browser(told, tmp_path):
    with chromium() as browser:
        for path in pages_of(told, tmp_path):
            with visit(browser, path.as_uri()) as page:
                title = page.title()
                for _ in range(2):
                    page.evaluate(OPEN)
                    page.wait_for_timeout(200)
                assert page.title() == title != "run"
                assert page.locator("img").count() == 0 and page.locator("body script:not([src])").count() <= 2
                assert "onerror" in page.locator("body").inner_text()  # as text, to be read


ESCAPES = "\x1b]0;title\x07\x1b[2J\x1b[31mred\x9b31m\r\b\b\u202eabc\u2028\x00[bold]x[/bold]"


def test_a_reply_never_controls_a_terminal(capsys):
    console = Console(2, samples_every=1, output=(output := io.StringIO()))
    console.start({"steps": 2})
    console.rollouts(1, [{"query": ESCAPES, "reply": ESCAPES, "reward": 1.0}])
    console.log(1, {f"outcome/{ESCAPES}": 0.5})
    console.note(ESCAPES)
    console.close()
    emit(f"a\t{ESCAPES}\nb")
    emit_json([ESCAPES], indent=1)
    before_after([(ESCAPES, ESCAPES, 0.0, ESCAPES, 1.0)], output)
    for command in (["train"], ["report"], []):
        main([*command, f"no{ESCAPES}thing"])
    said = capsys.readouterr()
    assert said.out[:2] == "a\t" and json.loads(said.out.partition("\nb\n")[2]) == [ESCAPES]
    for text in (output.getvalue(), said.out, said.err):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202e]", text), text
    assert "red" in output.getvalue() and "[bold]x[/bold]" in output.getvalue()
