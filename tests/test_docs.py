"""The pages say what the code does: generated parts are up to date, names exist, links lead somewhere, snippets run."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import operant
from operant.algorithms import ALGORITHMS
from operant.metrics.registry import METRICS
from operant.options import names
from operant.runs.config import config_schema

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/parity/*.md")])
FROM_TRL = ROOT / "docs" / "from-trl.md"

# The fields of TRL 0.11.4's PPOConfig, and the metrics that its PPOTrainer and its notebooks logged.
PPO_CONFIG = """exp_name seed log_with task_name model_name query_dataset reward_model remove_unused_columns
tracker_kwargs accelerator_kwargs project_kwargs tracker_project_name push_to_hub_if_best_kwargs steps learning_rate
adap_kl_ctrl init_kl_coef kl_penalty target horizon gamma lam cliprange cliprange_value vf_coef batch_size
forward_batch_size mini_batch_size gradient_accumulation_steps world_size ppo_epochs max_grad_norm optimize_cuda_cache
optimize_device_cache early_stopping target_kl compare_steps ratio_threshold use_score_scaling use_score_norm score_clip
whiten_rewards gradient_checkpointing is_encoder_decoder is_peft_model backward_batch_size global_backward_batch_size
global_batch_size dataset_num_proc""".split()
LOGGED = """env/reward_mean env/reward_std env/reward_dist ppo/mean_scores ppo/std_scores objective/kl objective/kl_dist
objective/logprobs objective/ref_logprobs objective/kl_coef objective/entropy ppo/mean_non_score_reward ppo/loss/policy
ppo/loss/value ppo/loss/total ppo/policy/entropy ppo/policy/approxkl ppo/policy/policykl ppo/policy/clipfrac
ppo/policy/advantages ppo/policy/advantages_mean ppo/policy/ratio ppo/returns/mean ppo/returns/var ppo/val/vpred
ppo/val/error ppo/val/clipfrac ppo/val/mean ppo/val/var ppo/val/var_explained ppo/learning_rate tokens/queries_len_mean
tokens/queries_len_std tokens/queries_dist tokens/responses_len_mean tokens/responses_len_std tokens/responses_dist
time/ppo/forward_pass time/ppo/compute_rewards time/ppo/compute_advantages time/ppo/optimize_step time/ppo/calc_stats
time/ppo/total time/get_response time/build_input_sentiment time/get_sentiment_preds time/optimization time/epoch
game_log gradients/*""".split()


def page(path: Path) -> str:
    return path.read_text(encoding="utf-8")


GENERATED = """metrics.md options.md ppo.md algorithms.md kl.md from-trl.md fast.md isolated-rewards.md sandbox.md
checkpoints.md how-to-train.md recipes.md textworld.md text-worlds.md translation.md rl4lms.md scale.md tasks.md
extending.md ../README.md""".split()


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", GENERATED)
def test_generated_parts_are_up_to_date(generate: ModuleType, name: str) -> None:
    assert page(ROOT / "docs" / name) == generate.pages()[name], "run `make docs`"


def test_the_findings_that_readme_quotes_were_told() -> None:
    told = json.loads((ROOT / "benchmarks/results/kl-samples.json").read_text(encoding="utf-8"))
    without = next(run for run in told["runs"] if run["run"] == "without")
    quoted = page(ROOT / "README.md")
    assert f"{without['before']:.3f} -> {without['after']:.3f} in 72 steps" in quoted
    assert any(f"problem: {said}" in quoted for said in without["findings"])


def test_every_option_has_its_sentence(generate: ModuleType) -> None:
    """Options that explain themselves by their name alone are few, and named here."""
    plain = {"algorithm", "steps", "epochs", "lr", "max_grad_norm", "checkpoint_minutes"}
    for group, made in config_schema("ppo").items():
        said = generate.sentences(made)
        missing = {name for name in generate.defaults(made) if not said.get(name)} - plain
        assert missing == set(), f"{group or 'train'}: write a sentence under the field"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"```.*?```", "", page(path), flags=re.DOTALL))
    local = [target for target in targets if not re.match(r"https?://|mailto:", target)]
    assert [target for target in local if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("name", ["ppo.md", "from-trl.md", "fast.md"])
def test_named_options_exist(name: str) -> None:
    known = {full for algorithm in ALGORITHMS for full in names(config_schema(algorithm))}
    groups = {full.split(".")[0] for full in known if "." in full}
    said = {word for word in re.findall(r"`([a-z_]+\.[a-z_]+)`", page(ROOT / "docs" / name))}
    options = {word for word in said if word.split(".")[0] in groups and not word.endswith((".py", ".generate"))}
    assert len(options) >= 4
    assert options - known == set()


@pytest.mark.parametrize("name", ["ppo.md", "from-trl.md", "stale-replies.md", "engines.md"])
def test_named_metrics_exist(name: str) -> None:
    text = page(ROOT / "docs" / name)
    ours = {metric.split("/")[0] for metric in METRICS}
    said = {word for word in re.findall(r"`([a-z]+/[a-z_0-9]+)`", text) if word.split("/")[0] in ours}
    theirs = {word for word in LOGGED if "/" in word} | {word for m in METRICS.values() for word in m.old.split(", ")}
    assert said - set(METRICS) - theirs == set()


def test_every_old_option_and_metric_is_named() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", page(FROM_TRL), flags=re.MULTILINE)
    assert set(PPO_CONFIG) - set(rows) == set()
    assert set(LOGGED) - set(rows) == set()


def tiny(folder: Path) -> str:
    """A random language model over a few words, as a transformers folder."""
    words = ["<end>", "the", "film", "was", "good", "bad", "and", "so"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(words), **shape)).save_pretrained(folder)
    return str(folder)


def test_the_loop_of_from_trl_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, triplets, own = re.findall(r"```python\n(.*?)```", page(FROM_TRL), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {
        "operant": operant,
        "model_name": tiny(tmp_path / "model"),
        "batches": [["the film", "so"], ["the film was", "bad and"]],
        "judge": lambda text: float(text.count("good")),
    }
    exec(loop, space)
    assert space["metrics"]["step"] == 2
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2-imdb-positive").config.vocab_size == 8

    space |= {"queries": ["the film", torch.tensor([1, 2])], "responses": ["was good", torch.tensor([4, 0])]}
    exec(triplets, space | {"scores": [torch.tensor(1.0), 0.5]})
    assert space["learner"].progress.step == 3

    exec(own, space | {"torch": torch})
    space["learner"].step(space["learner"].generate(["the film"] * 4), [1.0, 0.0, 0.5, 0.2])


def test_the_snippet_of_fast_runs() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", page(ROOT / "docs" / "fast.md"), flags=re.DOTALL)
    made: dict = {}
    exec(snippet, made)
    learner = made["learner"]
    replies = learner.generate(["This film"] * 4, max_new_tokens=4)
    learner.step(replies, [0.0, 1.0, 0.0, 1.0])
    assert learner.policy.trunk is not None and learner.policy.rounds


def test_the_observer_of_trackers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", page(ROOT / "docs" / "trackers.md"), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    judge = {"reward": lambda rollouts: [float(r.reply.count("good")) for r in rollouts]}
    made: dict[str, Any] = {"policy": tiny(tmp_path / "model"), "tasks": ["the film", "so"] * 64, **judge}
    exec(snippet, made)
    rewards = [metrics["reward/mean"] for metrics in made["run"].metrics]
    assert made["best"].best[0] == max(rewards) and len(rewards) == 3
    assert f"the best mean reward was {max(rewards):.3f}" in page(made["run"].path / "log.txt")


def test_the_snippet_of_stale_replies_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", page(ROOT / "docs" / "stale-replies.md"), flags=re.DOTALL)
    made: dict[str, Any] = {}
    exec(snippet, made)
    assert capsys.readouterr().out == "1.0\n"
    assert made["metrics"]["rollout/importance_mean"] != 1 and made["metrics"]["rollout/too_stale"] == 0


def test_every_promise_names_a_test_that_is_there():
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page(ROOT / "docs" / "promises.md"))
    rows = [line for line in page(ROOT / "docs" / "promises.md").splitlines() if line.startswith("| ")]
    places = {path.name: path for folder in ("tests", "benchmarks/tests") for path in (ROOT / folder).glob("test_*.py")}
    gone = [f"{file}::{name}" for file, name in named if f"def {name}(" not in page(places[file])]
    assert not gone
    assert all("`test_" in row or row.startswith("| promise") for row in rows) and len(named) > 50


def test_the_reload_of_the_engines_page_is_the_default() -> None:
    from operant.engines.openai import RELOAD

    (block,) = re.findall(r"```yaml\n(.*?)```", page(ROOT / "docs" / "engines.md"), flags=re.DOTALL)
    assert yaml.safe_load(block)["engine"]["reload"] == RELOAD
