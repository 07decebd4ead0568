"""`operant migrate`: what becomes of scripts, each of which is then run for two steps."""

import ast
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from operant.options import names, resolve
from operant.runs.config import config_schema, named_in
from operant.tools.cli import main
from operant.tools.migrate import migrated
from operant.tools.migrate.renaming import renamed
from operant.types import OperantError

ROWS = '[{"prompt": "The film"}, {"prompt": "A plot"}]'
PAIRS = '[{"prompt": "The film", "chosen": " is good", "rejected": " is bad"}] * 4'
REPLIES = '[{"prompt": "The film", "completion": " is good"}] * 4'
LENGTH = "def length(completions, **kwargs):\n    return [float(len(c)) for c in completions]\n"
# Of each: the script, what the new one contains, what it no longer contains.
SCRIPTS = {
    "grpo": (
        f"""
from trl import GRPOConfig, GRPOTrainer
{LENGTH}
rows = {ROWS}
args = GRPOConfig("run", num_generations=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
                  max_completion_length=4, beta=0.1, num_train_epochs=2, scale_rewards="none", vllm_mode="colocate")
trainer = GRPOTrainer("builtin:reviews-lm", [length], args, train_dataset=rows)
trainer.train()
trainer.save_model(args.output_dir + "/copy")
print(args.output_dir)
trainer.push_to_hub()
""",
        """import operant
"batch": 4,
"out": "run",
"samples": 2,
"sampling.max_tokens": 4,
"kl.loss_coef": 0.1,
"advantage.scale": False,
"optimizer.lr": 1e-6,
"update.per": "token",
# operant: vllm_mode="colocate": there is no such option here; see docs/options.md
trainer = operant.train(
    reward=length,
    steps=max(1, int(2 * 2 * len(rows) / 4)),
    **args,
operant.export(trainer.policy, args["out"] + "/copy")
print(args["out"])
# operant: trainer.push_to_hub(): push the folder export/ of the run with huggingface_hub""",
        ["import GRPO", "trainer.train", "\ntrainer.push"],
    ),
    "rloo": (
        f"""
import trl
{LENGTH}
class Work:
    def go(self):
        funcs = [length, length]
        self.trainer = trl.RLOOTrainer(
            model="builtin:reviews-lm", reward_funcs=[length],
            args=trl.RLOOConfig(output_dir="run", per_device_train_batch_size=4, max_steps=2, beta=0.2,
                                max_completion_length=4, report_to="none", bf16=False),
            train_dataset={ROWS},
        )
        self.trainer.train()
Work().go()
""",
        """import operant
algorithm="rloo",
"kl.coef": 0.2,
"steps": 2,
"samples": 2,
# operant: operant.train above has trained to the end""",
        ["trl", "self.trainer.train()"],
    ),
    "dpo": (
        f"""
from trl import DPOConfig, DPOTrainer
config = DPOConfig(output_dir="run", max_steps=2, per_device_train_batch_size=2, loss_type="ipo",
                   lr_scheduler_type="cosine", optim="adamw_torch")
DPOTrainer("builtin:reviews-lm", None, config, train_dataset={PAIRS}).train()
""",
        """"loss.kind": "ipo-mean",
"loss.beta": 0.1,
"optimizer.schedule": "cosine",
"optimizer.kind": "adamw",
algorithm="dpo",""",
        ["trl", "reward="],
    ),
    "sft": (
        f"""
from trl.trainer.sft_trainer import SFTTrainer
from trl import SFTConfig as Options
rows = {REPLIES}
options = Options(output_dir="run", num_train_epochs=1, per_device_train_batch_size=2, max_length=32)
trainer = SFTTrainer(model="builtin:reviews-lm", args=options, train_dataset=rows, callbacks=[])
result = trainer.train()
""",
        """"data.max_length": 32,
steps=max(1, int(1 * len(rows) / 2)),
result = trainer""",
        ["trl", "callbacks"],
    ),
    "reward": (
        f"""
from trl import RewardConfig, RewardTrainer
from transformers import AutoModelForSequenceClassification
make = AutoModelForSequenceClassification
trainer = RewardTrainer("builtin:reviews-lm", RewardConfig(output_dir="run", max_steps=2), train_dataset={PAIRS})
trainer.train()
""",
        """"reward_model",
algorithm="reward-model",
"policy.trunk": "builtin:reviews-lm",
"optimizer.lr": 1e-4,""",
        ["from trl"],
    ),
    "trlx": (
        """
import trlx
from trlx.data.configs import TRLConfig, TrainConfig, OptimizerConfig
from trlx.models.modeling_ppo import PPOConfig
config = TRLConfig(
    train=TrainConfig(total_steps=2, batch_size=4, seed=3, checkpoint_dir="run"),
    optimizer=OptimizerConfig(name="adamw", kwargs=dict(lr=1e-4, betas=(0.9, 0.95))),
    method=PPOConfig(num_rollouts=4, ppo_epochs=1, cliprange=0.3, gen_kwargs=dict(max_new_tokens=4, top_k=0)),
)
config.method.init_kl_coef = 0.2
def score(samples, prompts):
    return [float(len(s)) for s in samples]
trlx.train("builtin:reviews-lm", reward_fn=score, prompts=["The film", "A plot"], config=config)
""",
        """import operant
"batch": 4,
"update.minibatch": 4,
"steps": 2,
"loss.clip": 0.3,
"optimizer.betas": (0.9, 0.95),
"sampling.max_tokens": 4,
config["kl.coef"] = 0.2
reward=lambda rollouts: score(samples=[r.text for r in rollouts], prompts=[r.query for r in rollouts]),""",
        ["trlx"],
    ),
}
LOOP = """
import torch
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model, DDPOConfig
from trl.core import LengthSampler
trainer = PPOTrainer(PPOConfig(), None, None, None)
"""
RL4LMS = """
reward_fn: {id: meteor}
datapool: {id: commongen, args: {}}
env: {n_envs: 10, args: {max_prompt_length: 15, max_episode_length: 20}}
alg:
  id: nlpo
  args: {n_steps: 128, batch_size: 64, learning_rate: 0.000002, n_epochs: 5}
  kl_div: {coeff: 0.001, target_kl: 2.0}
  policy:
    args: {model_name: t5-base, top_mask: 0.9, target_update_iterations: 20,
           generation_kwargs: {top_k: 50, min_length: 10, max_new_tokens: 20}}
train_evaluation: {n_iters: 100, eval_every: 10, metrics: [{id: rouge}, {id: spice}]}
"""


