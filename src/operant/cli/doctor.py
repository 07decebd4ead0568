"""What this machine has, and whether the core works on it: `operant doctor`."""

import importlib.util
import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CORE = ("torch", "transformers", "safetensors", "numpy", "pyarrow", "pyyaml", "rich")
EXTRAS = {
    "lora": ("peft",),
    "quantise": ("peft", "bitsandbytes"),
    "vader": ("vaderSentiment",),
    "hub": ("datasets", "huggingface_hub"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
}
"""Extra -> the packages that it brings; `pip install 'operant[NAME]'`."""


def examine() -> int:
    """Print the findings; returns 0 where all is well, 1 where the self-test fails."""
    from operant import __version__

    print(f"operant {__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in CORE:
        print(f"  {name:14} {_version(name)}")
    _devices()
    for extra, packages in EXTRAS.items():
        missing = [p for p in packages if importlib.util.find_spec(p) is None]
        state = f"missing: pip install 'operant[{extra}]'" if missing else "present"
        print(f"  extra {extra:11} {state}")
    _hub()
    return _self_test()


def tell_plan(recipe: str | None, options: Mapping[str, Any]) -> int:
    """Print how much memory a run would take; returns 0 where it fits, 1 where it does not.

    `recipe`: a recipe's name, a YAML file, or a run folder, whose configuration it is then.
    """
    from operant.memory_plan import lines, plan
    from operant.runs.config import configure

    folder = Path(recipe) / "config.yaml" if recipe is not None else None
    if folder is not None and folder.is_file():
        recipe = str(folder)
    made = plan(configure(options, recipe))
    print("\n".join(lines(made)))
    return 0 if made.fits else 1


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing: reinstall operant"


def _devices() -> None:
    import torch

    from operant import machine

    print(f"  processor      {os.cpu_count()} cores, {torch.get_num_threads()} threads for torch")
    if crowd := machine.crowded():
        print(f"  busy           {crowd}: --threads 1")
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            held = torch.cuda.get_device_properties(i)
            print(f"  gpu {i}          {held.name}, {held.total_memory / 2**30:.0f} GiB")
    else:
        print("  gpu            none that torch can use")


def _hub() -> None:
    from operant.storage.hub import builtin_models, offline

    print(f"  built-in       {', '.join(f'builtin:{n}' for n in builtin_models()) or 'none'}")
    print(f"  hub            {'off (HF_HUB_OFFLINE)' if offline() else 'asked when a name is no folder'}")


def _self_test() -> int:
    """PPO on a tiny model: sampling and scoring agree, and a token that is rewarded becomes likelier."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from operant.training.learner import Learner

    start = time.perf_counter()
    torch.manual_seed(0)
    shape = {"vocab_size": 12, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    options = {"optimizer.lr": 3e-3, "sampling.max_tokens": 6, "kl.coef": 0.0, "update.minibatch": 16}
    learner = Learner(model, **options)
    told = []
    for _ in range(8):
        replies = learner.generate([[1, 2, 3]] * 32)
        told.append(learner.step(replies, [sum(i == 7 for i in r.ids) / len(r.ids) for r in replies]))
    gap = max(m["rollout/logprob_gap"] for m in told)
    first, last = told[0]["reward/mean"], told[-1]["reward/mean"]
    good = gap < 1e-4 and last > first + 0.2
    seconds = time.perf_counter() - start
    verdict = "well" if good else "NOT well: please report this page"
    print(f"  self-test      {verdict} ({seconds:.1f} s: log-prob gap {gap:.1e}, reward {first:.2f} -> {last:.2f})")
    return 0 if good else 1
