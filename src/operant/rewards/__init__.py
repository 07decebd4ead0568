"""Rewards: any callable from rollouts to scores, and a table of the built-in ones by name.

    resolve("letters:e")                                      # a name and its argument
    resolve("builtin:sentiment")                              # a built-in classifier
    resolve("classifier:./my-model#2")                        # label 2 of a folder or Hub name
    resolve("runs/reward-model")                              # a reward model that was trained; or reward_model:NAME
    resolve("my_rewards:politeness")                          # a function of your own
    resolve({"builtin:sentiment": 1.0, "length:<=20": 0.3})   # a weighted sum
    resolve([accuracy, brevity])                              # a sum
    resolve("isolated:my_rewards:politeness")                 # your own function, in worker processes
    resolve(lambda rollouts: [len(r.reply) for r in rollouts])
    resolve("my_rewards:brevity", {"target": 20})             # the function's argument `target`
    resolve({"my_rewards:brevity": {"weight": 0.5, "target": 20}, "letters:e": 1.0})
    resolve("rouge:rougeL", {"several": "mean"})              # a score of texts, with options
    resolve("per_token:rouge")                                # what each token adds to it

`check` loads what a reward needs, `prepare` lets it see the tasks, and `judge` calls it on rollouts and checks every
answer.
"""

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, cast

from operant.import_by_name import Table, find_function, nearest
from operant.options import Factory, arguments, defaults
from operant.rewards import text_scores
from operant.rewards.evaluate import Judged, check, judge, name_of
from operant.rewards.text_scores import RewardBase
from operant.rewards.wrapper import described_parts, every_part, held_out, parts_of, read_with
from operant.sandbox.reward_call import as_in_trl
from operant.types import OperantError, RewardFn, Task, of_user, require, shown, with_defaults

__all__ = [
    "NAMES",
    "Judged",
    "as_in_trl",
    "check",
    "close",
    "described_parts",
    "every_part",
    "held_out",
    "judge",
    "keep_in",
    "name_of",
    "parts_of",
    "prepare",
    "read_with",
    "resolve",
]

INSTALLED = Table("reward", "operant.rewards", {})
"""The rewards of other packages."""


@dataclass(frozen=True)
class BuiltIn:
    """A built-in reward, which is imported when it is first asked for."""

    place: str
    """The "module:object" of the function or class that makes it."""
    needs: str = ""
    """Its argument, which stands behind the name, in words; empty: it needs none."""
    options: int | None = None
    """How many arguments stand before its options; None: it has no options."""
    of_another: bool = False
    """Whether its argument is another reward, whose options are then its own."""
    first: bool = False
    """Whether the first of its options may stand behind the name instead: rouge:rougeL."""

    @property
    def make(self) -> Callable[..., Any]:
        return find_function("reward", *self.place.split(":"))


NAMES = {
    "builtin": BuiltIn("operant.rewards.classifier:builtin", "NAME, as in builtin:sentiment", 1),
    "classifier": BuiltIn(
        "operant.rewards.classifier:labelled",
        "a folder or Hub name, and a label if it is not positive: classifier:./my-model#2",
        1,
    ),
    "critic": BuiltIn("operant.apps.code.critic_reward:critic", "a trained critic of outcomes: critic:runs/critic", 1),
    "ended": BuiltIn("operant.apps.text.rewards:ended"),
    "humans": BuiltIn(
        "operant.tools.labels.humans:Humans",
        "the database of `operant label`, whose labels training waits for: humans:labels.sqlite",
        1,
    ),
    "isolated": BuiltIn(
        "operant.rewards.isolated:named", "a function that runs in worker processes: isolated:my_rewards:politeness"
    ),
    "judge": BuiltIn(
        "operant.apps.rlhf.judge:ModelJudge", "a model that judges, or URL#MODEL of an endpoint: judge:./llama", 1
    ),
    "keyword": BuiltIn("operant.apps.text.rewards:keyword"),
    "length": BuiltIn("operant.apps.text.rewards:length", "tokens: length:20, or at most: length:<=20"),
    "letters": BuiltIn("operant.apps.text.rewards:letters", "a letter: letters:e"),
    "maths": BuiltIn("operant.apps.maths.rewards:Maths", options=0),
    "minus_greedy": BuiltIn(
        "operant.rewards.combine:MinusGreedy", "another reward: minus_greedy:builtin:sentiment", of_another=True
    ),
    "minus_query": BuiltIn(
        "operant.rewards.combine:MinusQuery", "another reward: minus_query:builtin:sentiment", of_another=True
    ),
    "pattern": BuiltIn("operant.apps.text.rewards:pattern", "a regular expression: pattern:[.!?]$"),
    "per_token": BuiltIn("operant.rewards.combine:PrefixGain", "another reward: per_token:rouge", of_another=True),
    "repetition": BuiltIn("operant.apps.text.rewards:repetition"),
    "reward_model": BuiltIn(
        "operant.apps.rlhf.reward_model_score:RewardModelScore",
        "run folders or models, separated by commas: reward_model:runs/reward-model",
        1,
    ),
    "style_transfer": BuiltIn("operant.apps.prompts.style_transfer:StyleTransfer", options=0),
    "tests": BuiltIn("operant.apps.code.unit_tests:UnitTests", options=0),
    "think_answer": BuiltIn("operant.apps.maths.rewards:think_answer"),
    "vader": BuiltIn("operant.apps.text.rewards:Vader"),
    **{name: BuiltIn(place, options=0, first=True) for name, place in text_scores.SCORES.data.items()},
    "intent": BuiltIn("operant.apps.text.judged_by_classifier:intent", options=0, first=True),
    "prompt": BuiltIn("operant.apps.prompts.prompt_reward:PromptReward", options=0, first=True),
}
"""The built-in rewards by name."""