def moved(script: str) -> str:
    return migrated(script, Path("script.py"))


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script_becomes_ours(kind):
    script, there, gone = SCRIPTS[kind]
    new = moved(script)
    for line in there.splitlines():
        assert line in new, new
    kept = "\n".join(line for line in new.splitlines() if "# operant:" not in line)
    assert not [text for text in gone if text in kept], new


@pytest.mark.parametrize("kind", SCRIPTS)
def test_its_options_exist_and_it_trains_two_steps(kind, tmp_path, monkeypatch):
    new = moved(SCRIPTS[kind][0])
    tree = ast.parse(new)
    keys = [k.value for d in ast.walk(tree) if isinstance(d, ast.Dict) for k in d.keys if isinstance(k, ast.Constant)]
    calls = [call for call in ast.walk(tree) if isinstance(call, ast.Call)]
    algorithm = next(ast.literal_eval(k.value) for call in calls for k in call.keywords if k.arg == "algorithm")
    known = {*names(config_schema(algorithm)), "out", "policy.trunk", "prompt", "completion", "chosen", "rejected"}
    assert set(keys) <= known
    monkeypatch.chdir(tmp_path)
    exec(compile(new, "script.py", "exec"), {"__name__": "__main__"})
    metrics = Path("run/metrics.jsonl").read_text().splitlines()
    assert len(metrics) >= 2


