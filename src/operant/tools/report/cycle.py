"""Explains the task of a run: one sentence, and the parts of its training cycle with their names, numbers and seconds.

    cycle(history)["sentence"]     "PPO trains reviews-lm to finish prompts from openings/train with replies that ..."
    cycle(history)["parts"][0]     {"name": "Generate", "phase": "generate", "seconds": 1.3, "text": "The policy ..."}

It is written for a reader who has not seen the run's command, and knows neither its policy nor its reward.
"""

import re
import statistics
from collections.abc import Mapping
from pathlib import PurePath
from typing import TypedDict

from operant.algorithms import ALGORITHMS, Algorithm
from operant.tools.report.diagnosis.history import History, counted, number, percent
from operant.tools.report.downsample import short

_TIMES = ", times the critic's probability of the outcome when it has read that token"
_RELATIVE = "the score less that of the greedy reply to the same prompt"
PAID = {
    "coderl": f"{_RELATIVE}{_TIMES.replace('that token', 'what stands before that token')}",
    "coderl_after": f"{_RELATIVE}{_TIMES}",
    "group": f"the score less the mean of all replies to the same prompt{_TIMES}",
    "difference": "the change of the score that the critic expects, and the last token also the rest of the score",
    "plain": "the score of its reply",
}
"""What `critic:...` pays to each token, by the option `reward.returns`."""

Texts = list[tuple[str, str, str]]
"""Name, phase and text of each part."""


class CyclePart(TypedDict):
    """A part of the cycle. seconds: the median over the steps after the first, which warms up."""

    name: str
    phase: str
    text: str
    seconds: float | None


class Cycle(TypedDict):
    """What a run does, in a sentence, and its parts in the order of a step."""

    sentence: str
    parts: list[CyclePart]


def cycle(history: History) -> Cycle:
    name = history.option("algorithm")
    method = ALGORITHMS.get(name)  # built-in ones alone: a name of another package would be imported
    if method is not None and method.source == "data" and not method.needs.labels:
        sentence, texts = _demonstrated(history)
    elif history.supervised:
        sentence, texts = _labelled(history, method)
    else:
        sentence, texts = _rewarded(history, method)
    parts = list[CyclePart]()
    for part, phase, text in texts:
        seconds = history.values(f"time/{phase}")[1:]
        median = short(statistics.median(seconds)) if seconds else None
        parts.append({"name": part, "phase": phase, "text": text, "seconds": median})
    return {"sentence": sentence, "parts": parts}


