"""Rewards: any callable from rollouts to scores, and a table of names for those that come with the package.

resolve("letters:e")                                      # a name and its argument
resolve("builtin:sentiment")                              # a classifier that comes with the package
resolve("classifier:./my-model#2")                        # label 2 of a folder or Hub name
resolve("my_rewards:politeness")                          # a function of one's own
resolve({"builtin:sentiment": 1.0, "length:<=20": 0.3})   # a weighted sum
resolve("isolated:my_rewards:politeness")                 # the same in processes of its own
resolve(lambda rollouts: [len(r.reply) for r in rollouts])
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from operant.import_by_name import find, nearest
from operant.rewards import text
from operant.rewards.classifier import Classifier
from operant.rewards.combine import MinusQuery, Weighted, minus_query, weighted
from operant.rewards.evaluate import OUTCOMES, Judged, Outcome, check, judge, name_of, totals
from operant.rewards.failure_policy import IsolationOptions, Tolerant
from operant.rewards.isolated import IsolatedReward, isolated
from operant.rewards.vader import Vader
from operant.types import OperantError, RewardFn

__all__ = [
    "NAMES",
    "OUTCOMES",
    "Classifier",
    "IsolatedReward",
    "IsolationOptions",
    "Judged",
    "Outcome",
    "Vader",
    "check",
    "isolated",
    "isolated_parts",
    "judge",
    "minus_query",
    "name_of",
    "resolve",
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
    "isolated": (IsolatedReward, "a function in processes of its own: isolated:my_rewards:politeness"),
    "length": (text.length, "tokens: length:20, or at most: length:<=20"),
    "letters": (text.letters, "a letter: letters:e"),
    "minus_query": (lambda spec: minus_query(resolve(spec)), "another reward: minus_query:builtin:sentiment"),
    "pattern": (text.pattern, "a regular expression: pattern:[.!?]$"),
    "repetition": (text.repetition, ""),
    "vader": (Vader, ""),
}
"""Name -> (what makes the reward from its argument, what the argument is; empty: it needs none)."""


def resolve(spec: Any) -> RewardFn:
    """A reward from a callable, a name with its argument, `module:function`, `file.py:function`, or {spec: weight}.

    Nothing is loaded yet: `check(reward)` does it.
    Raises: OperantError for a name that means nothing, with the nearest that does.
    """
    if isinstance(spec, Mapping):
        return _sum(spec)
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
    return cast(RewardFn, find("reward", *spec.strip().rpartition(":")[::2], known=[*NAMES]))


def _sum(spec: Mapping[Any, float]) -> RewardFn:
    """Parts are called what they call themselves; by their whole spec where two would be called the same."""
    rewards = {part: resolve(part) for part in spec}
    names = [name_of(reward) for reward in rewards.values()]
    called = [n if names.count(n) == 1 else str(part) for n, part in zip(names, rewards)]
    return weighted({name: (rewards[part], spec[part]) for name, part in zip(called, rewards)})


def under(reward: RewardFn, options: IsolationOptions) -> RewardFn:
    """`reward` with the options of a run: for isolated parts without options of their own, and for what others do."""
    if isinstance(reward, Weighted):
        return Weighted({name: (under(part, options), weight) for name, (part, weight) in reward.rewards.items()})
    if isinstance(reward, MinusQuery):
        return MinusQuery(under(reward.reward, options))
    if isinstance(reward, IsolatedReward):
        return reward.under(options)
    strict = options.fate("error", "stop") == "stop" and options.on_abstain == "drop"
    return reward if strict or hasattr(reward, "judged") else Tolerant(reward, options)


def isolated_parts(reward: RewardFn | None) -> list[IsolatedReward]:
    """The isolated ones among its parts."""
    if isinstance(reward, Weighted):
        return [inner for part, _ in reward.rewards.values() for inner in isolated_parts(part)]
    if isinstance(reward, MinusQuery):
        return isolated_parts(reward.reward)
    return [reward] if isinstance(reward, IsolatedReward) else []
