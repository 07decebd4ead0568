"""Rewards: any callable from rollouts to scores, and a table of the built-in ones by name.

    resolve("letters:e")                                      # a name and its argument
    resolve("builtin:sentiment")                              # a built-in classifier
    resolve("classifier:./my-model#2")                        # label 2 of a folder or Hub name
    resolve("runs/reward-model")                              # a reward model that was trained; or reward_model:NAME
    resolve("my_rewards:politeness")                          # a function of your own
    resolve({"builtin:sentiment": 1.0, "length:<=20": 0.3})   # a weighted sum
    resolve("isolated:my_rewards:politeness")                 # your own function, in worker processes
    resolve(lambda rollouts: [len(r.reply) for r in rollouts])
    resolve("my_rewards:brevity", {"target": 20})             # the function's argument `target`
    resolve({"my_rewards:brevity": {"weight": 0.5, "target": 20}, "letters:e": 1.0})
    resolve("rouge:rougeL", {"several": "mean"})              # a score of `text_scores`, with options
    resolve("per_token:rouge")                                # what each token adds to it

`check` loads what a reward needs, `prepare` lets it see the tasks, and `judge` calls it on rollouts and checks every
answer.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from operant import text_scores
from operant.import_by_name import Table, find_function, nearest
from operant.options import Factory, arguments, defaults
from operant.rewards import text
from operant.rewards.combine import (
    IntentAndScore,
    MinusGreedy,
    MinusQuery,
    PrefixGain,
    Weighted,
    every_part,
    minus_query,
    read_with,
    weighted,
)
from operant.rewards.critic import WORTH, CriticReward
from operant.rewards.evaluate import OUTCOMES, Judged, Outcome, SampleResult, check, judge, name_of, reward_metrics
from operant.rewards.failure_policy import IsolationOptions, Tolerant
from operant.rewards.isolated import IsolatedReward, isolated
from operant.rewards.prompts import PromptReward
from operant.rewards.reward_model import RewardModelScore
from operant.rewards.tests import UnitTests
from operant.rewards.transfer import StyleTransfer
from operant.rewards.vader import Vader
from operant.rollouts.totals import totals
from operant.sandbox.reward_call import as_in_trl
from operant.text_scores import SCORES
from operant.text_scores.classifier import Classifier
from operant.types import OperantError, RewardFn, Task, describe_error, shown

__all__ = [
    "NAMES",
    "OUTCOMES",
    "Classifier",
    "CriticReward",
    "IsolatedReward",
    "IsolationOptions",
    "Judged",
    "Outcome",
    "PrefixGain",
    "PromptReward",
    "RewardModelScore",
    "SampleResult",
    "StyleTransfer",
    "UnitTests",
    "Vader",
    "check",
    "close",
    "compared_with_greedy",
    "every_part",
    "held_out",
    "isolated",
    "isolated_parts",
    "judge",
    "keep_in",
    "minus_query",
    "name_of",
    "parts_of",
    "prepare",
    "read_with",
    "resolve",
    "reward_metrics",
    "totals",
    "under",
    "weighted",
]


INSTALLED = Table("reward", "operant.rewards", {})
"""The rewards of other packages."""


def _classifier(
    argument: str,
    *,
    label: str | None = None,
    output: str = "probability",
    text: str = "text",
    batch: int = 32,
    device: str | None = None,
) -> RewardFn:
    name, _, after = argument.partition("#")
    if label and after:
        raise OperantError(f"reward 'classifier:{argument}' with label={label!r}: give the label once")
    return Classifier(name, label=label or after or "positive", output=output, text=text, batch=batch, device=device)


def intent(
    model: str | None = None,
    *,
    intent_coef: float = 1.0,
    auto_coef: float = 0.0,
    auto: str = "meteor",
    field: str | None = None,
    text: str = "reply",
    batch: int = 32,
    device: str | None = None,
) -> RewardFn:
    """intent_coef [predicted intent == target] + auto_coef * the reward `auto`, as RL4LMs' `intent_accuracy`.

    The other options are those of `text_scores.Intent`.
    """
    right = text_scores.Intent(model, field=field, text=text, batch=batch, device=device)
    both = {"intent": (right, intent_coef)} | ({auto: (resolve(auto), auto_coef)} if auto_coef else {})
    return IntentAndScore(weighted(both).rewards)


def critic(
    path: str,
    *,
    of: Any = "tests",
    of_options: Mapping[str, Any] | None = None,
    returns: str = "coderl",
    worth: tuple[float, ...] = WORTH,
    refresh: float = 0.0,
    batch: int = 32,
    device: str | None = None,
) -> RewardFn:
    """The reward `of`, with `of_options`, paid to each token as a critic says; the other options are those of
    `rewards.critic.CriticReward`."""
    inner = resolve(of, of_options)
    return CriticReward(path, inner, returns=returns, worth=worth, refresh=refresh, batch=batch, device=device)


def _humans() -> Any:
    """The class for labels of people; it belongs to a tool, which is imported only here."""
    return find_function("reward", "operant.labels.humans", "Humans")


NAMES: dict[str, tuple[Callable[..., RewardFn], str]] = {
    "builtin": (
        lambda argument, **options: _classifier(f"builtin:{argument}", **options),
        "NAME, as in builtin:sentiment",
    ),
    "classifier": (_classifier, "a folder or Hub name, and a label if it is not positive: classifier:./my-model#2"),
    "critic": (critic, "a trained critic of outcomes: critic:runs/critic"),
    "ended": (text.ended, ""),
    "humans": (
        lambda path, **options: _humans()(path, **options),
        "the database of `operant label`, whose labels training waits for: humans:labels.sqlite",
    ),
    "isolated": (
        lambda spec: IsolatedReward(INSTALLED.place(spec)),
        "a function that runs in worker processes: isolated:my_rewards:politeness",
    ),
    "keyword": (text.keyword, ""),
    "length": (text.length, "tokens: length:20, or at most: length:<=20"),
    "letters": (text.letters, "a letter: letters:e"),
    "minus_greedy": (
        lambda spec, **options: MinusGreedy(resolve(spec, options)),
        "another reward: minus_greedy:builtin:sentiment",
    ),
    "minus_query": (
        lambda spec, **options: minus_query(resolve(spec, options)),
        "another reward: minus_query:builtin:sentiment",
    ),
    "pattern": (text.pattern, "a regular expression: pattern:[.!?]$"),
    "per_token": (lambda spec, **options: PrefixGain(resolve(spec, options)), "another reward: per_token:rouge"),
    "repetition": (text.repetition, ""),
    "reward_model": (RewardModelScore, "run folders or models, separated by commas: reward_model:runs/reward-model"),
    "style_transfer": (StyleTransfer, ""),
    "tests": (UnitTests, ""),
    "vader": (Vader, ""),
}
"""Name -> (function from the argument to the reward, description of the argument; empty: it needs none)."""
OF_ANOTHER = ("minus_greedy", "minus_query", "per_token")
"""Rewards of another reward, which stands behind their name; its options are theirs."""
OF_TEXTS: dict[str, Callable[..., Any]] = {**SCORES, "intent": intent, "prompt": PromptReward}
"""Rewards whose arguments are options, the first of which may stand behind the name: rouge:rougeL."""
NAMES |= {name: (made, "") for name, made in OF_TEXTS.items()}
_WITH_OPTIONS = ("builtin", "classifier")
"""Names whose options are those of `_classifier`. Others, but for those of `OF_TEXTS`, have only their argument."""


def factory(spec: Any) -> Factory | None:
    """The class or function whose arguments are the options of a reward; None: it has none, as in TRL's form.

    Of a class all arguments are options, of a function from rollouts to scores those after the first.
    Raises: OperantError for a name that is unknown or cannot be imported.
    """
    if isinstance(spec, str):
        check_single(spec)
        name, _, argument = spec.strip().partition(":")
        if name in OF_ANOTHER:
            return factory(argument) if argument else None
        if name in OF_TEXTS:
            return Factory(OF_TEXTS[name])
        if name in ("style_transfer", "tests"):
            return Factory(NAMES[name][0])
        if name == "critic":
            return Factory(critic, 1)
        if name == "humans":
            return Factory(_humans(), 1)
        if name == "reward_model" or _is_run(spec):
            return Factory(RewardModelScore, 1)
        if name in NAMES:
            return Factory(_classifier, 1) if name in _WITH_OPTIONS else None
        spec = _find(spec.strip())
    if inspect.isclass(spec):
        return Factory(spec)
    gets = "the list of replies alone (or prompts and completions, if these are its arguments)"
    if inspect.isfunction(spec) and not inspect.signature(spec).parameters:
        raise OperantError(f"reward {spec.__name__!r} takes no argument: a reward gets the list of all replies")
    return Factory(spec, 1, gets) if inspect.isroutine(spec) and not as_in_trl(spec) else None


def resolve(spec: Any, options: Mapping[str, Any] | None = None) -> RewardFn:
    """A reward from a callable, a name with its argument, `module:function`, `file.py:function`, or {spec: weight}.

    options: those of the reward, as `factory` describes them. Of several rewards each may have its own:
    {spec: {"weight": 0.5, option: value}}. Models and packages are loaded later, by `check(reward)`.
    Raises: OperantError for an unknown name or option, with the nearest known one.
    """
    if isinstance(spec, Mapping):
        shares = {part: dict(own) if isinstance(own, Mapping) else {"weight": own} for part, own in spec.items()}
        weights = {part: share.pop("weight", 1.0) for part, share in shares.items()}
        rewards = {part: resolve(part, share) for part, share in shares.items()}
        names = [name_of(reward) for reward in rewards.values()]
        # A part has the name of its reward, or its whole spec if two rewards share a name.
        unique = [name if names.count(name) == 1 else str(part) for name, part in zip(names, rewards)]
        return weighted({name: (rewards[part], weights[part]) for name, part in zip(unique, rewards)})
    if not callable(spec) and (not isinstance(spec, str) or not spec.strip()):
        raise OperantError(f"reward {spec!r}: give a function, a name such as 'letters:e', or a mapping of weights")
    made = factory(spec) or Factory(lambda: None)
    name, _, argument = spec.strip().partition(":") if isinstance(spec, str) else ("", "", "")
    options = dict(options or {})
    if name in OF_TEXTS and argument:
        first, default = next(iter(defaults(made).items()), ("", None))
        if not first or options.get(first, default) != default:
            why = f"give {first} once" if first else f"{name} takes no argument"
            raise OperantError(f"reward {spec!r}: {why}")
        options[first], argument = argument, ""
    given = arguments(made, options, f"reward {spec if isinstance(spec, str) else ''}")
    if name in NAMES:
        make, needed = NAMES[name]
        if needed and not argument:
            raise OperantError(f"reward {name!r} needs {needed}")
        return make(argument, **given) if argument else make(**given)
    if _is_run(spec):
        return RewardModelScore(spec, **given)
    found = _find(spec.strip()) if isinstance(spec, str) else spec
    if inspect.isclass(found):
        try:
            made = found(**given)
            if not callable(made):
                raise OperantError(f"reward {shown(spec)} makes a {found.__name__}, which has no __call__(rollouts)")
            return cast(RewardFn, made)
        except OperantError:
            raise
        except (Exception, SystemExit) as error:
            why = f"{describe_error(error)}"
            raise OperantError(f"reward {shown(spec)} cannot be made: {why}") from error
    if not given:
        return cast(RewardFn, found)
    bound: Any = partial(found, **given)
    bound.__name__ = name_of(found)
    return bound


def _is_run(spec: Any) -> bool:
    """Whether a text is a run folder, or several, so that `--reward runs/rm` is `--reward reward_model:runs/rm`."""
    return isinstance(spec, str) and all((Path(name.strip()) / "config.yaml").is_file() for name in spec.split(","))


def _find(spec: str) -> Callable[..., Any]:
    """The class or function of an installed package's name, or of `module:function`."""
    if spec in INSTALLED:
        return INSTALLED.find(spec)
    known = [*NAMES, *INSTALLED.names()]
    if ":" not in spec:
        names = f"names: {', '.join(known)}, or module:function"
        hint = f"name the function in it, {spec}:FUNCTION" if spec.endswith(".py") else names
        hint = f"there is no run folder {spec!r}" if "/" in spec and not spec.endswith(".py") else hint
        raise OperantError(f"reward {spec!r} is unknown{nearest(spec, known)}; {hint}")
    return find_function("reward", *spec.rpartition(":")[::2], known=known)


