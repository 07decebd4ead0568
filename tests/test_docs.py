"""The pages say what the code does: generated parts are up to date, names exist, links lead somewhere, snippets run."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from page_commands import HEADING, ROOT, anchor, read, snippets, without_code
from texts import parts
from tokenizers_of_words import WORDS, tokenizer_of
from toys import lm, on_disk
from transformers import GPT2LMHeadModel
from trl_compat.configurations import stand_in

import operant
from operant.algorithms import ALGORITHMS
from operant.metrics.registry import METRICS
from operant.options import names
from operant.runs.config import config_schema

KINDS = ("*.md", "docs/*.md", "docs/methods/*.md", "docs/prior/*.md", "*/README.md", "*/*/README.md")
EVERY = [path for kind in KINDS for path in ROOT.glob(kind)]
FILES = sorted(path for path in EVERY if not path.relative_to(ROOT).parts[0].startswith("."))
PAGES = [str(path.relative_to(ROOT)) for path in FILES]
STALE = "docs/engines.md#replies-of-earlier-weights-or-of-another-sampler"

PPO_CONFIG, LOGGED = (text.split() for text in parts("trl_names.txt").values())
"""The fields of TRL 0.11.4's PPOConfig, and the metrics that its PPOTrainer and its notebooks logged."""
MADE_FROM_CODE = (
    *"memory foreign presets metrics options others methods families recipes".split(),
    "keyword file",
    "chat file",
)
"""Blocks that state what the code says, and no measurement."""
DRAWN = {"policy_gradients": ["policy-gradients.svg"], "architecture": ["architecture.svg"]}
"""Figures whose script takes the name of the file."""
BLOCK = re.compile(r"<!-- ([\w-]+) -->\n(.*?)<!-- /\1 -->(?=([^<]{0,400}))", re.DOTALL)
"""A generated part: its mark, its text, and the text behind it."""
SOURCES = (".py", ".yaml", ".txt", ".ipynb", ".md", ".sh")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    standing = read("docs/methods/ppo.md").partition("<!-- kl -->\n")[2].partition("<!-- /kl -->")[0]
    same = SimpleNamespace(table=lambda: standing)
    vars(module).update(kl_table=same, computed=module.kl_table.table)  # which the slow test below calls
    return module


@pytest.mark.slow
def test_the_table_of_kl_penalties_is_up_to_date(generate: ModuleType) -> None:
    assert f"<!-- kl -->\n{generate.computed()}<!-- /kl -->" in read("docs/methods/ppo.md")


def test_generated_parts_are_up_to_date(generate: ModuleType) -> None:
    """But for the table of design.md, which tests/test_house.py compares, and mistakes.md (tests/test_mistakes.py)."""
    made = {name: text for name, text in generate.pages().items() if name != "design.md"}
    assert [name for name, text in made.items() if read(f"docs/{name}") != text] == [], "run `make docs`"


def test_every_measured_block_names_its_command(generate: ModuleType) -> None:
    """In the block, or in the lines below it."""
    bare = []
    for page in [f"docs/{name}" for name in generate.pages()]:
        for name, block, after in BLOCK.findall(read(page)):
            figures = re.search(r"\d\.\d", block) and not block.startswith("```")
            if figures and name not in MADE_FROM_CODE and not re.search(r"`(python -m|make) \w+", block + after):
                bare.append(f"{page}: {name}")
    assert bare == []


def test_every_figure_is_drawn_by_a_script_that_its_page_names() -> None:
    scripts = {path.stem: path.read_text(encoding="utf-8") for path in ROOT.glob("benchmarks/*.py")}
    shown = {page: re.findall(r"!\[[^\]]*\]\((?:docs/|\.\./)?figures/([\w.-]+)\)", read(page)) for page in PAGES}
    for page, figures in shown.items():
        for figure in figures:
            makers = [name for name, text in scripts.items() if figure in text or figure in DRAWN.get(name, ())]
            assert makers, f"{page}: no script in benchmarks/ writes {figure}"
            named = any(f"benchmarks.{name}" in read(page) for name in makers) or page == "README.md"
            assert named, f"{page}: name the command of {figure}"
    assert {path.name for path in ROOT.glob("docs/figures/*")} <= {name for names in shown.values() for name in names}


def test_the_findings_that_readme_quotes_were_told() -> None:
    told = json.loads((ROOT / "benchmarks/results/kl-samples.json").read_text(encoding="utf-8"))
    without = next(run for run in told["runs"] if run["run"] == "without")
    quoted = read("README.md")
    assert f"{without['before']:.3f} -> {without['after']:.3f} in 72 steps" in quoted
    assert any(f"problem: {said}" in quoted for said in without["findings"])