def factory(spec: object) -> Factory | None:
    """The class or function whose arguments are the options of a reward; None: it has none, as in TRL's form.

    Of a class all arguments are options, of a function from rollouts to scores those after the first.
    Raises: OperantError for a name that is unknown or cannot be imported, and for several with commas between them.
    """
    if isinstance(spec, str):
        several = [part.strip() for part in spec.split(",")]
        named = [part.partition(":")[0] in NAMES or re.fullmatch(r"[\w./~-]+:\w+", part) for part in several]
        if len(several) > 1 and all(named) and not spec.startswith("pattern:"):  # such an expression may have commas
            given = "{" + ", ".join(f"{part}: 1" for part in several) + "}"
            raise OperantError(f"reward {spec!r} names {len(several)}: give each its weight, as in --reward '{given}'")
        name, _, argument = spec.strip().partition(":")
        row = NAMES.get(name) or (NAMES["reward_model"] if _is_run(spec) else None)
        if row is not None and row.of_another:
            return factory(argument) if argument else None
        if row is not None:
            return None if row.options is None else Factory(row.make, row.options)
        spec = _find(spec.strip())
    if inspect.isclass(spec):
        return Factory(spec)
    gets = "the list of replies alone (or prompts and completions, if these are its arguments)"
    if inspect.isfunction(spec) and not inspect.signature(spec).parameters:
        raise OperantError(f"reward {spec.__name__!r} takes no argument: a reward gets the list of all replies")
    return Factory(spec, 1, gets) if inspect.isroutine(spec) and not as_in_trl(spec) else None


def resolve(
    spec: RewardFn | str | Mapping[Any, object] | Sequence[Any] | None, options: Mapping[str, object] | None = None
) -> RewardFn:
    """A reward from a callable, a name with its argument, `module:function`, `file.py:function`, {spec: weight}, or a
    list of these, which are added.

    options: those of the reward, as `factory` describes them. Of several rewards each may have its own:
    {spec: {"weight": 0.5, option: value}}. Models and packages are loaded later, by `check(reward)`.
    Raises: OperantError for an unknown name or option, with the nearest known one.
    """
    if isinstance(spec, (list, tuple)) and spec:
        if odd := [part for part in spec if not callable(part) and not isinstance(part, str)]:
            raise OperantError(f"reward {shown(odd[0])} in a list of rewards: give functions or names")
        parts = [(part, float(spec.count(part))) for i, part in enumerate(spec) if part not in spec[:i]]
        spec = parts if len(spec) > 1 else next(iter(spec))
    if isinstance(spec, Mapping) or (isinstance(spec, list) and spec):
        require(not options, f"reward {shown(spec)}: give each its own options, {{NAME: {{option: value}}}}")
        parts = list(spec.items()) if isinstance(spec, Mapping) else spec
        shares = [dict(own) if isinstance(own, Mapping) else {"weight": own} for _, own in parts]
        weights = [share.pop("weight", 1.0) for share in shares]
        rewards = [resolve(part, share) for (part, _), share in zip(parts, shares)]
        names = [name_of(reward) for reward in rewards]
        # A part has the name of its reward, or its whole spec if two rewards share a name.
        unique = [
            name if names.count(name) == 1 else part if isinstance(part, str) else f"{name} {number}"
            for number, (name, (part, _)) in enumerate(zip(names, parts))
        ]
        return BuiltIn("operant.rewards.combine:weighted").make(dict(zip(unique, zip(rewards, weights))))
    if not callable(spec) and (not isinstance(spec, str) or not spec.strip()):
        raise OperantError(f"reward {spec!r}: give a function, a name such as 'letters:e', or a mapping of weights")
    if type(spec).__name__.endswith("ForSequenceClassification"):
        raise OperantError(f"reward {type(spec).__name__}: give its folder or name, as classifier:NAME")
    made = factory(spec) or Factory(lambda: None)
    name, _, argument = spec.strip().partition(":") if isinstance(spec, str) else ("", "", "")
    row, options = NAMES.get(name), dict(options or {})
    if row is not None and row.first and argument:
        first, default = next(iter(defaults(made).items()), ("", None))
        if not first or options.get(first, default) != default:
            why = f"give {first} once" if first else f"{name} takes no argument"
            raise OperantError(f"reward {spec!r}: {why}")
        options[first], argument = argument, ""
    given = arguments(made, options, f"reward {spec if isinstance(spec, str) else ''}")
    if row is not None:
        require(argument or not row.needs, f"reward {name!r} needs {row.needs}")
        if row.of_another:
            return row.make(resolve(argument, given))
        if argument and all(p.kind is p.KEYWORD_ONLY for p in inspect.signature(row.make).parameters.values()):
            raise OperantError(f"reward {spec!r}: {name} takes no argument")
        with of_user(f"reward {shown(spec)} cannot be made: "):
            return row.make(argument, **given) if argument else row.make(**given)
    if _is_run(spec):
        return NAMES["reward_model"].make(spec, **given)
    found = _find(spec.strip()) if isinstance(spec, str) else spec
    if inspect.isclass(found):
        with of_user(f"reward {shown(spec)} cannot be made: "):
            made = found(**given)
        require(callable(made), f"reward {shown(spec)} makes a {found.__name__}, which has no __call__(rollouts)")
        return cast(RewardFn, made)
    if not given:
        return cast(RewardFn, found)
    bound: Any = update_wrapper(partial(found, **given), found)  # with its attributes, such as `check`
    bound.__name__ = name_of(found)
    del bound.__wrapped__  # its signature would have no options
    return bound


