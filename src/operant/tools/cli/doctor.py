"""`operant doctor`: the versions and devices of this machine, a self-test of the core, and the memory of a run."""

import importlib.util
import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

CORE = ("torch", "transformers", "safetensors", "numpy", "pyarrow", "pyyaml", "rich", "filelock", "psutil")
SAME = "gem gymnasium ray scienceworld tensorboard textarena textworld trackio verifiers wandb".split()
EXTRAS = dict(zip(SAME, SAME)) | {
    "hub": "datasets huggingface_hub",
    "label": "starlette uvicorn",
    "lora": "peft",
    "maths": "math_verify",
    "metrics": "nltk rouge_score sacrebleu",
    "migrate": "libcst",
    "openenv": "websockets",
    "quantise": "peft bitsandbytes",
    "reasoning": "reasoning_gym",
    "trl": "accelerate",
    "vader": "vaderSentiment",
}
"""Extra -> the modules whose presence shows that it is installed."""


def examine() -> int:
    """Print what this machine has and run the self-test; returns 0 if that passes, else 1."""
    import torch

    from operant import __version__, machine
    from operant.storage.hub import builtin_models, offline

    print(f"operant {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in CORE:
        try:
            found = version(name)
        except PackageNotFoundError:
            found = "missing: reinstall operant"
        print(f"  {name:14} {found}")
    print(f"  processor      {os.cpu_count()} cores, {torch.get_num_threads()} threads for torch")
    if warning := machine.crowded():
        print(f"  busy           {warning}: --threads 1")
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        print(f"  gpu {i}          {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
    if not torch.cuda.is_available():
        print("  gpu            none available to torch")
    for extra, packages in sorted(EXTRAS.items()):
        missing = [p for p in packages.split() if importlib.util.find_spec(p) is None]
        state = f"missing: pip install 'operant[{extra}]'" if missing else "installed"
        print(f"  extra {extra:12} {state}")
    print(f"  built-in       {', '.join(f'builtin:{n}' for n in builtin_models()) or 'none'}")
    hub = "off (HF_HUB_OFFLINE)" if offline() else "used for model names that are neither a folder nor built in"
    print(f"  hub            {hub}")
    return _self_test()


def print_plan(recipe: str | None, options: Mapping[str, object], many: Mapping[str, object]) -> int:
    """Print how much memory a run would take; returns 0 if it fits this machine, or the GPUs that `many` names, else 1.

    recipe: a recipe's name, a YAML file, or a run folder, whose config.yaml is then used. many: `gpus`, the number,
    `gpu`, the name of a kind, and `prompt_tokens`, the longest prompt, in the place of tasks and reward.
    """
    import pyarrow.parquet  # noqa: F401 - what a run imports is part of its memory

    import operant.api  # noqa: F401
    from operant.algorithms import find
    from operant.runs.config import configure
    from operant.tools.memory_plan import lines, measure, plan
    from operant.tools.memory_plan.ranks import GPUS, KINDS, on_ranks, table
    from operant.training import sharding
    from operant.types import OperantError, Task, require

    if recipe is not None and (Path(recipe) / "config.yaml").is_file():
        recipe = str(Path(recipe) / "config.yaml")
    if made := "prompt_tokens" in many or (many and recipe is None and "tasks" not in options):
        tokens = many.get("prompt_tokens", 256)
        require(tokens >= 1, f"prompt-tokens={tokens}: it must be at least 1")
        options = {"evaluate": None, "reward": len} | dict(options) | {"tasks": [Task("0", [0] * tokens)]}
    config = configure(options, recipe)
    given = made and find(config.train.algorithm).rows["with_replies"]
    why = "it learns from given replies: plan it with its rows, --tasks FILE, and without --prompt-tokens"
    require(not given, f"algorithm={config.train.algorithm}: {why}")
    own = config.learner["learner"]
    if many or own.parallel == "fsdp":
        sharding.check(find(config.train.algorithm).update, config.learner)
    if not many:
        memory = plan(config)
        print("\n".join(lines(memory)))
        return 0 if memory.fits else 1
    ranks, name = many.get("gpus", 1), many.get("gpu")
    require(name is not None, f"--gpus {ranks} for which kind of GPU? Add --gpu NAME, one of: {', '.join(GPUS)}")
    if name not in GPUS:
        raise OperantError(f"gpu={name!r} is none that the plan knows; take one with as much memory: {', '.join(GPUS)}")
    prompts = config.train.batch // config.train.samples
    each = "each GPU needs one; give at least 1, or raise batch"
    require(1 <= ranks <= prompts, f"gpus={ranks} with {prompts} prompts a step: {each}")
    wanted = next(kind for kind, options in KINDS.items() if options == (own.parallel, own.offload))
    measured = measure(config, ranks=ranks, gpu=True)
    print("\n".join(table(config, measured, ranks, GPUS[name], wanted)))
    return 0 if on_ranks(config, measured, ranks, wanted, GPUS[name]).fits else 1


def _self_test() -> int:
    """Run PPO on a tiny model: sampling and scoring must agree, and a rewarded token must become more likely."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from operant.training.learner import Learner

    start = time.perf_counter()
    torch.manual_seed(0)
    shape = {"vocab_size": 12, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    options = {"optimizer.lr": 3e-3, "sampling.max_tokens": 6, "kl.coef": 0.0, "update.minibatch": 16}
    learner, metrics = Learner(model, **options), []
    for _ in range(8):
        replies = learner.generate([[1, 2, 3]] * 32)
        metrics.append(learner.step(replies, [sum(i == 7 for i in r.ids) / len(r.ids) for r in replies]))
    gap = max(m["rollout/logprob_gap"] for m in metrics)
    first, last = metrics[0]["reward/mean"], metrics[-1]["reward/mean"]
    passed, seconds = gap < 1e-4 and last > first + 0.2, time.perf_counter() - start
    result = "passed" if passed else "FAILED, please report this output"
    print(f"  self-test      {result} ({seconds:.1f} s: log-prob gap {gap:.1e}, reward {first:.2f} -> {last:.2f})")
    return 0 if passed else 1
