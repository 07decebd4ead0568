"""The commands on the pages are valid; those of how-to-train are also run, with fewer steps."""

import re
from dataclasses import replace

import pytest
from page_commands import ROOT, commands, read, snippets

from operant.runs.config import configure
from operant.tools.cli import commands as cli
from operant.tools.cli import main
from operant.tools.sweep.grid import divide, grid
from operant.types import OperantError

ELSEWHERE = {"design", "extending", "log", "metrics", "mistakes", "options"}
"""Pages whose commands are of other versions, or are run by another test."""
FILES_OF_PAGES = [path for path in sorted(ROOT.glob("docs/**/*.md")) if path.parent.name != "reference"]
PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in FILES_OF_PAGES if p.stem not in ELSEWHERE)]
PAGES = [page for page in PAGES if commands(page)]
FILES = {
    "my_forms.py": ("docs/tasks.md", "def headline"),
    "ladders.py": ("docs/text-worlds.md", "class Ladders"),
    "my_sums.py": ("docs/maths.md", "class Sums"),
}
"""Files that commands name, and the snippets that they hold."""
UNKNOWN = ("my_worlds.py", "my_hints.py", "my.yaml", "my_rewards", "my_game.py")
"""Files of a reader's own, which the pages do not show."""
SHORT = {"steps": "2", "batch": "8", "probes": "2", "sampling.max_tokens": "12", "evaluate": "none"}


@pytest.fixture
def files(here):
    for name, (page, part) in FILES.items():
        [snippet] = [snippet for snippet in snippets(page) if part in snippet]
        (here / name).write_text(snippet, encoding="utf-8")
    call = '{"prompt_token_ids": [3], "token_ids": [4], "reward": 1}\n'
    (here / "calls.jsonl").write_text(call, encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_understood(page, files, monkeypatch):
    """Each reaches its function with known options, and what trains is composed as a run would compose it."""
    # Sets of other packages take seconds to import; test_maths.py and test_verifiers.py read them.
    monkeypatch.setattr("operant.apps.maths.reasoning_gym.find_spec", lambda name: None)
    reached = []
    monkeypatch.setattr(cli, "noted", lambda *given: reached.append(given) or 0, raising=False)
    for name, command in cli.COMMANDS.items():
        monkeypatch.setitem(cli.COMMANDS, name, replace(command, run="commands:noted"))
    for _, name, *words in commands(page):
        if any(part in word for word in words for part in UNKNOWN):
            continue
        words = ["reward_model:runs/rm" if word == "runs/reward-model" else word for word in words]  # it need not exist
        reached.clear()
        assert cli.run(name, words) == 0
        if name not in ("train", "reward-model", "sweep") or not reached:
            continue
        [(operands, options)] = reached
        recipe = operands[0] if operands else None
        if name == "sweep":
            axes, fixed = divide(options, recipe)
            points = [{**fixed, **point.values} for point in grid(axes)]
        elif "resume" in options:
            continue
        else:
            points = [{k: v for k, v in options.items() if k not in ("out", "resume_if_there")}]
        try:
            assert all(configure(point, recipe).train.steps > 0 for point in points)
        except OperantError as error:  # it names an extra that is not installed here
            if "pip install 'operant[" not in str(error):
                raise


def test_the_scripts_that_pages_name_exist():
    assert len(PAGES) >= 15 and sum(len(commands(page)) for page in PAGES) > 150, "the commands themselves are found"
    for page in [str(path.relative_to(ROOT)) for path in FILES_OF_PAGES if path.name != "log.md"] + ["README.md"]:
        text = read(page)
        modules = [ROOT / f"{name.replace('.', '/')}.py" for name in re.findall(r"python -m (benchmarks\.\w+)", text)]
        scripts = [ROOT / name for name in re.findall(r"python (recipes/\w+\.py)", text)]
        assert [path for path in modules + scripts if not path.is_file()] == [], page


@pytest.mark.slow
def test_how_to_train_can_be_followed(here, capsys):
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
    assert (here / "runs/letters-sweep/report.html").is_file()