def check_single(spec: str) -> None:
    """Raises: OperantError for several rewards with commas between them. A regular expression may have commas."""
    parts = [part.strip() for part in spec.split(",")]
    named = [part.partition(":")[0] in NAMES or re.fullmatch(r"[\w./~-]+:\w+", part) for part in parts]
    if len(parts) > 1 and all(named) and not spec.startswith("pattern:"):
        weights = ", ".join(f"{part}: 1" for part in parts)
        raise OperantError(f"reward {spec!r} names {len(parts)}: give each its weight, as in --reward '{{{weights}}}'")


def under(reward: RewardFn, options: IsolationOptions) -> RewardFn:
    """The reward with a run's options, for isolated parts without their own and for the handling of failures."""
    if isinstance(reward, Weighted):
        parts = {name: (under(part, options), weight) for name, (part, weight) in reward.rewards.items()}
        return type(reward)(parts)
    if isinstance(reward, (MinusQuery, PrefixGain)):
        return type(reward)(under(reward.reward, options))
    if isinstance(reward, CriticReward):
        reward.reward = under(reward.reward, options)
        return reward
    if isinstance(reward, IsolatedReward):
        return reward.under(options)
    strict = options.handling("error", "stop") == "stop" and options.on_abstain == "drop"
    return reward if strict or hasattr(reward, "judged") else Tolerant(reward, options)


