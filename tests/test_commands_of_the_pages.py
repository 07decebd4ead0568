"""The commands on the pages are valid; those of how-to-train are also run, with fewer steps."""

import re
from pathlib import Path

import pytest
from page_commands import commands

from operant.runs.config import configure
from operant.tools.cli import main
from operant.tools.cli.arguments import parse
from operant.tools.cli.commands import COMMANDS
from operant.tools.sweep.grid import divide, grid

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "docs/how-to-train.md", "docs/reading-a-report.md", "docs/trackers.md", "docs/ppo.md"]
PAGES += ["docs/lora.md", "docs/soft-prompts.md", "docs/isolated-rewards.md", "docs/checkpoints.md"]
PAGES += ["docs/sharding.md", "docs/critic.md", "docs/code-test-time.md", "docs/engines.md", "docs/evaluation.md"]
PAGES += ["docs/recipes.md", "docs/rewards.md", "docs/labels.md", "docs/rlhf.md", "docs/translation.md"]
PAGES += ["docs/tasks.md", "docs/code.md", "docs/rl4lms.md", "docs/style-transfer.md", "docs/ahead.md"]
PAGES += ["docs/prompts.md", "docs/scale.md", "docs/resuming.md", "docs/text-worlds.md", "docs/textworld.md"]
SHORT = {"steps": "2", "batch": "8", "probes": "2", "sampling.max_tokens": "12", "evaluate": "none"}


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_understood(page, tmp_path, monkeypatch):
    found = commands(page)
    assert found or page == "docs/ppo.md"
    if page == "docs/tasks.md":  # one of its commands names a function that it shows
        (shown,) = re.findall(r"```python\n(.*?def headline.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
        (tmp_path / "my_forms.py").write_text(shown, encoding="utf-8")
        monkeypatch.chdir(tmp_path)
    if page == "docs/text-worlds.md":  # and one a world
        (shown,) = re.findall(r"```python\n(.*?class Ladders.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
        (tmp_path / "ladders.py").write_text(shown, encoding="utf-8")
        monkeypatch.chdir(tmp_path)
    for _, command, *words in found:
        assert command in COMMANDS, command
        repeated = [name for name, about in COMMANDS[command].options.items() if about.get("action") == "append"]
        recipe, options = parse(words, flags=("serve", "resume_if_there"), several=repeated)
        recipe = [command] if command == "reward-model" else recipe
        if command in ("train", "reward-model") and not {"resume", "help"} & set(options):
            options = {name: value for name, value in options.items() if name not in ("out", "resume_if_there")}
            assert configure(options, recipe[0] if recipe else None).train.steps > 0
        elif command == "sweep":
            axes, fixed = divide(options, recipe[0])
            for point in grid(axes):
                assert configure({**fixed, **point.values}, recipe[0]).train.steps > 0


def test_the_scripts_that_pages_name_exist():
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for module in re.findall(r"python -m (benchmarks\.\w+)", text):
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
        for script in re.findall(r"python (recipes/\w+\.py)", text):
            assert (ROOT / script).is_file(), script


@pytest.mark.slow
def test_how_to_train_can_be_followed(tmp_path, monkeypatch, capsys):
    """Every command runs in the order of the page, with fewer steps; the live server is skipped."""
    monkeypatch.chdir(tmp_path)
    for _, command, *words in commands("docs/how-to-train.md"):
        if "--serve" in words:
            continue
        if command in ("train", "sweep"):
            named = {word.lstrip("-").replace("-", "_") for word in words if word.startswith("--")}
            short = {k: v for k, v in SHORT.items() if k not in named}
            if "evaluate_every" in named:
                short |= {"evaluate": "builtin:openings/held-out", "data.limit": "8"}
            words = words + [part for name, value in short.items() for part in (f"--{name}", value)]
            words = [re.sub(r"^0,0\.02,0\.1,0\.5,2$", "0,2", re.sub(r"^1,2,3$", "1", word)) for word in words]
        assert main([command, *words]) == 0, (words, capsys.readouterr())
    assert (tmp_path / "runs/letters-sweep/report.html").is_file()
