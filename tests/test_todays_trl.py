"""What a script of TRL 1.16 has, works in `operant.train` as it is: configurations, reward functions, data sets.

`tests/parity/trl_1_16_surface.py` wrote what TRL itself has and passes; stand-ins of its classes are made of that.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cases import cases
from transformers import AutoTokenizer
from trl_compat.configurations import KEPT, stand_in

import operant
from operant.algorithms import find
from operant.data import DataOptions, load_tasks
from operant.options import defaults, resolve
from operant.rewards import judge
from operant.rewards import resolve as resolve_reward
from operant.runs.config import config_schema
from operant.sampling import Sampling, encode_prompt, reply_text
from operant.sandbox.reward_call import keywords
from operant.tools.migrate.configuration import with_configuration
from operant.tools.migrate.renaming import ALGORITHMS, DEFAULTS, literal, renamed
from operant.types import OperantError, Rollout, Task, Turn

MODEL = Path(operant.__file__).parent / "builtin/reviews-lm"
ROWS = [{"prompt": "The film", "answer": "good", "level": 3}, {"prompt": "A plot", "answer": "bad", "level": 4}]
EVERY = {"batch": 8, "out": "x", "optimizer.lr": 1e-6, "optimizer.schedule": "linear", "learner.seed": 42}
EVERY |= {"learner.device": "cpu", "model.gradient_checkpointing": True, "checkpoint_every": 500}


GRPO = {"steps": 60, "sampling.max_tokens": 512, "kl.loss_coef": 0.0, "advantage.deviation": "sample"}
GRPO |= {"update.per": "token", "model.precision": "bfloat16"}
# A batch of 4 * 4 replies is learnt from twice in optimizer steps of 4 * 2, so 40 of these are 10 steps.
SEVERAL = {"batch": 16, "update.minibatch": 8, "update.epochs": 2, "steps": 10, "samples": 4, "kl.loss_coef": 0.04}
SEVERAL |= {"update.per": "constant", "advantage.scale": False, "loss.clip_high": 0.28, "optimizer.warmup": 0.25}
SEVERAL |= {"optimizer.schedule": "cosine", "learner.on_length": "drop", "sampling.max_tokens": 512}
SEVERAL |= {"model.precision": "bfloat16", "checkpoint_every": 125}
RLOO = {"steps": 5, "samples": 2, "sampling.max_tokens": 512, "sampling.temperature": 0.7, "kl.coef": 0.05}
REWARD = {"steps": 7, "data.max_length": 1024, "optimizer.lr": 1e-4, "policy": "reward_model", "policy.trunk": "gpt2"}
CASES = {
    "grpo": ("GRPO", GRPO),
    "several steps a batch": ("GRPO", SEVERAL),
    "rloo": ("RLOO", RLOO | {"optimizer.betas": (0.9, 0.95)}),
    "dpo": ("DPO", {"steps": 8, "data.max_length": 1024, "loss.kind": "ipo-mean", "loss.beta": 0.2}),
    "sft": ("SFT", {"steps": 5, "data.max_length": 64, "optimizer.lr": 1e-4}),
    "reward": ("Reward", REWARD),
}


@pytest.mark.parametrize("case", CASES)
def test_a_configuration_becomes_our_options(case):
    kind, expected = CASES[case]
    given = {"tasks": [0] * 20, "policy": "gpt2"}
    found = with_configuration(stand_in(kind)(**KEPT["changed"][case]), given)
    algorithm = ALGORITHMS[kind]
    assert found == {"policy": "gpt2", "tasks": given["tasks"], "algorithm": algorithm} | EVERY | expected
    known = {**found, "policy.trunk": None}
    resolve(config_schema(algorithm), {name: x for name, x in known.items() if name not in ("out", "policy.trunk")})


def test_rows_with_a_margin_of_their_own_ask_for_it(tmp_path):
    row = {"prompt": "p", "chosen": " a", "rejected": " b", "margin": 2}
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(row), encoding="utf-8")

    def of(tasks, **more):
        return with_configuration(stand_in("Reward")(max_steps=7), {"tasks": tasks, **more}).get("loss.margin")

    assert [of([row]), of(str(file)), of([row], margin=0.5)] == [1.0, 1.0, None]
    assert of([{name: row[name] for name in ("prompt", "chosen", "rejected")}]) is None


def test_migrate_writes_every_default_that_is_not_ours():
    """Of a script that names no options, TRL's defaults must be read as they are; those are named that are left out."""
    left_out = {"batch", "out", "model.precision", "model.gradient_checkpointing", "checkpoint_every"}
    left_out |= {"learner.seed", "learner.device"}
    for kind, fields in KEPT["defaults"].items():
        algorithm = ALGORITHMS[kind]
        schema = config_schema(algorithm)
        usual = {f"{g}.{n}" if g else n: x for g, made in schema.items() for n, x in defaults(made).items()}
        usual |= resolve(schema, dict(find(algorithm).defaults))
        theirs = renamed({name: repr(x) for name, x in fields.items() if x is not None}, algorithm).values
        differ = {name for name, code in theirs.items() if usual.get(name) != literal(code)} - left_out
        written = renamed(DEFAULTS[algorithm], algorithm).values
        found, expected = ({name: literal(code[name]) for name in differ} for code in (theirs, written))
        assert found == expected, kind