def held_out(reward: RewardFn | None) -> RewardFn | None:
    """The reward as it judges single replies, such as held-out ones: without what compares the replies of a step, and
    without a critic, so that its score is that of the outcome."""
    if isinstance(reward, Weighted):
        return type(reward)({name: (held_out(part), weight) for name, (part, weight) in reward.rewards.items()})  # type: ignore
    return held_out(reward.reward) if isinstance(reward, (MinusGreedy, CriticReward)) else reward


def compared_with_greedy(reward: RewardFn | None) -> list[Any]:
    """The parts of a reward that compare replies with the policy's greedy ones (`see_greedy`)."""
    return [part for part in every_part(reward) if getattr(part, "wants_greedy", False)]


def isolated_parts(reward: RewardFn | None) -> list[IsolatedReward]:
    """The isolated rewards among its parts."""
    return parts_of(reward, IsolatedReward)


def close(reward: RewardFn | None) -> None:
    """End the processes of isolated parts of the reward, and of those whose programs run on Ray."""
    for part in [*parts_of(reward, IsolatedReward), *parts_of(reward, UnitTests)]:
        part.close()


def parts_of(reward: Any, kind: type) -> list[Any]:
    """The rewards of a class among its parts."""
    return [part for part in every_part(reward) if isinstance(part, kind)]


