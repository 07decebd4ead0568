"""How a reward function is called: with rollouts, or with the keywords of TRL's. torch is not imported.

def reward(rollouts): ...                       # operant's
def reward(prompts, completions, **kwargs): ...  # TRL's: a function with an argument `completions`
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from operant.types import OperantError, Rollout

GIVEN = ("prompts", "completions", "completion_ids")
"""What a function of TRL's form gets of every reply."""
OF_A_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments")
"""What only TRL's trainer has."""


def as_in_trl(reward: Any) -> bool:
    """Whether a function has an argument `completions`, as TRL's reward functions have."""
    if not inspect.isroutine(reward):
        return False
    try:
        return "completions" in inspect.signature(reward).parameters
    except ValueError:  # some functions written in C do not say
        return False


def call(reward: Callable[..., Any], rollouts: Sequence[Rollout]) -> Any:
    """What the reward returns for these rollouts.

    A function of TRL's form gets lists with one entry a reply: texts, or messages where the task's prompt is messages;
    the ids of the last reply; and the columns of the task. These are the keys of its target, if that is a mapping; a
    single further argument without a default gets the target itself.
    Raises: OperantError for an argument that has no value.
    """
    if not as_in_trl(reward):
        return reward(rollouts)
    known = {"prompts": [_prompt(r) for r in rollouts], "completions": [_completion(r) for r in rollouts]}
    known |= {"completion_ids": [r.ids for r in rollouts]}
    targets = [r.task.target for r in rollouts]
    if targets and all(isinstance(target, Mapping) for target in targets):
        shared = [name for name in targets[0] if isinstance(name, str) and all(name in target for target in targets)]
        known |= {name: [target[name] for target in targets] for name in shared}
    parameters = inspect.signature(reward).parameters.values()
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in known and _by_name(p)]
    if len(missing) == 1 and missing[0] not in OF_A_TRAINER and any(target is not None for target in targets):
        known[missing.pop()] = targets
    if missing:
        only = (
            "only TRL's trainer has that: give it a default"
            if missing[0] in OF_A_TRAINER
            else (
                f"name the columns that it needs with data.target_field={','.join(missing)}, or from Python give each "
                "Task a mapping of them as its target"
            )
        )
        name = getattr(reward, "__name__", "of this form")
        raise OperantError(f"reward {name!r} asks for {', '.join(missing)}, which the tasks do not have; {only}")
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        known = {name: value for name, value in known.items() if name in {p.name for p in parameters}}
    return reward(**known)


def _by_name(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _prompt(rollout: Rollout) -> Any:
    """The messages of a conversation, or the query as text."""
    return rollout.task.prompt if _of_messages(rollout) else rollout.query


def _completion(rollout: Rollout) -> Any:
    """The policy's messages of a conversation, or all its replies as one text."""
    if _of_messages(rollout):
        return [{"role": "assistant", "content": text} for text in rollout.texts]
    return "".join(rollout.texts)


def _of_messages(rollout: Rollout) -> bool:
    return bool(rollout.task.prompt) and isinstance(rollout.task.prompt[0], Mapping)
