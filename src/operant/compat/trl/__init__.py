"""TRL 0.11.4's PPO over operant: a script of that time runs with its imports changed.

    from operant.compat.trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
    from operant.compat.trl.core import LengthSampler

`as_trl()` lets the name `trl` mean this package, for scripts that nobody may change. What differs from TRL, and what is
not here, is in docs/from-trl.md.
"""

import sys
from importlib.util import find_spec

from transformers.utils import is_torch_npu_available, is_torch_xpu_available

from operant.compat.trl import core, environment, extras, models, trainer
from operant.compat.trl.core import set_seed
from operant.compat.trl.environment import TextEnvironment, TextHistory
from operant.compat.trl.extras import BestOfNSampler
from operant.compat.trl.models import (
    SUPPORTED_ARCHITECTURES,
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PreTrainedModelWrapper,
    create_reference_model,
)
from operant.compat.trl.trainer import AdaptiveKLController, FixedKLController, PPOConfig, PPOTrainer

__getattr__ = core.lacking(__name__)
__version__ = "0.11.4"
"""The release of TRL whose interface this is."""

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "AdaptiveKLController",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "BestOfNSampler",
    "FixedKLController",
    "PPOConfig",
    "PPOTrainer",
    "PreTrainedModelWrapper",
    "TextEnvironment",
    "TextHistory",
    "as_trl",
    "create_reference_model",
    "set_seed",
]

DEEPER = {
    "models.modeling_base": models,
    "models.modeling_value_head": models,
    "trainer.ppo_config": trainer,
    "trainer.ppo_trainer": trainer,
    "trainer.utils": trainer,
    "environment.base_environment": environment,
    "extras.best_of_n_sampler": extras,
    "import_utils": sys.modules[__name__],
}
"""Modules that TRL has one level deeper, and which of ours answers for each."""
sys.modules |= {f"{__name__}.{name}": module for name, module in DEEPER.items()}


def is_diffusers_available() -> bool:
    return find_spec("diffusers") is not None


def is_liger_kernel_available() -> bool:
    return find_spec("liger_kernel") is not None


def is_llmblender_available() -> bool:
    return find_spec("llm_blender") is not None


is_npu_available, is_xpu_available = is_torch_npu_available, is_torch_xpu_available  # names that are older than 0.11


def as_trl() -> None:
    """Let `import trl` mean this package in this process, with its modules; call it before the script is imported."""
    own = {"": sys.modules[__name__], ".core": core, ".models": models, ".trainer": trainer}
    own |= {".environment": environment, ".extras": extras} | {f".{name}": x for name, x in DEEPER.items()}
    sys.modules |= {f"trl{name}": module for name, module in own.items()}