def test_a_loop_of_0_11_gets_our_trl():
    new = moved(LOOP)
    assert "from operant.compat.trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer" in new
    assert "from operant.compat.trl.core import LengthSampler" in new
    assert "from trl import DDPOConfig" in new and "# operant: DDPOConfig: not in operant; these still need TRL" in new
    assert "# operant: natively this loop is learner = operant.Learner(" in new


def test_annotations_and_other_uses_of_the_classes():
    new = moved(
        "from trl import GRPOConfig, GRPOTrainer, RLOOTrainer\n"
        "def options(out: str) -> GRPOConfig:\n    return GRPOConfig(output_dir=out)\n"
        "def go(args: GRPOConfig, rows) -> GRPOTrainer:\n"
        "    trainer = GRPOTrainer('m', args=args, train_dataset=rows)\n    if rows:\n        trainer.train()\n"
        "class Own(RLOOTrainer):\n    pass\n"
    )
    assert "def options(out: str) -> dict:" in new and "-> operant.Run:" in new
    assert "import operant\nfrom trl import RLOOTrainer\n" in new and "GRPO" not in new
    assert "# operant: RLOOTrainer: only its calls are moved" in new
    assert "    # operant: args: unpack its options, under operant's names" in new
    assert "        # operant: operant.train above has trained to the end\n        pass\n" in new


def test_adapters_and_rewards_of_a_script_keep_what_they_mean():
    text = (
        "from peft import LoraConfig\nfrom trl import GRPOConfig, GRPOTrainer\nfuncs = [acc]\nfuncs.append(form)\n"
        "config = GRPOConfig('r', max_steps=2, reward_weights=weights)\n"
        "GRPOTrainer('m', funcs, config, train_dataset=rows, peft_config=LoraConfig(r=16))\n"
    )
    new = migrated(text, Path("train.py"))
    assert '"lora.rank": 16' in new and '"lora.alpha": 8' in new  # peft's own default
    assert "reward=dict(zip([acc], weights))" in new and "what is appended to funcs is missing" in new
    of_trlx = [renamed({"scale_reward": code}, "ppo", "trlx").values for code in ("'ignored'", "'running'")]
    assert [found.get("score.scale") for found in of_trlx] == [None, "True"]


def test_rl4lms_becomes_the_preset_that_was_made_of_it():
    from operant.algorithms import preset

    recipe = yaml.safe_load(migrated(RL4LMS, Path("t5_nlpo.yml")))
    made = preset("rl4lms-commongen-nlpo")
    assert {name: recipe[name] for name in made} == made
    assert recipe["reward"] == "meteor" and recipe["form"] == "commongen" and recipe["evaluation.metrics"] == "rouge"
    assert "# operant: metrics spice: see docs/rl4lms.md" in migrated(RL4LMS, Path("t5_nlpo.yml"))
    resolve(config_schema("nlpo", named_in(recipe)), recipe)


def test_the_command_prints_and_writes_only_when_asked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, script = Path("train.py"), textwrap.dedent(SCRIPTS["dpo"][0])
    path.write_text(script)
    assert main(["migrate", "train.py"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("--- train.py\n+++ train.py\n@@") and "+import operant\n" in printed
    assert path.read_text() == script
    assert main(["migrate", "train.py", "--write"]) == 0
    assert path.read_text() == moved(script)


@pytest.mark.parametrize(
    "name, text, sentence",
    [
        ("none.py", None, "there is no such file"),
        ("a.txt", "text", "is no Python script"),
        ("a.py", "import trl\nx = (1,\n", "a.py, line 2: '(' was never closed; it must be a Python 3 script"),
        ("a.py", "import torch\n", "a.py imports neither TRL (trl) nor trlX (trlx): there is nothing to move"),
        ("a.yml", "kl: 1\n", "is no configuration of RL4LMs"),
        ("a.yml", "kl: [1\n", "cannot be read as YAML"),
    ],
)
def test_wrong_input_is_a_sentence(name, text, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text)
    assert main(["migrate", name]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_without_libcst_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "libcst", None)
    with pytest.raises(OperantError, match=r"pip install 'operant\[migrate\]'"):
        moved(LOOP)
