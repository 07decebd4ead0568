"""What TRL 1.16.0 hands to a script: the fields of its configurations, and the arguments of a reward function.

    PYTHONPATH=src PYTHON_WITH_TRL tests/parity/trl_1_16_surface.py            # holds the file beside it to TRL
    PYTHONPATH=src PYTHON_WITH_TRL tests/parity/trl_1_16_surface.py --write    # writes that file

`tests/test_todays_trl.py` reads the file, and has stand-ins for the classes where there is no TRL.
"""

import dataclasses
import enum
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
MODEL = Path(__file__).parents[2] / "src/operant/builtin/reviews-lm"
KINDS = ("GRPO", "RLOO", "DPO", "SFT", "Reward")
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
COLUMNS = [{"answer": "good", "level": 3}, {"answer": "bad", "level": 4}]
PROMPTS = {
    "texts": ["The film", "A plot"],
    "messages": [[{"role": "user", "content": "The film?"}], [{"role": "user", "content": "A plot?"}]],
}
SEVERAL = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
SEVERAL |= {"num_generations": 4, "num_iterations": 2, "max_steps": 40, "beta": 0.04, "loss_type": "dr_grpo"}
SEVERAL |= {"scale_rewards": "none", "epsilon_high": 0.28, "warmup_steps": 10, "lr_scheduler_type": "cosine"}
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("GRPO", {}),
    "several steps a batch": ("GRPO", SEVERAL | {"mask_truncated_completions": True}),
    "rloo": ("RLOO", {"max_steps": 5, "temperature": 0.7, "adam_beta2": 0.95, "bf16": False}),
    "dpo": ("DPO", {"beta": 0.2, "loss_type": ["ipo"], "bf16": False}),
    "sft": ("SFT", {"num_train_epochs": 2, "max_length": 64, "learning_rate": 1e-4, "bf16": False}),
    "reward": ("Reward", {"max_steps": 7, "bf16": False}),
}
"""Configurations: the class, and what a script says in it."""


def plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)


def fields(kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    import trl

    made = getattr(trl, f"{kind}Config")(output_dir="x", use_cpu=True, **changes)
    return {field.name: plain(getattr(made, field.name)) for field in dataclasses.fields(made)}


def arguments(prompts: list[Any]) -> dict[str, Any]:
    """What a `GRPOTrainer` passes to a reward function in its first step."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    seen: list[dict[str, Any]] = []

    def reward(**given: Any) -> list[float]:
        seen.append(given)
        return [0.5] * len(given["prompts"])

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = CHAT
    sizes = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 5, "max_steps": 1}
    off = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False}
    config = GRPOConfig(output_dir=tempfile.mkdtemp(), **sizes, **off)
    rows = Dataset.from_list([{"prompt": p} | columns for p, columns in zip(prompts, COLUMNS)])
    GRPOTrainer(str(MODEL), reward, config, train_dataset=rows, processing_class=tokenizer).train()
    return {name: value for name, value in seen[0].items() if isinstance(value, list)} | {"names": sorted(seen[0])}


def main() -> int:
    warnings.simplefilter("ignore")
    found = {
        "defaults": {kind: fields(kind, {}) for kind in KINDS},
        "changed": {name: fields(kind, changes) for name, (kind, changes) in CHANGES.items()},
    }
    kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    if "--write" in sys.argv:
        usual = found["defaults"]
        changed = {
            name: {key: x for key, x in values.items() if x != usual[CHANGES[name][0]][key]}
            for name, values in found["changed"].items()
        }
        calls = {form: arguments(prompts) for form, prompts in PROMPTS.items()}
        FILE.write_text(json.dumps({"defaults": usual, "changed": changed, "arguments": calls}, indent=0) + "\n")
        return 0
    whole = {name: kept["defaults"][CHANGES[name][0]] | values for name, values in kept["changed"].items()}
    names = {form: arguments(prompts)["names"] for form, prompts in PROMPTS.items()}
    same = found == {"defaults": kept["defaults"], "changed": whole}
    same &= names == {form: call["names"] for form, call in kept["arguments"].items()}
    from datasets import Dataset
    from trl import GRPOConfig, RLOOConfig

    from operant.data import load_tasks
    from operant.tools.migrate.configuration import with_configuration

    rows = Dataset.from_list([{"prompt": "The film"} | columns for columns in COLUMNS])
    configs = [made(output_dir="x", use_cpu=True) for made in (GRPOConfig, RLOOConfig)]
    ours = [with_configuration(config, {"tasks": rows}) for config in configs]
    same &= [(one["algorithm"], one["steps"]) for one in ours] == [("grpo", 6), ("rloo", 2)]
    same &= [task.prompt for task in load_tasks(rows)] == ["The film"] * 2
    print(f"configurations, arguments and classes of TRL 1.16.0 as kept: {same}")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