def keep_in(reward: RewardFn | None, journal: Any) -> None:
    """Let the parts of the reward that keep something for a resumed run, such as verdicts of programs, do it there.

    journal: a `runs.journal.Journal`.
    """
    for part in every_part(reward):
        if callable(keep := getattr(part, "keep_in", None)):
            keep(journal)


def check_lengths(reward: RewardFn | None, tokens: int) -> None:
    """Refuse replies of up to `tokens` tokens where a part of the reward leaves less room for them in its texts.

    Raises: OperantError.
    """
    for part in every_part(reward):
        room = getattr(part, "prompt_tokens", None)
        if room is not None and tokens > room:
            raise OperantError(
                f"prompts of {tokens} tokens (--sampling.max-tokens), and reward {name_of(part)!r} leaves room for "
                f"{room} in its longest text: --reward.prompt-tokens {tokens}, or more if its model needs more tokens "
                "for the same text"
            )


def read_held_out(reward: RewardFn | None, tasks: Sequence[Task]) -> None:
    """Show all held-out tasks to the parts of a reward that look at them together. Raises: OperantError of a part."""
    for part in every_part(reward):
        if tasks and callable(read := getattr(part, "read_held_out", None)):
            read(tasks)


def prepare(reward: RewardFn | None, tasks: Sequence[Task], *, alone: bool = False) -> list[Task]:
    """Refuse tasks that a part of the reward cannot judge, and let its parts read what they need of all tasks.

    alone: only look at these tasks, which are some of all. Returns the tasks without those that a part leaves out.
    Raises: OperantError that names the first task that a part refuses.
    """
    left: Any = list(tasks)
    for part in every_part(reward):
        (text_scores.check_tasks if alone else text_scores.prepare)(part, f"reward {name_of(part)!r}", left)
        if not alone and callable(usable := getattr(part, "usable", None)):
            left = usable(left)
    return left