def test_every_option_has_its_sentence(generate: ModuleType) -> None:
    """Options that explain themselves by their name alone are few, and named here."""
    plain = {"algorithm", "steps", "epochs", "lr", "max_grad_norm", "checkpoint_minutes"}
    for group, made in config_schema("ppo").items():
        said = generate.sentences(made)
        missing = {name for name in generate.defaults(made) if not said.get(name)} - plain
        assert missing == set(), f"{group or 'train'}: write a sentence under the field"


def anchors(path: Path) -> set[str]:
    """The names of a page's headings; of equal ones, the later have a number."""
    found: list[str] = []
    for heading in HEADING.findall(without_code(path.read_text(encoding="utf-8"))):
        name = anchor(heading[1])
        found.append(name if name not in found else f"{name}-{found.count(name)}")
    return set(found)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    dead, path = [], ROOT / page
    for target, place in re.findall(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", without_code(read(page))):
        if re.match(r"https?://|mailto:", target):
            continue
        there = path.parent / target if target else path
        if not there.exists() or (place and there.suffix == ".md" and place[1:] not in anchors(there)):
            dead.append(target + place)
    assert dead == []


def test_the_pages_that_sources_name_exist() -> None:
    """In docstrings, error sentences, recipes and the notebook; and the first page leads to every other."""
    folders = ("src/operant", "benchmarks", "recipes", "tests")
    texts = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    named = {name for path in texts for name in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))}
    assert {name for name in named if not (ROOT / name).is_file()} == set()
    led = set(re.findall(r"\]\(([\w-]+\.md)\)", read("docs/index.md")))
    assert {path.name for path in ROOT.glob("docs/*.md")} - led == {"index.md"}


def test_some_test_runs_the_snippets_of_every_page() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/test_*.py"))
    shown = [page for page in PAGES if page.startswith("docs/") and snippets(page)]
    assert len(shown) > 12 and [page for page in shown if page not in tests and Path(page).name not in tests] == []


@pytest.mark.parametrize("page", ["docs/methods/ppo.md", "docs/other-names.md", "docs/fast.md"])
def test_named_options_exist(page: str) -> None:
    known = {full for algorithm in ALGORITHMS for full in names(config_schema(algorithm))}
    groups = {full.split(".")[0] for full in known if "." in full}
    said = {word for word in re.findall(r"`([a-z_]+\.[a-z_]+)`", read(page)) if word.split(".")[0] in groups}
    options = {word for word in said if not word.endswith((".py", ".json", ".generate"))}
    assert len(options) >= 4 and options - known == set()


def test_the_code_that_the_page_of_ppo_names_is_there() -> None:
    rows = re.findall(r"^\| [^|]+ \| `([\w/]+\.py)` \| (`[^|]+) \|$", read("docs/methods/ppo.md"), re.MULTILINE)
    assert len(rows) > 6
    for file, found in rows:
        text = (ROOT / "src/operant" / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", found):
            assert re.search(rf"^(def|class) {name}\b|^{name} = ", text, re.MULTILINE), f"{file}: {name}"


@pytest.mark.parametrize("page", ["docs/methods/ppo.md", "docs/other-names.md", "docs/engines.md"])
def test_named_metrics_exist(page: str) -> None:
    ours = {metric.split("/")[0] for metric in METRICS}
    said = {word for word in re.findall(r"`([a-z]+/[a-z_0-9]+)`", read(page)) if word.split("/")[0] in ours}
    theirs = {word for word in LOGGED if "/" in word} | {word for m in METRICS.values() for word in m.old.split(", ")}
    assert said - set(METRICS) - theirs == set()


def test_every_old_option_and_metric_is_named() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", read("docs/other-names.md"), flags=re.MULTILINE)
    assert set(PPO_CONFIG) - set(rows) == set() and set(LOGGED) - set(rows) == set()


def tiny(folder: Path) -> str:
    return on_disk(folder, lm(vocab=len(WORDS)), tokenizer_of(WORDS, eos_token=WORDS[2]))


@pytest.mark.slow
def test_the_snippets_of_from_trl_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, today = snippets("docs/from-trl.md")
    exec(old, {})
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(GRPOConfig=stand_in("GRPO", generation_batch_size=4)))
    space: dict[str, Any] = {}
    exec(today, space)
    found = space["run"].metrics[-1]
    assert found["step"] == 2 and found["reward/brevity/mean"] < 0 <= found["reward/accuracy/mean"]


