"""Rewards: any callable from rollouts to scores, and a table of the built-in ones by name.

resolve("letters:e")                                      # a name and its argument
resolve("builtin:sentiment")                              # a built-in classifier
resolve("classifier:./my-model#2")                        # label 2 of a folder or Hub name
resolve("my_rewards:politeness")                          # a function of your own
resolve({"builtin:sentiment": 1.0, "length:<=20": 0.3})   # a weighted sum
resolve("isolated:my_rewards:politeness")                 # your own function, in worker processes
resolve(lambda rollouts: [len(r.reply) for r in rollouts])
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from operant.import_by_name import find_function, nearest
from operant.rewards import text
from operant.rewards.classifier import Classifier
from operant.rewards.combine import MinusQuery, Weighted, minus_query, weighted
from operant.rewards.evaluate import OUTCOMES, Judged, Outcome, SampleResult, check, judge, name_of, reward_metrics
from operant.rewards.failure_policy import IsolationOptions, Tolerant
from operant.rewards.isolated import IsolatedReward, isolated
from operant.rewards.vader import Vader
from operant.rollouts.totals import totals
from operant.types import OperantError, RewardFn

__all__ = [
    "NAMES",
    "OUTCOMES",
    "Classifier",
    "IsolatedReward",
    "IsolationOptions",
    "Judged",
    "Outcome",
    "SampleResult",
    "Vader",
    "check",
    "isolated",
    "isolated_parts",
    "judge",
    "minus_query",
    "name_of",
    "resolve",
    "reward_metrics",
    "totals",
    "under",
    "weighted",
]


def _classifier(argument: str) -> RewardFn:
    name, _, label = argument.partition("#")
    return Classifier(name, label=label or "positive")


NAMES: dict[str, tuple[Callable[..., RewardFn], str]] = {
    "builtin": (lambda argument: _classifier(f"builtin:{argument}"), "NAME, as in builtin:sentiment"),
    "classifier": (_classifier, "a folder or Hub name, and a label if it is not positive: classifier:./my-model#2"),
    "isolated": (IsolatedReward, "a function that runs in worker processes: isolated:my_rewards:politeness"),
    "length": (text.length, "tokens: length:20, or at most: length:<=20"),
    "letters": (text.letters, "a letter: letters:e"),
    "minus_query": (lambda spec: minus_query(resolve(spec)), "another reward: minus_query:builtin:sentiment"),
    "pattern": (text.pattern, "a regular expression: pattern:[.!?]$"),
    "repetition": (text.repetition, ""),
    "vader": (Vader, ""),
}
"""Name -> (function from the argument to the reward, description of the argument; empty: it needs none)."""


def resolve(spec: Any) -> RewardFn:
    """A reward from a callable, a name with its argument, `module:function`, `file.py:function`, or {spec: weight}.

    Models and packages are loaded later, by `check(reward)`.
    Raises: OperantError for an unknown name, with the nearest known one.
    """
    if isinstance(spec, Mapping):
        rewards = {part: resolve(part) for part in spec}
        names = [name_of(reward) for reward in rewards.values()]
        # A part has the name of its reward, or its whole spec if two rewards share a name.
        unique = [name if names.count(name) == 1 else str(part) for name, part in zip(names, rewards)]
        return weighted({name: (rewards[part], spec[part]) for name, part in zip(unique, rewards)})
    if callable(spec):
        return cast(RewardFn, spec)
    if not isinstance(spec, str) or not spec.strip():
        raise OperantError(f"reward {spec!r}: give a function, a name such as 'letters:e', or a mapping of weights")
    name, colon, argument = spec.strip().partition(":")
    if name in NAMES:
        make, needed = NAMES[name]
        if needed and not argument:
            raise OperantError(f"reward {name!r} needs {needed}")
        return make(argument) if argument else make()
    if not colon:
        raise OperantError(
            f"reward {spec!r} is unknown{nearest(name, [*NAMES])}; names: {', '.join(NAMES)}, or module:function"
        )
    return cast(RewardFn, find_function("reward", *spec.strip().rpartition(":")[::2], known=[*NAMES]))


def under(reward: RewardFn, options: IsolationOptions) -> RewardFn:
    """The reward with a run's options, for isolated parts without their own and for the handling of failures."""
    if isinstance(reward, Weighted):
        return Weighted({name: (under(part, options), weight) for name, (part, weight) in reward.rewards.items()})
    if isinstance(reward, MinusQuery):
        return MinusQuery(under(reward.reward, options))
    if isinstance(reward, IsolatedReward):
        return reward.under(options)
    strict = options.handling("error", "stop") == "stop" and options.on_abstain == "drop"
    return reward if strict or hasattr(reward, "judged") else Tolerant(reward, options)


def isolated_parts(reward: RewardFn | None) -> list[IsolatedReward]:
    """The isolated rewards among its parts."""
    if isinstance(reward, Weighted):
        return [inner for part, _ in reward.rewards.values() for inner in isolated_parts(part)]
    if isinstance(reward, MinusQuery):
        return isolated_parts(reward.reward)
    return [reward] if isinstance(reward, IsolatedReward) else []
