"""The command line: its commands work, and a mistake gives a one-sentence error and exit code 2, not a traceback."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from cases import cases, slow
from processes import Child, until
from texts import mistyped
from toys import letters, lm, on_disk

from operant.algorithms import ALGORITHMS
from operant.runs.config import as_mapping, configure, load_recipe
from operant.tools.cli import commands, help, main
from operant.tools.cli.arguments import parse
from operant.tools.cli.commands import COMMANDS
from operant.tools.report.diagnosis.history import flat


@pytest.fixture
def folder(tmp_path):
    on_disk(tmp_path / "model", lm("gpt2", vocab=len(letters()), spread=0.02))
    (tmp_path / "tasks.txt").write_text("ab\ncde\nfg\nh\n", encoding="utf-8")
    return tmp_path


def arguments(folder, *more):
    return [
        *("train", "letters", "--policy", str(folder / "model"), "--tasks", str(folder / "tasks.txt")),
        *("--evaluate", str(folder / "tasks.txt"), "--steps", "2", "--batch", "4", "--max-tokens", "6"),
        *("--minibatch", "2", "--out", str(folder / "run"), *more),
    ]


def test_a_run_writes_all_its_files(folder, capsys):
    assert main(arguments(folder)) == 0
    printed = capsys.readouterr().out
    assert "step 2/2" in printed and "held-out tasks" in printed and "report.html" in printed
    run = folder / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert sorted(p.name for p in (run / "rollouts").iterdir()) == ["step-00001.parquet", "step-00002.parquet"]
    for name in ("config.yaml", "report.html", "evaluation.json", "export/model.safetensors", "export/critic"):
        assert (run / name).exists(), name
    assert main(["generate", str(run), "--prompt", "ab", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("ab")
    assert main([*arguments(folder)[:-2], "--out", str(folder / "tasks.txt/run")]) == 2
    assert "tasks.txt" in capsys.readouterr().err, "a file is where the folder should be"


@pytest.mark.parametrize(("words", "sentence"), mistyped("operant"))
def test_a_mistake_that_no_page_shows_gets_a_sentence(words, sentence, capsys, monkeypatch, here):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert sentence in error and "Traceback" not in error
    assert not list(here.iterdir()), "nothing is left behind"


def test_a_recipe_names_no_folder(capsys, here):
    Path("my.yaml").write_text("policy: builtin:reviews-lm\nreward: letters:e\nout: runs/mine\n")
    assert main(["train", "my.yaml"]) == 2
    assert "my.yaml: out is no option of a recipe" in capsys.readouterr().err


@cases(("", [], "it has no rows"), ("a" * 500, [], "context"), ("ab", ["--reference", "other"], "vocabulary"))
def test_wrong_data_gets_a_sentence(content, more, sentence, folder, capsys):
    (folder / "tasks.txt").write_text(content, encoding="utf-8")
    if "other" in more:
        lm("gpt2", vocab=17).save_pretrained(folder / "other")
        more = ["--reference", str(folder / "other")]
    assert main(arguments(folder, *more)) == 2 and sentence in capsys.readouterr().err
    assert not (folder / "run").exists()


def test_letters_that_the_terminal_lacks_end_no_command(monkeypatch, here):
    Path("ä").mkdir()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main(["runs", "ä"]) == 0


def test_arguments_and_options_are_separated():
    given = ["a", "--x", "1", "--y=2", "--z", "--w-v", "-1"]
    assert parse(given) == (["a"], {"x": "1", "y": "2", "z": True, "w_v": "-1"})
    assert parse(["--reward", "{letters:e: 1.0, 'length:5': 0.5}"])[1]["reward"] == {"letters:e": 1.0, "length:5": 0.5}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_with_its_options(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: operant {command}") and "-h, --help" in text
    assert text.index(f"  operant {command}") < text.index("-h, --help"), "examples come first"


def options_of_help(capsys, *words):
    assert main(["train", *words, "--help-all"]) == 0
    parts = re.split(r" --(?=[a-z])", re.sub(r"\s+", " ", capsys.readouterr().out))
    return {part.split()[0]: re.findall(r"\[([^][]*)\]", part)[-1] for part in parts if "[" in part}


def test_the_help_of_train_has_the_options_of_a_method_with_the_values_of_a_recipe(capsys):
    plain, grpo = options_of_help(capsys), options_of_help(capsys, "letters", "--algorithm", "grpo", "--lr", "0.3")
    assert plain["kl.coef"] == "0.1" and plain["loss.value-clip"] == "0.2" and "advantage.deviation" not in plain
    assert grpo["algorithm"] == "grpo" and grpo["advantage.deviation"] == "population" and "loss.value-clip" not in grpo
    assert grpo["optimizer.lr"] == "0.3" and grpo["optimizer.schedule"] == "linear"
    assert grpo["policy"] == load_recipe("letters")["policy"]


def test_an_option_of_a_part_from_elsewhere_is_in_the_help(capsys, here):
    (here / "mine.py").write_text("def brevity(rollouts, *, target=20): ...\n", encoding="utf-8")
    assert options_of_help(capsys, "letters", "--reward", "mine.py:brevity")["reward.target"] == "20"


HELP_OF = """
import sys
from operant.tools.cli import main
for words in sys.argv[1:]:
    main(words.split())