def _is_run(spec: object) -> bool:
    """Whether a text is a run folder, or several, so that `--reward runs/rm` is `--reward reward_model:runs/rm`."""
    return isinstance(spec, str) and all(os.path.isfile(f"{name.strip()}/config.yaml") for name in spec.split(","))


def _find(spec: str) -> Callable[..., Any]:
    """The class or function of an installed package's name, or of `module:function`."""
    if spec in INSTALLED:
        return INSTALLED.find(spec)
    known = [*NAMES, *INSTALLED.names()]
    if ":" not in spec:
        names = f"names: {', '.join(known)}, or module:function"
        hint = f"name the function in it, {spec}:FUNCTION" if spec.endswith(".py") else names
        if "/" in spec and not spec.endswith(".py"):
            hint = f"there is no run folder {spec!r}; a classifier of transformers is classifier:{spec}"
        raise OperantError(f"reward {spec!r} is unknown{nearest(spec, known)}; {hint}")
    return find_function("reward", *spec.rpartition(":")[::2], known=known)


def close(reward: RewardFn | None) -> None:
    """End the processes of the parts of the reward that have some."""
    for part in described_parts(reward):
        if part.ends_with_run:
            part.close()


def keep_in(reward: RewardFn | None, journal: object) -> None:
    """Let the parts of the reward that keep something for a resumed run, such as verdicts of programs, do it there.

    journal: a `runs.folder.Journal`.
    """
    for part in described_parts(reward):
        part.keep_in(journal)


def check_lengths(reward: RewardFn | None, tokens: int) -> None:
    """Refuse replies of up to `tokens` tokens where a part of the reward leaves less room for them in its texts.

    Raises: OperantError.
    """
    for part in every_part(reward):
        if (room := with_defaults(part, RewardBase).prompt_tokens) is not None and tokens > room:
            leaves = f"reward {name_of(part)!r} leaves room for {room} in its longest text"
            how = f"--reward.prompt-tokens {tokens}, or more if its model needs more tokens for the same text"
            raise OperantError(f"prompts of {tokens} tokens (--sampling.max-tokens), and {leaves}: {how}")


def read_held_out(reward: RewardFn | None, tasks: Sequence[Task]) -> None:
    """Show all held-out tasks to the parts of a reward that look at them together. Raises: OperantError of a part."""
    for part in described_parts(reward) if tasks else ():
        part.read_held_out(tasks)


def prepare(reward: RewardFn | None, tasks: Sequence[Task], *, alone: bool = False) -> list[Task]:
    """Refuse tasks that a part of the reward cannot judge, and let its parts read what they need of all tasks.

    alone: only look at these tasks, which are some of all. Returns the tasks without those that a part leaves out.
    Raises: OperantError that names the first task that a part refuses.
    """
    left = list(tasks)
    for part in every_part(reward):
        (text_scores.check_tasks if alone else text_scores.prepare)(part, f"reward {name_of(part)!r}", left)
        left = left if alone else with_defaults(part, RewardBase).usable(left)
    return left
