"""`operant generate` and `operant runs`: streamed text, Ctrl-C, scores, two models side by side, the list of runs."""

import io
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from toys import letters, lm, on_disk
from transformers import PreTrainedTokenizerFast

from operant import Policy, train
from operant.engines.native.engine import NativeEngine
from operant.sampling import ReplyText, Sampling
from operant.tools.cli import main
from operant.tools.cli.generate import Session, Speaker
from operant.tools.cli.runs import table


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_a_stream_has_the_tokens_of_a_reply(kind):
    engine = NativeEngine(Policy(lm(kind, len(letters())), letters()))
    for more in ({}, {"stop_tokens": (7,)}, {"stop_strings": ("c",)}, {"top_k": 3}):
        sampling = Sampling(max_tokens=12, **more)
        for key in range(2):
            (whole,) = engine.generate([[5, 6, 7]], sampling, [key])
            assert list(engine.stream([5, 6, 7], sampling, key)) == whole.action


def test_half_a_character_and_half_a_stop_string_wait():
    """Of a tokenizer with a token for each byte."""
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    ids = tokenizer("é 🙂a##b##!x")["input_ids"]
    text = ReplyText(tokenizer, tokenizer("Q")["input_ids"], Sampling(max_tokens=40, stop_strings=("##!",)))
    pieces = [text.add(token) for token in ids[:-1]]
    assert pieces == ["", "é", "", "", "", "", " 🙂", "a", "", "", "##b", "", "", ""]
    assert text.rest() == "" and "".join(pieces) == "é 🙂a##b"


class Stopped:
    """An engine that is interrupted behind the third token of its first reply."""

    calls = 0

    def stream(self, prompt, sampling, key):
        self.calls += 1
        yield from prompt * 4
        if self.calls == 1:
            raise KeyboardInterrupt


def test_ctrl_c_stops_the_reply_and_an_empty_line_the_session(monkeypatch, capsys):
    tokenizer = letters()
    policy = Policy(lm("gpt2", len(tokenizer)), tokenizer)
    session = Session([Speaker("x", policy, Stopped(), Sampling(max_tokens=9))], None, 0, shown=True)
    lines = iter(["ab", "cd", ""])
    monkeypatch.setattr("builtins.input", lambda sign: next(lines))
    session.converse()
    printed = capsys.readouterr().out.splitlines()
    assert "empty line" in printed[0] and "Ctrl-D" in printed[0]
    assert printed[2:] == ["ababababab [stopped]", "cdcdcdcdcd"]


def score(rollouts):
    return [float(len(r.reply)) for r in rollouts]


def test_scores_and_the_reference_stand_in_columns(here, capsys):
    tasks = '{"text": "ab", "word": "c"}\n{"text": "cd", "word": "e"}\n'
    (here / "tasks.jsonl").write_text(tasks, encoding="utf-8")
    on_disk(here / "model", lm("gpt2", len(letters())))
    started = {"steps": 1, "batch": 2, "minibatch": 2, "max_tokens": 4, "probes": 0, "watch_every": 0, "epochs": 1}
    decision = {"algorithm": "decision", "condition.evaluated": 1.0, "condition.template": "fed{return}{prompt}"}
    for out, more in (("runs/plain", {}), ("runs/aimed", {"data.target_field": "word"}), ("other/stated", decision)):
        train("model", "tasks.jsonl", "test_generate:score", out=out, **started, **more)
    capsys.readouterr()
    asked = ["--prompt", "ab", "--max-tokens", "6"]
    assert main(["generate", "runs/plain", *asked, "--versus", "reference", "--reward", "true"]) == 0
    own, reference = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert own[0] == "runs/plain" and reference[0] == "reference"
    assert [float(own[2]), float(reference[2])] == [len(own[1]) - 2, len(reference[1]) - 2]
    assert main(["generate", "model", *asked]) == 0
    assert capsys.readouterr().out == f"{reference[1]}\n"  # the model that the run began from, by the same numbers
    assert main(["generate", "runs/aimed", *asked, "--reward", "true"]) == 0
    output = capsys.readouterr()
    assert output.out.endswith("\t\n") and "give one with --target" in output.err
    assert main(["generate", "runs/aimed", *asked, "--reward", "true", "--target", "c"]) == 0
    assert capsys.readouterr().out.split("\t")[1] != "\n"
    for model, prompt in ("other/stated/export", "fed1ab"), ("other/stated", "ab"):
        assert main(["generate", model, "--max-tokens", "6", "--top-k", "1", "--prompt", prompt]) == 0
    whole, stated = capsys.readouterr().out.splitlines()
    assert whole == f"fed1{stated}"
    assert main(["generate", "nowhere", *asked]) == 2
    assert "runs in runs: aimed, plain" in capsys.readouterr().err
    (here / "runs/plain/metrics.jsonl").write_text("{}\n[]\n{}\n", encoding="utf-8")
    (here / "runs/another/programs").mkdir(parents=True)
    (here / "runs/another/programs/config.yaml").write_text("steps: auto\n", encoding="utf-8")
    assert main(["runs", "--json"]) == 0
    other, first, second = json.loads(capsys.readouterr().out)
    assert other["state"] == "unreadable" and "contents that operant did not write" in other["verdict"]
    assert (first["run"], first["state"]) == ("runs/plain", "unreadable") and "line 2" in first["verdict"]
    state = (second["state"], second["step"], second["steps"], second["verdict"])
    assert state == ("finished", 1, 1, "do not trust: constant")
    assert main(["runs", "elsewhere"]) == 2


def test_a_line_that_is_no_text_is_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\n\xff\n"), encoding="utf-8"))
    assert main(["generate", "builtin:reviews-lm", "--max-tokens", "2"]) == 2
    assert "the prompt is not UTF-8" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffab\n"))  # as spreadsheets write it
    assert main(["generate", "builtin:reviews-lm", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("ab")


def test_a_narrow_table_keeps_the_ends_of_names():
    row = {"run": "runs/a-long-folder/seed-1", "method": "ppo", "state": "running 3/40", "score": "0.1 -> 0.2"}
    rows = [row | {"score of": "held-out reward", "KL": "1.0", "age": "3 min", "verdict": "learned, but unlikely text"}]
    for width in (80, 100):
        lines = table(rows, width)
        assert max(map(len, lines)) <= width and "seed-1" in lines[1] and "learned" in lines[1]
    assert table(rows, None)[1].split()[0] == "runs/a-long-folder/seed-1"