print({"torch", "transformers", "numpy", "pyarrow"} & {*sys.modules})
"""


def help_of(folder, *commands):
    """What the commands print, and then which of the large packages they have imported."""
    words = [sys.executable, "-c", HELP_OF, *commands]
    return subprocess.run(
        words, capture_output=True, text=True, check=True, cwd=folder, env=os.environ | {"COLUMNS": "300"}
    ).stdout


@pytest.mark.slow
def test_the_help_of_all_options_needs_no_torch_either(tmp_path):
    """Of each kind of part and of policy; an option has the text of its method, and the bounds of its function."""
    recipes = "letters,rooms,code,prompt,reward-model,--algorithm trpo,--algorithm soft_q"
    printed = help_of(tmp_path, *(f"train {words} --help-all" for words in recipes.split(",")))
    assert printed.endswith("set()\n")
    for said in (r"--loss.value-clip VALUE.*\(above 0, or none\)", r"--update.target-kl .*nats per token.*\(above 0\)"):
        assert re.search(said, printed)


@pytest.mark.slow
def test_a_module_that_uses_torch_when_it_is_imported_has_the_real_one(tmp_path):
    text = "import torch\nHALF = torch.ones(2).mean().item() / 2\ndef brevity(rollouts, *, target=HALF): ...\n"
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    printed = help_of(tmp_path, "train letters --reward mine.py:brevity --help-all")
    assert re.search(r"--reward.target VALUE +(\(a number\) )?\[0.5\]", printed) and "'torch'" in printed


@cases(("letters", None), ("letters", "trl"), ("letters", "textworld"), ("sentiment", None))
def test_the_values_of_the_help_are_those_of_the_run(recipe, preset):
    for method in (name for name, row in ALGORITHMS.items() if not row.needs.policy):  # it refuses a reward
        given = {"preset": preset, "algorithm": method, "samples": 4, "tasks": "x", "reward": "letters:e"}
        given = given if ALGORITHMS[method].source != "data" else given | {"samples": 1}
        of_run = flat(as_mapping(configure(given, recipe)))
        found, _, values, _ = help.settings(recipe, given)
        assert found == method
        shown = {n: [*x] if isinstance(x, tuple) else pytest.approx(x) for n, x in values.items()}
        assert shown == {n: of_run[n] for n in shown}


@cases(
    slow(["--algorithm", "grpo"], {"--samples 8", "--kl.loss-coef 0.2"}, {"--kl.coef"}),
    slow(["my.yaml"], {"--samples 4", "--optimizer.lr 0.5", "--tasks mine.txt"}, {"--data.reply-field"}),
    (["sft"], {"--data.reply-field none", "--steps 200"}, {"--reward", "--kl.coef", "--sampling.max-tokens"}),
)
def test_the_short_help_has_a_dozen_options_and_needs_no_torch(words, shown, hidden, tmp_path):
    mine = "algorithm: grpo\ntasks: mine.txt\nreward: letters:e\nsamples: 4\nlr: 0.5\n"
    (tmp_path / "my.yaml").write_text(mine, encoding="utf-8")
    for command in ("train", "sweep") if words == ["my.yaml"] else ("train",):
        *printed, last = help_of(tmp_path, " ".join((command, *words, "--help"))).splitlines()
        assert last == "set()"
        lines = {re.sub(r"^( *--\S+ \S+).*", r"\1", line).strip() for line in printed}
        assert shown <= lines and not {line.split()[0] for line in lines if line} & hidden
        assert len([line for line in printed if line.startswith("  -")]) <= 22
        assert "--out" in "".join(printed) and "--help-all" in "".join(printed)


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_an_interrupt_ends_after_the_step_and_resume_goes_on(folder, capsys):
    words, metrics, said = arguments(folder), folder / "run/metrics.jsonl", folder / "said.txt"
    words[words.index("--steps") + 1] = "400"
    process = Child(lambda: main(words), output=str(said))
    until(lambda: metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") >= 2)
    process.kill(signal.SIGINT)
    code, printed = process.ends(60), said.read_text(encoding="utf-8")
    assert code == 0, printed
    assert f"operant train --resume {folder / 'run'}" in printed and "Traceback" not in printed
    done = metrics.read_text(encoding="utf-8").count("\n")
    assert main(["train", "--resume", str(folder / "run"), "--steps", str(done + 2)]) == 0
    steps = [json.loads(line)["step"] for line in metrics.read_text(encoding="utf-8").splitlines()]
    assert steps == list(range(1, done + 3))


def test_a_warning_is_a_sentence_without_a_line_of_code(monkeypatch, capsys):
    def run(*_):
        warnings.warn("the estimate\nis biased", stacklevel=1)
        warnings.warn("an old name", FutureWarning, stacklevel=1)
        return 0

    others = []
    monkeypatch.setattr(commands, "run", run)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", keep := lambda message, *_: others.append(str(message)))
        assert main(["train"]) == 0 and warnings.showwarning is keep
    assert capsys.readouterr().err == "operant: warning: the estimate is biased\n"
    assert others == ["an old name"]
