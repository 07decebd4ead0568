"""The recipes of the package: runnable as they are; and what two of them learn."""

import json
import runpy
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from cases import cases, slow
from toys import letters, lm

from operant import OperantError, Task, load_policy, train
from operant.data import DataOptions, load_tasks
from operant.models.options import ModelOptions
from operant.sampling import encode_prompt
from operant.storage.hub import BUILTIN
from operant.tools.cli import main

ROOT = Path(__file__).parents[1]


@cases("keyword", slow("chat"), slow("arithmetic"))
def test_a_recipe_runs(name, tmp_path, capsys):
    short = "--steps 1 --batch 16 --update.minibatch 16 --data.limit 8 --probes 2".split()
    assert main(["train", name, *short, "--out", str(tmp_path / "run")]) == 0, capsys.readouterr()
    assert len(json.loads((tmp_path / "run/evaluation.json").read_text(encoding="utf-8"))["before"]["replies"]) == 8
    assert main(["doctor", "--plan", name]) == 0


def test_the_built_in_tasks_are_those_of_the_script(tmp_path):
    runpy.run_path(str(ROOT / "recipes/builtin_tasks.py"))["main"](tmp_path)
    for name in ("keywords.jsonl", "chat.jsonl"):
        assert (BUILTIN / name).read_text(encoding="utf-8") == (tmp_path / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "rows"), [("keywords", 384), ("chat", 256)])
def test_no_held_out_task_is_trained_on(name, rows):
    recipe = yaml.safe_load((BUILTIN / f"{name.removesuffix('s')}.yaml").read_text(encoding="utf-8"))
    read = lambda part: load_tasks(f"builtin:{name}/{part}", options=DataOptions(**recipe["data"]))  # noqa: E731
    train_on, held_out = read("train"), read("held-out")
    assert (len(train_on), len(held_out)) == (rows, 256)
    assert not {str(task.prompt) for task in train_on} & {str(task.prompt) for task in held_out}
    if name == "keywords":
        assert all(f"has {t.target}, {t.target} and" in t.prompt for t in [*train_on, *held_out])
        new = {task.target for task in held_out} - {task.target for task in train_on}
        assert sum(task.target in new for task in held_out) == 64


def test_the_template_of_the_recipe_marks_and_ends_turns():
    template = yaml.safe_load((BUILTIN / "chat.yaml").read_text(encoding="utf-8"))["model"]["chat_template"]
    policy = load_policy("builtin:reviews-lm", options=ModelOptions(chat_template=template))
    messages = [("system", "You love it."), ("user", "How was it?"), ("assistant", " Good."), ("user", "And?")]
    ids = encode_prompt(policy.tokenizer, [{"role": role, "content": text} for role, text in messages])
    assert policy.tokenizer.decode(ids) == "You love it.\nQ: How was it?\nA: Good.<|endoftext|>Q: And?\nA:"
    assert ids.count(policy.stop_tokens[0]) == 1  # the mark of the turn's end is the stop token, not its letters


def test_a_tokenizer_keeps_its_own_template():
    made = letters("{{ messages[0].content }}")
    for given, told in ((made, "{{ messages[0].content }}"), (letters(), "another")):
        before = given.chat_template
        own = load_policy(lm(vocab=len(made)), tokenizer=given, options=ModelOptions(chat_template="another"))
        assert (own.tokenizer.chat_template, given.chat_template) == (told, before)
    with pytest.raises(OperantError, match=r"model\.chat_template: the policy has no tokenizer"):
        load_policy(lm(), options=ModelOptions(chat_template="another"))


def test_a_chat_model_learns_to_end_its_turn(tmp_path):
    """With the marks of ChatML. The best mean reward is 1; untrained, it ends early in about one reply of seven."""
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    begins = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer = letters("{% for m in messages %}" + turn + "{% endfor %}" + begins)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
    model = lm("qwen2", vocab=len(tokenizer), spread=0.05, eos_token_id=tokenizer.eos_token_id)
    said = [("system", "be short"), ("user", "{c}")]
    tasks = [Task(f"t/{c}", [{"role": role, "content": text.format(c=c)} for role, text in said]) for c in "abcd"]
    options = {"steps": 12, "batch": 32, "max_tokens": 6, "optimizer.lr": 1e-2, "kl.loss_coef": 0.0, "probes": 0}
    run = train(model, tasks, "ended", out=tmp_path / "run", algorithm="grpo", tokenizer=tokenizer, **options)
    rewards = [metrics["reward/mean"] for metrics in run.metrics]
    assert rewards[0] < 0.4 and min(rewards[-3:]) > 0.95
    rows = pq.read_table(tmp_path / "run/rollouts/step-00012.parquet").to_pylist()
    prompt = "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert encode_prompt(tokenizer, tasks[0].prompt) == tokenizer(prompt, add_special_tokens=False).input_ids
    assert {row["task"] for row in rows} == {task.id for task in tasks}


@pytest.mark.slow
@cases(
    ("keyword", 24, 0.2, 1.0, []),
    ("keyword", 24, -1.0, 0.1, ["--reward", f"{ROOT}/benchmarks/shuffled.py:keyword"]),
    ("arithmetic", 20, 0.08, 1.0, []),
    ids=["keyword", "shuffled", "arithmetic"],
)
def test_a_recipe_learns_and_its_control_does_not(name, steps, least, most, more, tmp_path):
    """A quarter of the steps, one seed; the control gets shuffled scores, and may only lose.

    Over three seeds `keyword` rises by 0.25 to 0.37 in these steps, and the sums of `arithmetic` by 0.105 to 0.125.
    benchmarks/recipes.py measures all recipes and controls.
    """
    assert main(["train", name, "--steps", str(steps), "--probes", "0", "--out", str(tmp_path / "run"), *more]) == 0
    found = json.loads((tmp_path / "run/evaluation.json").read_text(encoding="utf-8"))
    assert least < found["after"]["mean"] - found["before"]["mean"] < most