def test_the_loop_beside_trls_runs(here: Path) -> None:
    loop, triplets, own = snippets("docs/other-names.md")
    space: dict[str, Any] = {
        "operant": operant,
        "model_name": tiny(here / "model"),
        "batches": [["the film", "so"], ["the film was", "bad and"]],
        "judge": lambda text: float(text.count("good")),
    }
    exec(loop, space)
    assert space["metrics"]["step"] == 2
    assert GPT2LMHeadModel.from_pretrained(here / "gpt2-imdb-positive").config.vocab_size == len(WORDS)

    space |= {"queries": ["the film", torch.tensor([1, 2])], "responses": ["was good", torch.tensor([4, 0])]}
    exec(triplets, space | {"scores": [torch.tensor(1.0), 0.5]})
    assert space["learner"].progress.step == 3

    exec(own, space | {"torch": torch})
    space["learner"].step(space["learner"].generate(["the film"] * 4), [1.0, 0.0, 0.5, 0.2])


def test_the_snippet_of_fast_runs() -> None:
    (snippet,) = snippets("docs/fast.md")
    made: dict = {}
    exec(snippet, made)
    learner = made["learner"]
    learner.step(learner.generate(["This film"] * 4, max_new_tokens=4), [0.0, 1.0, 0.0, 1.0])
    assert learner.policy.trunk is not None and learner.policy.rounds


@pytest.mark.slow
def test_the_small_model_of_the_page_learns(here: Path) -> None:
    (snippet,) = snippets("docs/models.md")
    torch.manual_seed(0)
    made: dict[str, Any] = {}
    exec(snippet, made)
    first, last = (made["run"].metrics[i]["reward/mean"] for i in (0, -1))
    assert last > first + 1 and made["tokenizer"].decode(made["tokenizer"]("a film")["input_ids"]) == "a film"


@pytest.mark.slow
def test_the_observer_of_trackers_runs(here: Path) -> None:
    (snippet,) = snippets("docs/reading-a-report.md")
    judge = {"reward": lambda rollouts: [float(r.reply.count("good")) for r in rollouts]}
    made: dict[str, Any] = {"policy": tiny(here / "model"), "tasks": ["the film", "so"] * 64, **judge}
    exec(snippet, made)
    rewards = [metrics["reward/mean"] for metrics in made["run"].metrics]
    assert made["best"].best[0] == max(rewards) and len(rewards) == 3
    assert f"the best mean reward was {max(rewards):.3f}" in (made["run"].path / "log.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_snippet_of_stale_replies_runs(capsys: pytest.CaptureFixture[str]) -> None:
    snippet, (recorded,) = snippets(STALE)[0], snippets("docs/engines.md#replies-made-elsewhere")
    made: dict[str, Any] = {}
    exec(snippet, made)
    assert capsys.readouterr().out == "1.0\n"
    assert made["metrics"]["rollout/importance_mean"] != 1 and made["metrics"]["rollout/too_stale"] == 0
    exec(recorded, {})
    assert capsys.readouterr().out == "1.0 1.0\n"


def test_every_promise_names_a_test_that_is_there():
    rows = [line for line in read("docs/resuming.md#promises").splitlines() if line.startswith("| ")]
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", "".join(rows))
    places = {path.name: path for folder in ("tests", "benchmarks/tests") for path in (ROOT / folder).glob("test_*.py")}
    gone = [f"{file}::{name}" for file, name in named if f"def {name}(" not in places[file].read_text(encoding="utf-8")]
    assert not gone
    assert all("`test_" in row or row.startswith("| promise") for row in rows) and len(named) > 50


def test_the_reload_of_the_engines_page_is_the_default() -> None:
    from operant.engines.openai import RELOAD

    (block,) = snippets("docs/engines.md", "yaml")
    assert yaml.safe_load(block)["engine"]["reload"] == RELOAD


def test_the_workflows_call_targets_and_files_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    files = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in ROOT.glob(".github/workflows/*.yml")]
    runs = [step["run"] for file in files for job in file["jobs"].values() for step in job["steps"] if "run" in step]
    for word in re.findall(r"^make (.*)$", "\n".join(runs), flags=re.MULTILINE):
        assert {w for w in word.split() if "=" not in w} <= targets, word
    assert ".ci/run" in runs and (ROOT / ".ci/run").is_file()
