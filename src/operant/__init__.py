"""operant trains transformer language models with reinforcement learning.

There are three layers, each built from the one below: `train` and `steps` run to the end; a `Learner` generates replies
and trains on rewards from anywhere; `operant.objectives` has the pure functions. `operant.types` says what a world
(`operant.types.Env`), an engine (`operant.types.Engine`) and a reward (`operant.types.RewardFn`) have to offer.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from operant.algorithms import Algorithm
    from operant.api import steps, train
    from operant.envs.check import check_env
    from operant.models.base import PolicyBase
    from operant.models.loading import export, load_policy
    from operant.models.policy import Policy
    from operant.models.value_head import ValueOptions
    from operant.rewards.isolated import isolated
    from operant.runs.run import Observer, Run
    from operant.sampling import Sampling
    from operant.tools.diagnosis import diagnose
    from operant.training.learner import Learner
    from operant.types import Batch, Completion, Judgement, OperantError, Outputs, Rollout, Step, Task, Turn

_MODULE_OF = {
    "Algorithm": "algorithms",
    "Batch": "types",
    "Completion": "types",
    "Judgement": "types",
    "Learner": "training.learner",
    "Observer": "runs.run",
    "OperantError": "types",
    "Outputs": "types",
    "Policy": "models.policy",
    "PolicyBase": "models.base",
    "Rollout": "types",
    "Run": "runs.run",
    "Sampling": "sampling",
    "Step": "types",
    "Task": "types",
    "Turn": "types",
    "ValueOptions": "models.value_head",
    "check_env": "envs.check",
    "diagnose": "tools.diagnosis",
    "export": "models.loading",
    "isolated": "rewards.isolated",
    "load_policy": "models.loading",
    "steps": "api",
    "train": "api",
}
"""Module of each public name. It is imported on the first access, so that `import operant` is fast."""

__all__ = sorted(_MODULE_OF)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'operant' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"operant.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
