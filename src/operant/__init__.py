"""operant trains transformer language models with reinforcement learning.

There are three layers, each built from the one below: `train` and `steps` run to the end; a `Learner` generates replies
and trains on rewards from anywhere; `operant.objectives` has the pure functions. `operant.types` says what a world
(`operant.types.Env`), an engine (`operant.types.Engine`) and a reward (`operant.types.RewardFn`) have to offer.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from operant.algorithms import Algorithm
    from operant.api import steps, train
    from operant.models.base import PolicyBase
    from operant.models.loading import export, load_policy
    from operant.models.policy import Policy
    from operant.models.value_head import ValueOptions
    from operant.rewards.isolated import isolated
    from operant.runs.build import recorded_replies
    from operant.runs.check_env import check_env
    from operant.runs.run import Observer, Run
    from operant.sampling import Sampling
    from operant.tools.report.diagnosis import diagnose
    from operant.training.learner import Learner
    from operant.types import Batch, Completion, Judgement, OperantError, Outputs, Rollout, Step, Task, Turn

_NAMES = {
    "algorithms": "Algorithm",
    "api": "steps train",
    "models.base": "PolicyBase",
    "models.loading": "export load_policy",
    "models.policy": "Policy",
    "models.value_head": "ValueOptions",
    "rewards.isolated": "isolated",
    "runs.build": "recorded_replies",
    "runs.check_env": "check_env",
    "runs.run": "Observer Run",
    "sampling": "Sampling",
    "tools.report.diagnosis": "diagnose",
    "training.learner": "Learner",
    "types": "Batch Completion Judgement OperantError Outputs Rollout Step Task Turn",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
"""Module of each public name. It is imported on the first access, so that `import operant` is fast."""

__all__ = sorted(_MODULE_OF)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'operant' has no attribute {name!r}")
    return getattr(import_module(f"operant.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
