"""The example package of docs/extending, installed as a stranger's package is, and used from the command line."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from processes import Forked
from small_runs import told
from texts import mistyped

from operant.import_by_name import Table
from operant.runs.config import configure
from operant.tools.cli import main
from operant.tools.cli.arguments import parse
from operant.types import OperantError

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs/extending"
PAGE = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
ALL = (
    "--policy soft_prompt --policy.length 4 --tasks counting --tasks.upto 20 --env guess --env.letters ae "
    "--reward brevity --reward.target 12 --algorithm leave_one_out --trackers csv --trackers.names reward/mean "
    "--batch 8 --max-tokens 8 --probes 0 --optimizer.lr 0.1 --evaluate counting --evaluation.metrics share_of_digits"
).split()


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("installed")
    source = tmp_path_factory.mktemp("source") / "example"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(place)]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, str(source)], check=True)
    path = os.pathsep.join([str(place), str(ROOT / "src")])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def as_user(installed, tmp_path, monkeypatch):
    """This process, with the package installed, in a folder that has the recipe of the page."""
    monkeypatch.syspath_prepend(installed["PYTHONPATH"].split(os.pathsep)[0])
    monkeypatch.setenv("PYTHONPATH", installed["PYTHONPATH"])  # of the processes of a sweep
    monkeypatch.chdir(tmp_path)
    (recipe,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "my.yaml").write_text(recipe, encoding="utf-8")


@pytest.mark.slow
def test_every_kind_of_part_trains_by_one_command_and_resumes_bit_identically(installed, as_user, capsys, tmp_path):
    """The whole run is a process of its own, the halves are in this one."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    command = [sys.executable, "-m", "operant", "train", *ALL, "--steps", "2", "--out", str(whole)]
    subprocess.run(command, env=installed, capture_output=True, timeout=300, check=True)
    assert main(["train", *ALL, "--steps", "1", "--out", str(halves)]) == 0
    assert main(["train", "--resume", str(halves), "--steps", "2"]) == 0, capsys.readouterr()
    assert told(halves) == told(whole) and len(told(whole)) == 2
    trained = [(run / "export/policy.safetensors").read_bytes() for run in (whole, halves)]
    assert trained[0] == trained[1]
    written = (whole / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert written[0] == "step,reward/mean" and len(written) == 3
    measured = json.loads((whole / "evaluation.json").read_text(encoding="utf-8"))["after"]
    digits = [sum(c.isdigit() for c in reply["reply"]) >= 1 for reply in measured["replies"]]
    assert measured["metrics"]["share_of_digits"] == pytest.approx(sum(digits) / len(digits))
    config = yaml.safe_load((whole / "config.yaml").read_text(encoding="utf-8"))
    assert (config["env"], config["env.letters"], config["env.turns"]) == ("guess", "ae", 3), "defaults are recorded"
    capsys.readouterr()
    assert main(["generate", str(whole), "--prompt", "1, 2,", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("1, 2,")


@pytest.mark.parametrize(("words", "message"), mistyped("parts of a package"))
def test_a_mistake_in_a_part_is_a_sentence(words, message, as_user, capsys, tmp_path):
    rest = [] if "--tasks" in words else ["--tasks", "counting"]
    rest += [] if "--reward" in words else ["--reward", "brevity"]
    assert main(["train", *words, *rest, "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_an_entry_point_that_does_not_import_names_its_package(tmp_path, monkeypatch):
    info = tmp_path / "broken_worlds-2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-worlds\nVersion: 2.1\n", encoding="utf-8")
    entries = "[operant.envs]\nbroken = broken_worlds:World\nsingle_turn = broken_worlds:World\n"
    (info / "entry_points.txt").write_text(entries, encoding="utf-8")
    (tmp_path / "broken_worlds.py").write_text("raise RuntimeError('no licence')\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    table = Table("environment", "operant.envs", {"single_turn": "operant.envs:SingleTurn"})
    why = r"'broken' of package broken-worlds 2.1 \(broken_worlds:World\) cannot be imported: RuntimeError: no licence"
    with pytest.raises(OperantError, match=why) as raised:
        table.find("broken")
    assert str(raised.value) in " ".join(PAGE.split())
    with pytest.raises(OperantError, match=r"belongs to broken-worlds 2\.1 and to operant; name it module:object"):
        table.find("single_turn")


OPENINGS = {
    "method": ("operant.algorithms", "leave_one_out"),
    "world": ("operant.envs", "guess"),
    "reward": ("operant.rewards", "brevity"),
    "policy": ("operant.policies", "soft_prompt"),
    "engine": ("operant.engines", "best_of"),
    "metric": ("operant.metrics", "share_of_digits"),
    "tasks": ("operant.data", "counting"),
}
"""The file of the example that adds each kind of part, the group of its entry point, and its name."""


def test_each_opening_takes_one_short_file_and_one_entry_point(as_user):
    """So it is added in two places, and neither the package nor another file of the example knows of it."""
    entries = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    sources = {path.stem: path.read_text(encoding="utf-8") for path in (EXAMPLE / "src").rglob("*.py")}
    for kind, (group, name) in OPENINGS.items():
        module, _, inside = entries[group][name].partition(":")
        found = Table(kind, group, {}).find(name)
        assert (found.__name__ if inside == "" else found.__module__) == module == f"operant_example.{kind}"
        assert not [other for other in sources if other != kind and f"operant_example.{kind} " in sources[other]]
    assert {*sources} >= {*OPENINGS, "tracker"} and max(text.count("\n") for text in sources.values()) <= 60
    package = (ROOT / "src/operant").rglob("*.py")
    assert not any("operant_example" in path.read_text(encoding="utf-8") for path in package)


def test_a_plan_and_help_know_the_named_parts(as_user, capsys, tmp_path):
    recipe = tmp_path / "my.yaml"
    recipe.write_text("tasks: {name: counting, upto: 4}\nenv: {name: guess, letters: ae}\n", encoding="utf-8")
    assert main(["doctor", "--plan", str(recipe), "--batch", "4", "--max-tokens", "4"]) == 0
    assert "at the peak" in capsys.readouterr().out
    assert main(["doctor", "--plan", str(recipe), "--policy", "soft_prompt"]) == 2
    assert "'soft_prompt' is made by a class or function, whose memory cannot be estimated" in capsys.readouterr().err
    assert main(["train", str(recipe), "--help-all"]) == 0
    output = capsys.readouterr().out
    assert "[guess]" in output and re.search(r"--env.letters VALUE +\[ae\]", output)


@pytest.mark.slow
def test_the_commands_and_the_snippet_of_the_page_run(as_user, monkeypatch, capsys):
    Forked.instead(monkeypatch)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    lines = [shlex.split(line, comments=True) for kind, text in blocks if not kind for line in text.splitlines()]
    assert lines.pop(0) == ["pip", "install", f"./{EXAMPLE.relative_to(ROOT)}"]
    for _, *words in lines:
        assert main(words) == 0, f"{words}: {capsys.readouterr().out[-3000:]}"
    assert re.search(r"--env.letters VALUE +\[ae\]", capsys.readouterr().out)
    snippets = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (snippet,) = [text for text in snippets if "operant.train(" in text]
    made: dict = {}
    exec(snippet, made)
    assert made["run"].metrics[0]["reward/brevity/mean"] <= 1


def test_the_commands_for_each_kind_are_understood(as_user):
    found = [shlex.split(line)[2:] for line in re.findall(r"^    (operant train .*)$", PAGE, flags=re.MULTILINE)]
    assert len(found) == 11
    for words in found:
        recipe, options = parse(words)
        assert configure(options, recipe[0]).train.steps == 2


def test_the_sentences_of_the_page_are_said(as_user, capsys):
    rows = re.findall(r"^\| `(--.*?)` \| (.*) \|$", PAGE, flags=re.MULTILINE)
    assert len(rows) == 11
    for words, sentence in rows:
        code = main(["train", "my.yaml", *words.split()])
        assert (code, sentence in (printed := capsys.readouterr().err)) == (2, True), (words, printed)
        assert not Path("runs").exists()


def test_a_syntax_error_names_its_place_once(tmp_path):
    (tmp_path / "broken.py").write_text("def f(x: return 1\n", encoding="utf-8")
    with pytest.raises(OperantError, match=r"invalid syntax \(broken\.py, line 1\)$"):
        Table("reward", "operant.rewards", {}).find(f"{tmp_path / 'broken.py'}:f")
