"""`operant migrate`: what becomes of scripts, each of which is then run for two steps."""

import ast
import re
import sys
from pathlib import Path

import pytest
import yaml
from cases import cases, slow_but
from texts import parts

import operant
from operant.options import names, resolve
from operant.runs.config import config_schema, named_in
from operant.tools.cli import main
from operant.tools.migrate import migrated
from operant.tools.migrate.renaming import renamed
from operant.types import OperantError

BUILTIN = Path(operant.__file__).parent / "builtin"


def script_of(text):
    """A script, lines that the new one contains, and what it no longer contains."""
    script, there, gone = re.split("^---.*\n", text.replace("{BUILTIN}", str(BUILTIN)), flags=re.M)
    return script, there.splitlines(), gone.splitlines()


SCRIPTS = {name: script_of(text) for name, text in parts("migrate_scripts.txt").items()}
LOOP = """
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, DDPOConfig
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
    assert not [line for line in there if line not in new], new
    kept = "\n".join(line for line in new.splitlines() if "# operant:" not in line)
    assert not [text for text in gone if text in kept], new


@pytest.mark.parametrize("kind", slow_but(["dpo", "trlx"], SCRIPTS))
def test_its_options_exist_and_it_trains_two_steps(kind, here):
    new = moved(SCRIPTS[kind][0])
    tree = ast.parse(new)
    keys = [k.value for d in ast.walk(tree) if isinstance(d, ast.Dict) for k in d.keys if isinstance(k, ast.Constant)]
    calls = [call for call in ast.walk(tree) if isinstance(call, ast.Call)]
    algorithm = next(ast.literal_eval(k.value) for call in calls for k in call.keywords if k.arg == "algorithm")
    ours = {*names(config_schema(algorithm)), "out", "policy.trunk"}
    assert set(keys) <= ours | {"prompt", "completion", "chosen", "rejected", "label"}
    exec(compile(new, "script.py", "exec"), {"__name__": "__main__"})
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) >= 2


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
    assert "    # operant: args: with operant's names" in new and "        **args,\n" in new
    assert "        # operant: operant.train above has trained to the end\n        pass\n" in new


def test_arguments_whose_order_has_changed_are_left_out_with_a_comment():
    new = moved("from trl import KTOTrainer\nKTOTrainer(model, None, args, rows, held_out).train()")
    assert "# operant: arguments behind args without a name are left out" in new and "rows" not in new, new


def test_a_configuration_from_a_command_line_is_read_as_it_is():
    new = moved(
        "import trl\nfrom trl import GRPOConfig, GRPOTrainer, TrlParser\n"
        "def main(args: GRPOConfig, model):\n    run = GRPOTrainer(model.name, [f], args, train_dataset=rows)\n"
        "main(*TrlParser((GRPOConfig, Model)).parse_args_and_config())\nclass Own(trl.RLOOTrainer):\n    pass\n"
    )
    assert "        args=args,\n" in new and "import trl, operant\n" in new and "args: GRPOConfig" in new
    assert "from trl import GRPOConfig, TrlParser\n" in new and "its tokenizer" not in new


def test_what_a_class_of_the_script_derives_from_stays():
    text = "from trl import DPOConfig, DPOTrainer\nclass Own(DPOTrainer):\n    pass\nOwn('m', args=DPOConfig('r'))\n"
    new = moved(text)
    assert "args=DPOConfig('r')" in new and "a class here derives from DPOTrainer" in new and "import DPOC" in new


def test_adapters_and_rewards_of_a_script_keep_what_they_mean():
    text = (
        "from peft import LoraConfig\nfrom trl import GRPOConfig, GRPOTrainer\nfuncs = [acc]\nfuncs.append(form)\n"
        "config = GRPOConfig('r', max_steps=2, reward_weights=weights)\n"
        "GRPOTrainer('m', funcs, config, train_dataset=rows, peft_config=LoraConfig(r=16))\n"
    )
    new = migrated(text, Path("train.py"))
    assert '"lora.rank": 16' in new and '"lora.alpha": 8' in new  # peft's own default
    assert "reward=dict(zip([acc], weights))" in new and "what is appended to funcs is missing" in new
    of_trlx = [renamed({"scale_reward": code}, "ppo", "trlx").values for code in ("'ignored'", "'running'", "'ref'")]
    assert [found.get("score.scale") for found in of_trlx] == [None, "True", None]


def test_what_trlx_counts_in_optimizer_steps_is_counted_in_ours():
    given = {"total_steps": "1000", "eval_interval": "40", "num_rollouts": "100", "batch_size": "32", "ppo_epochs": "2"}
    found = renamed(given | {"checkpoint_interval": "9"}, "ppo", "trlx")  # 2 passes over 4 batches
    assert {"steps": "125", "evaluate_every": "5", "checkpoint_every": "1"}.items() <= found.values.items()
    assert "are one step here" in found.comments[0]
    assert renamed(given | {"epochs": "100"}, "ppo", "trlx").values["steps"] == "100"  # whichever ends first
    wide = {"lr_scheduler_type": "'cosine_annealing'", "T_max": "1e12", "eta_min": "3e-5"}
    slow = renamed(given | wide, "ppo", "trlx")
    assert slow.values["optimizer.schedule"] == '"constant"' and not any("T_max" in text for text in slow.comments)
    assert renamed(wide, "ilql", "trlx").values["optimizer.schedule"] == '"constant"'
    assert renamed(given | wide | {"T_max": "1000"}, "ppo", "trlx").values["optimizer.schedule"] == '"cosine"'
    unknown = renamed(given | {"num_rollouts": "n"}, "ppo", "trlx").comments
    assert any("divide by the optimizer steps" in comment for comment in unknown)
    head = "import trlx\nfrom trlx.data.default_configs import TRLConfig, ILQLConfig\n"
    more = "c = c.evolve(method=dict(beta=0.3))\nTRLConfig(model=dict(model_path='sft'), method=dict(cliprange=0.1))\n"
    new = moved(f"{head}c = TRLConfig(method=ILQLConfig(tau=0.6, beta=0.5, gen_kwargs=dict(beta=4)))\n{more}")
    found = ('"loss.tau": 0.6', '"loss.awac_beta": 0.5', '"sampling.guidance": 4', 'beta": 0.3', '"loss.clip": 0.1')
    assert all(part in new for part in found), new
    of_trl = {"per_device_train_batch_size": "4", "steps_per_generation": "4", "num_iterations": "2", "max_steps": "80"}
    found = renamed(of_trl | {"save_steps": "39", "eval_steps": "9"}, "grpo").values
    assert [found[name] for name in ("steps", "checkpoint_every", "evaluate_every")] == ["10", "4", "1"]
    assert renamed(of_trl | {"save_steps": "-1"}, "grpo").values["checkpoint_every"] == "-1"
    sums = "from trl import GRPOConfig\nargs = GRPOConfig('r', max_steps=2 * N, warmup_steps=10)\n"
    assert '"optimizer.warmup": 10 / (2 * N)' in moved(sums)
    alone = "from trl import SFTTrainer\nt = SFTTrainer('m', train_dataset=rows)\nif rows: t.push_to_hub()\n"
    assert "if rows: pass" in moved(alone)


def test_rl4lms_becomes_the_preset_that_was_made_of_it():
    from operant.algorithms import preset

    recipe = yaml.safe_load(migrated(RL4LMS, Path("t5_nlpo.yml")))
    made = preset("rl4lms-commongen-nlpo")
    assert {name: recipe[name] for name in made} == made
    assert recipe["reward"] == "meteor" and recipe["form"] == "commongen" and recipe["evaluation.metrics"] == "rouge"
    assert "# operant: metrics spice: see docs/other-names.md" in migrated(RL4LMS, Path("t5_nlpo.yml"))
    resolve(config_schema("nlpo", named_in(recipe)), recipe)


def test_what_a_yaml_of_rl4lms_says_of_sampling_and_bounds_is_kept():
    given = yaml.safe_load(RL4LMS) | {"reward_fn": {"id": "rouge", "args": {"rouge_type": "rouge1"}}}
    given["env"]["args"]["prompt_truncation_side"] = "right"
    given["alg"]["args"] |= {"clip_range": 0.3, "target_kl": 0.02, "max_grad_norm": 0.7}
    given["alg"]["policy"]["args"]["generation_kwargs"] |= {"temperature": 0.8}
    given["alg"]["policy"]["args"]["min_tokens_to_keep"] = 10
    given["alg"]["kl_div"] = {"coeff": 0.1, "norm_reward": True}  # without a target the price is fixed
    given["train_evaluation"]["generation_kwargs"] = {"do_sample": True, "top_k": 0, "temperature": 0.7, "num_beams": 5}
    given["train_evaluation"]["generation_kwargs"]["max_new_tokens"] = 100
    recipe = yaml.safe_load(migrated(yaml.safe_dump(given), Path("a.yml")))
    found = (recipe["loss.clip"], recipe["update.target_kl"], recipe["optimizer.max_grad_norm"])
    assert found == (0.3, pytest.approx(0.03), 0.7) and recipe["sampling.temperature"] == 0.8
    assert recipe["evaluation.sampling"] == {"top_k": 0, "temperature": 0.7, "max_tokens": 100}
    assert recipe["reward"] == "rouge:rouge1"
    assert recipe["data.prompt_keeps"] == "start" and recipe["evaluation.beams"] == 5 and "kl.control" not in recipe
    assert recipe["score.normalise"] is True and recipe["sampling.top_p_least"] == 10
    resolve(config_schema("nlpo", named_in(recipe)), recipe)
    del given["alg"]["args"]["n_epochs"]
    given["alg"]["args"]["normalize_advantage"] = given["env"]["args"]["terminate_on_eos"] = False
    given["alg"]["policy"]["args"]["generation_kwargs"]["do_sample"] = False
    new = migrated(yaml.safe_dump(given), Path("a.yml"))
    assert "# operant: do_sample=false, " in new and "alg.args normalize_advantage: not converted" in new
    assert "env.args terminate_on_eos: not" in new
    assert yaml.safe_load(new)["update.epochs"] == 10


def test_a_field_whose_meaning_depends_on_others_is_not_set_alone():
    new = moved(
        "from trl import GRPOConfig, GRPOTrainer\nargs = GRPOConfig('r', **more)\nargs.num_train_epochs = 1\n"
        "args.beta = 0.1\nt = GRPOTrainer('m', get(), args, train_dataset=rows)\nheld_out = t.evaluate()\n"
    )
    assert "num_train_epochs: it depends on other options" in new and 'args["kl.loss_coef"] = 0.1' in new
    assert "held_out = t.after.metrics()" in new and "    **more,\n}" in new  # what was given outdoes defaults


def test_the_command_prints_and_writes_only_when_asked(here, capsys):
    path, script = Path("train.py"), SCRIPTS["dpo"][0]
    path.write_text(script)
    assert main(["migrate", "train.py"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("--- train.py\n+++ train.py\n@@") and "+import operant\n" in printed
    assert path.read_text() == script
    odd = '"""\f\u2028"""\n'  # which end lines for `splitlines`, and not for Python
    path.write_text(odd + script, encoding="utf-8-sig")
    assert main(["migrate", "train.py", "--write"]) == 0
    assert path.read_text(encoding="utf-8") == odd + moved(script)


@cases(
    ("none.py", None, "there is no such file"),
    ("a.txt", "text", "is no Python script"),
    ("a.py", "import trl\nx = (1,\n", "a.py, line 2: '(' was never closed; it must be a Python 3 script"),
    ("a.py", "import torch\n", "a.py imports neither TRL (trl) nor trlX (trlx): there is nothing to move"),
    ("a.yml", "kl: 1\n", "is no configuration of RL4LMs"),
    ("a.yml", "kl: [1\n", "cannot be read as YAML"),
    ("a.yml", "kl: {a: 1}\n'kl': {b: 2}\n", "a.yml cannot be read as YAML: 'kl' is written twice; correct"),
    ("a.yml", "alg: {id: ppo, args: {n_steps: many}}\ndatapool: {id: imdb}\n", "a value of another kind"),
)
def test_wrong_input_is_a_sentence(name, text, sentence, here, capsys):
    if text is not None:
        Path(name).write_text(text)
    assert main(["migrate", name]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_without_libcst_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "libcst", None)
    with pytest.raises(OperantError, match=r"pip install 'operant\[migrate\]'"):
        moved(LOOP)