@cases(
    ("per_device_train_batch_size=4 gradient_accumulation_steps=2 steps_per_generation=6", "batch=24 minibatch=8"),
    ("per_device_train_batch_size=size gradient_accumulation_steps=2", "batch=size * 2"),
    ("per_device_train_batch_size=4 generation_batch_size=16 max_steps=n", "steps=max(1, n * 4 // 16)"),
    ("use_bias_correction_kl=False scale_rewards='none'", "loss_kind='plain_k3' scale=False"),
    ("adam_beta1=0.8 use_cpu=True", "betas=(0.8, 0.999) device='cpu'"),
    ("reward_weights=[1, 2] shuffle_dataset=True use_vllm=False", ""),
    ("packing=True completion_only_loss=False", "packing='on' loss_on='all'"),
    ("num_iterations=2 per_device_train_batch_size=4 max_steps=8", "epochs=2 steps=4"),
    ("loss_type='cispo' temperature=0.9", "high=0.2 temperature=0.9"),
    ("importance_sampling_level='sequence' epsilon=0.1", "clip=0.1 clip_high=0.1 loss_kind='k3'"),
    ("lr_scheduler_type='constant' warmup_steps=3 max_steps=9 target=None", "steps=9"),
)
def test_what_an_option_of_a_script_becomes(written, expected):
    pairs = lambda text: dict(pair.split("=", 1) for pair in re.split(r" (?=[a-z_0-9]+=)", text) if pair)  # noqa: E731
    usual = renamed({}, "grpo").values
    found = {name: code for name, code in renamed(pairs(written), "grpo").values.items() if usual.get(name) != code}
    short = {name.rpartition(".")[2]: code.replace('"', "'") for name, code in found.items()}
    assert pairs(expected).items() <= short.items() and not {"reward", "shuffle", "engine"} & set(short)


@cases(
    ({"top_entropy_quantile": 0.2}, "GRPOConfig: top_entropy_quantile=0.2: there is no such option here"),
    ({"loss_type": "luspo"}, "GRPOConfig: loss_type='luspo': "),
    ({"shuffle_dataset": False}, "the order of the tasks is random here"),
    ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation='normalize_then_sum'"),
    ({"delta": 2.0, "sync_ref_model": True}, r"sync_ref_model=True.*and 1 more: delta=2.0: grpo has no such option"),
    ({"reward_weights": [1.0]}, r"reward_weights=\[1.0\].*: give a list of rewards, one a weight"),
    ({"max_steps": -1}, "num_train_epochs=3.0 of tasks whose number is not known"),
)
def test_what_has_no_equal_is_named(changes, sentence):
    given = {"tasks": "rows.jsonl", "reward": ["letters:e", "length:9"]}
    with pytest.raises(OperantError, match=sentence):
        with_configuration(stand_in("GRPO")(**{"max_steps": 1} | changes), given)
    with pytest.raises(OperantError, match="args is a dict: it must be a GRPOConfig, RLOOConfig"):
        with_configuration({"max_steps": 1}, given)


class Brief:
    """An async reward that is an object."""

    async def __call__(self, completions, **kwargs):
        return [-len(text) / 100 for text in completions]