def _rewarded(history: History, algorithm: Algorithm | None) -> tuple[str, Texts]:
    policy, reward, tasks = (_named(history.option(name)) for name in ("policy", "reward", "tasks"))
    policy = policy or "the policy"
    reference, coef = history.option("reference", "copy"), history.recent("kl/coef", 1)
    mean, kl = history.recent("reward/mean", 1), history.recent("kl/per_reply", 1)
    count = history.recent("rollout/count", 1) or history.option("batch")
    judge = f"the reward, {reward}," if reward else "the reward"
    close, near = "", "There is no reference: how far the policy moves is not measured."
    if reference not in (None, "none"):
        model = "a frozen copy of it from before training" if reference in ("copy", "given") else _named(reference)
        close = f", while it stays close to the reference, {model}"
        measured = f"is {number(kl)} nats a reply in the last step" if kl is not None else "is measured"
        near = f"The reference rates the same tokens. KL, the distance of the two models, {measured}."
    expected = "than the critic expected" if history.values("value/mean") else "than usual"
    others = int(history.option("samples") or 1) - 1
    if others and algorithm is not None and algorithm.needs.samples > 1:
        expected = f"than the other {others} repl{'ies' if others > 1 else 'y'} to the same prompt"
    name = str(history.option("algorithm") or "")
    method = (algorithm and algorithm.title) or name.upper() or "The run"
    if history.plays:
        world = _named(history.option("env"))
        task = f"{method} trains {policy}, a language model, to play the text games{f' of {world}' if world else ''}"
        written = f"The policy plays {counted(count, 'game')}, turn by turn." if count else "Games are played."
        scored = "The world pays each turn, and a game has a sum"
    else:
        task = f"{method} trains {policy}, a language model, to answer prompts"
        task += f"{f' from {tasks}' if tasks else ''} with replies that score high with {judge}".rstrip(",")
        written = f"The policy writes {counted(count, 'reply')}." if count else "Replies are written."
        scored = f"{judge[0].upper()}{judge[1:]} gives each reply a number"
    scored += f": {number(mean)} on average in the last step." if mean is not None else "."

    # What each token is paid, and what that is compared with.
    by_critic = str(history.option("reward")).startswith("critic:")
    pays = PAID.get(history.option("reward.returns", "coderl")) if by_critic else None
    charged = f", minus {number(coef)} for each nat of KL," if coef and close else ""
    score = "The normalised score" if history.option("score.normalise") else "The score"
    credit = f"Each token is paid {pays}{charged}" if pays else f"{score}{charged} goes to the tokens"
    if algorithm is None or not algorithm.needs.token_scores:
        credit += f": was each better {expected}?"
    else:  # what a token is paid is its advantage
        credit += "." + (" Those before it share in it." if history.option("advantage.gamma") else "")
    return f"{task}{close}.", [
        ("Generate", "generate", written),
        ("Score", "reward", scored),
        ("Compare", "observe", near),
        ("Credit", "advantage", credit),
        ("Update", "update", "Tokens that were better become likelier, the others less likely."),
    ]


def _demonstrated(history: History) -> tuple[str, Texts]:
    policy, tasks = _named(history.option("policy")) or "the policy", _named(history.option("tasks"))
    loss, count = history.recent("supervised/loss", 1), history.option("batch")
    taught = f"Supervised training teaches {policy}, a language model, to write replies like those given"
    found = f" The loss of the last step: {number(loss)} nats a token." if loss is not None else ""
    read = f"A step reads {counted(count, 'given reply')}." if count else "A step reads replies."
    return f"{taught}{f' in {tasks}' if tasks else ''}. There is no reward.", [
        ("Read", "generate", read),
        ("Predict", "observe", f"The policy predicts each of their tokens.{found}"),
        ("Update", "update", "The tokens that were given become likelier."),
    ]


def _labelled(history: History, method: Algorithm | None) -> tuple[str, Texts]:
    tasks, name = _named(history.option("tasks")), str(history.option("algorithm") or "The run")
    right, count = history.recent("preference/accuracy", 1), history.option("batch")
    judges = method is not None and method.needs.policy  # a policy that generates nothing
    what = "scores replies as people do" if judges else "makes replies that people prefer more likely"
    found = f" In the last step {percent(right)} of the pairs were in the right order." if right is not None else ""
    read = f"A step reads all replies to {counted(count, 'prompt')}." if count else "Replies are read."
    return f"{name} trains a model that {what}, from the labels{f' in {tasks}' if tasks else ''}.", [
        ("Read", "generate", read),
        ("Compare", "observe", f"The model orders the replies to each prompt.{found}"),
        ("Update", "update", "Its order moves towards that of the labels."),
    ]


def _named(part: object) -> str:
    """The short name of a part: `reviews-lm` for builtin:reviews-lm, the end of a path, a function's own, `a + b`."""
    if isinstance(part, Mapping):
        return " + ".join(map(_named, part))
    text = part.removeprefix("builtin:") if isinstance(part, str) else ""  # a list holds the tasks themselves
    if text.startswith("<"):  # how a Python object is recorded: <function __main__:positive>
        return re.split(r"[\s:.]", text.strip("<>"))[-1]
    return PurePath(text).name if text.startswith(("/", ".", "~")) else text
