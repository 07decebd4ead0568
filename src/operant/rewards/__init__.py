"""Rewards: any callable from rollouts to scores, and a table of names for those that come with the package.

resolve("letters:e")                                      # a name and its argument
resolve("builtin:sentiment")                              # a classifier that comes with the package
resolve("classifier:./my-model#2")                        # label 2 of a folder or Hub name
resolve("my_rewards:politeness")                          # a function of one's own
resolve({"builtin:sentiment": 1.0, "length:<=20": 0.3})   # a weighted sum
resolve(lambda rollouts: [len(r.reply) for r in rollouts])
"""

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

from operant.rewards import text
from operant.rewards.combine import minus_query, weighted
from operant.rewards.judging import Judged, check, judge, name_of
from operant.rewards.models import Classifier
from operant.rewards.vader import Vader
from operant.types import OperantError, RewardFn

__all__ = ["NAMES", "Classifier", "Judged", "Vader", "check", "judge", "minus_query", "name_of", "resolve", "weighted"]


def _classifier(argument: str) -> RewardFn:
    name, _, label = argument.partition("#")
    return Classifier(name, label=label or "positive")


NAMES: dict[str, tuple[Callable[..., RewardFn], str]] = {
    "builtin": (lambda argument: _classifier(f"builtin:{argument}"), "NAME, as in builtin:sentiment"),
    "classifier": (_classifier, "a folder or Hub name, and a label if it is not positive: classifier:./my-model#2"),
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
        raise OperantError(f"reward {spec!r} is unknown{_nearest(name)}; names: {', '.join(NAMES)}, or module:function")
    return _function(*spec.strip().rpartition(":")[::2])


def _sum(spec: Mapping[Any, float]) -> RewardFn:
    """Parts are called what they call themselves; by their whole spec where two would be called the same."""
    rewards = {part: resolve(part) for part in spec}
    names = [name_of(reward) for reward in rewards.values()]
    called = [n if names.count(n) == 1 else str(part) for n, part in zip(names, rewards)]
    return weighted({name: (rewards[part], spec[part]) for name, part in zip(called, rewards)})


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, NAMES, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _function(module: str, name: str) -> RewardFn:
    """The user's own: found from the working directory too, as with `python -m`."""
    held = _module(module)
    found = getattr(held, name, None)
    if not callable(found):
        near = difflib.get_close_matches(name, dir(held), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise OperantError(f"reward '{module}:{name}': {module!r} has no function {name!r}{hint}")
    return cast(RewardFn, found)


def _module(name: str) -> Any:
    if name.endswith(".py") and not os.path.exists(name):
        raise OperantError(f"reward: there is no file {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return _file(name) if name.endswith(".py") else importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            hint = _nearest(name.partition(":")[0])
            raise OperantError(f"reward: there is no reward and no module {name!r}{hint}") from error
        raise OperantError(f"reward: module {name!r} needs {error.name!r}, which is not installed") from error
    except Exception as error:
        raise OperantError(f"reward: importing {name!r} raised {type(error).__name__}: {error}") from error


def _file(path: str) -> Any:
    made = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(path))[0], path)
    assert made is not None and made.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module