def test_a_run_with_a_configuration_rewards_and_columns(tmp_path):
    seen: list[Any] = []

    def accuracy(prompts, completions, answer, log_metric, log_extra, **kwargs):
        seen.append((prompts, answer, kwargs["level"]))
        log_metric("letters", sum(map(len, completions)))
        log_extra("gold", answer)
        return [None if right == "bad" else float(right in text) for text, right in zip(completions, answer)]

    changes = {"per_device_train_batch_size": 4, "generation_batch_size": 4, "num_generations": 2, "bf16": False}
    changes |= {"max_completion_length": 4, "max_steps": 2, "reward_weights": [1.0, 0.5], "vllm_mode": "server"}
    changes |= {"output_dir": str(tmp_path / "run"), "gradient_checkpointing": False, "cast_lm_head_to_fp32": True}
    with pytest.warns(UserWarning, match=r"GRPOConfig: these options do nothing here: vllm_mode='server'"):
        known = {"args": stand_in("GRPO")(**changes), "steps": 1, "kl": {"loss_coef": 0.5}, "quiet": True}
        run = operant.train(str(MODEL), ROWS, [accuracy, Brief()], **known)
    assert run.config.learner["kl"].loss_coef == 0.5 and run.config.learner["model"].head_precision == "float32"
    assert len(run.metrics) == 1 and run.path == tmp_path / "run"  # an option of the call overrules the configuration
    prompts, answer, level = next(call for call in seen if len(call[0]) == 4)  # the others are of the probes
    rows = {(row["prompt"], row["answer"], row["level"]) for row in ROWS}
    assert set(zip(prompts, answer, level)) == rows and prompts.count("A plot") == 2
    found = run.metrics[0]
    assert found["reward/accuracy/abstained"] == 0.5 and found["reward/accuracy/letters/mean"] > 0
    assert found["reward/mean"] == pytest.approx(found["reward/accuracy/mean"] / 2 + found["reward/Brief/mean"] / 2)


def test_a_list_of_rewards_is_their_sum():
    rollouts = [Rollout(Task("a", "x"), 0, [Turn([1], [2])], ["tree"])]
    weighted = resolve_reward({"letters:e": 1.0, "length:4": 1.0})
    assert judge(resolve_reward(["letters:e", "length:4"]), rollouts).scores == judge(weighted, rollouts).scores
    assert judge(resolve_reward(["letters:e", "letters:e"]), rollouts).scores == [4.0]
    assert judge(lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids], rollouts).scores == [1.0]
    with pytest.raises(OperantError, match="3 in a list of rewards: give functions or names"):
        resolve_reward(["letters:e", 3])


@pytest.mark.parametrize("form", ["texts", "messages"])
def test_a_reward_gets_the_arguments_that_trl_passes(form):
    """TRL's own arguments in its first step, against ours for the same ids, from rows of the same columns."""
    theirs = KEPT["arguments"][form]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    columns = [name for name in theirs["names"] if isinstance(theirs.get(name), list) and name[-1] != "s"]
    rows = [
        {"prompt": prompt} | {name: theirs[name][i] for name in columns} for i, prompt in enumerate(theirs["prompts"])
    ]
    tasks = load_tasks(rows, None, DataOptions(target_field="*"))
    rollouts = []
    for task, ids in zip(tasks, theirs["completion_ids"]):
        prompt = encode_prompt(tokenizer, task.prompt) if form == "messages" else tokenizer(task.prompt).input_ids
        text = reply_text(tokenizer, prompt, ids, Sampling())
        rollouts.append(Rollout(task, 0, [Turn(prompt, ids)], [text], query=str(task.prompt)))
    ours = keywords(lambda completions, **kwargs: [], rollouts)
    assert sorted(ours) == [name for name in theirs["names"] if name != "trainer_state"]
    expected = {name: x for name, x in theirs.items() if name != "names"}
    assert {name: x for name, x in ours.items() if isinstance(x, list)} == expected


USER = [{"role": "user", "content": "Hi"}]
A, B = ([{"role": "assistant", "content": text}] for text in "ab")


@cases(
    ("sft", {"text": "It is blue."}, "", ("It is blue.",)),
    ("sft", {"messages": USER + A}, USER, (A,)),
    ("sft", {"prompt": "It is", "completion": " blue."}, "It is", (" blue.",)),
    ("sft", {"prompt": USER, "completion": A}, USER, (A,)),
    ("grpo", {"prompt": USER}, USER, ()),
    ("dpo", {"prompt": "It is", "chosen": " a", "rejected": " b"}, "It is", (" a", " b")),
    ("dpo", {"chosen": "It is a", "rejected": "It is b"}, "It is", (" a", " b")),
    ("dpo", {"prompt": USER, "chosen": A, "rejected": B}, USER, (A, B)),
    ("dpo", {"chosen": USER + A, "rejected": USER + B}, USER, (A, B)),
    ("kto", {"prompt": "It is", "completion": " a", "label": True}, "It is", (" a",)),
)
def test_the_forms_of_trls_data_sets(algorithm, row, prompt, replies):
    (task,) = load_tasks([row], None, DataOptions(), **find(algorithm).rows)
    assert (task.prompt, task.replies) == (prompt, replies)
