"""Explains the task of a run: one sentence, and the parts of its training cycle with their names, numbers and seconds.

    cycle(history)["sentence"]     "PPO trains reviews-lm to finish prompts from openings/train with replies that ..."
    cycle(history)["parts"][0]     {"name": "Generate", "phase": "generate", "seconds": 1.3, "text": "The policy ..."}

It is written for a reader who has not seen the run's command, and knows neither its policy nor its reward.
"""

import re
import statistics
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from operant.tools.diagnosis.history import History, counted, number, percent
from operant.tools.report.downsample import short

NAMES = {"coderl": "CodeRL", "gigpo": "GiGPO", "online-dpo": "Online DPO", "rejection": "Rejection sampling"}
NAMES |= {"decision": "Decision", "distill": "Distill", "soft_q": "Soft Q-learning"}
"""How the docs write the methods whose names are not in capitals."""
COMPARE_REPLIES = ("grpo", "rloo", "gigpo", "online-dpo")
"""The methods that compare the replies to one prompt."""
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


def cycle(history: History) -> dict[str, Any]:
    """Return the sentence and the parts; `seconds` is the median over the steps after the first, which warms up."""
    if history.option("algorithm") == "sft":
        sentence, parts = _demonstrated(history)
    elif history.supervised:
        sentence, parts = _labelled(history)
    else:
        sentence, parts = _rewarded(history)
    for part in parts:
        seconds = history.values(f"time/{part['phase']}")[1:]
        part["seconds"] = short(statistics.median(seconds)) if seconds else None
    return {"sentence": sentence, "parts": parts}


def _rewarded(history: History) -> tuple[str, list[dict[str, Any]]]:
    policy, reward, tasks = (_named(history.option(name)) for name in ("policy", "reward", "tasks"))
    reference, coef = history.option("reference", "copy"), history.recent("kl/coef", 1)
    mean, kl = history.recent("reward/mean", 1), history.recent("kl/per_reply", 1)
    count = history.recent("rollout/count", 1) or history.option("batch")
    judge = f"the reward, {reward}," if reward else "the reward"
    if reference in (None, "none"):
        close, near = "", "There is no reference: how far the policy moves is not measured."
    else:
        model = "a frozen copy of it from before training" if reference in ("copy", "given") else _named(reference)
        close = f", while it stays close to the reference, {model}"
        measured = f"is {number(kl)} nats a reply in the last step" if kl is not None else "is measured"
        near = f"The reference rates the same tokens. KL, the distance of the two models, {measured}."
    charged = f", minus {number(coef)} for each nat of KL," if coef and close else ""
    expected = "than the critic expected" if history.values("value/mean") else "than usual"
    algorithm, others = history.option("algorithm"), int(history.option("samples") or 1) - 1
    if others and algorithm in COMPARE_REPLIES:
        expected = f"than the other {others} repl{'ies' if others > 1 else 'y'} to the same prompt"
    score = "normalised score" if history.option("score.normalise") else "score"
    method = NAMES.get(algorithm, algorithm.upper()) if algorithm else "The run"
    task = f"{method} trains {policy or 'the policy'}, a language model, to answer prompts"
    task += f"{f' from {tasks}' if tasks else ''} with replies that score high with {judge}".rstrip(",")
    written = f"The policy writes {counted(count, 'reply')}." if count else "Replies are written."
    scored = f"{judge[0].upper()}{judge[1:]} gives each reply a number"
    if history.plays:
        world = _named(history.option("env"))
        task = f"{method} trains {policy or 'the policy'}, a language model, to play the text games"
        task += f" of {world}" if world else ""
        written = f"The policy plays {counted(count, 'game')}, turn by turn." if count else "Games are played."
        scored = "The world pays each turn, and a game has a sum"
    return f"{task}{close}.", [
        _part("Generate", "generate", written),
        _part(
            "Score", "reward", scored + (f": {number(mean)} on average in the last step." if mean is not None else ".")
        ),
        _part("Compare", "observe", near),
        _part("Credit", "advantage", _credit(history, f"The {score}", charged, expected)),
        _part("Update", "update", "Tokens that were better become likelier, the others less likely."),
    ]


def _credit(history: History, score: str, charged: str, expected: str) -> str:
    """What each token is paid, and what that is compared with: CodeRL compares it with nothing more."""
    by_critic = str(history.option("reward")).startswith("critic:")
    pays = PAID.get(history.option("reward.returns", "coderl")) if by_critic else None
    paid = f"Each token is paid {pays}{charged}" if pays else f"{score}{charged} goes to the tokens"
    if history.option("algorithm") != "coderl":
        return f"{paid}: was each better {expected}?"
    return f"{paid}." + (" Those before it share in it." if history.option("advantage.gamma") else "")


def _demonstrated(history: History) -> tuple[str, list[dict[str, Any]]]:
    policy, tasks = _named(history.option("policy")) or "the policy", _named(history.option("tasks"))
    loss, count = history.recent("supervised/loss", 1), history.option("batch")
    given = f"Supervised training teaches {policy}, a language model, to write replies like those given"
    found = f" The loss of the last step: {number(loss)} nats a token." if loss is not None else ""
    return f"{given}{f' in {tasks}' if tasks else ''}. There is no reward.", [
        _part(
            "Read",
            "generate",
            f"A step reads {counted(count, 'given reply')}." if count else "A step reads replies.",
        ),
        _part("Predict", "observe", f"The policy predicts each of their tokens.{found}"),
        _part("Update", "update", "The tokens that were given become likelier."),
    ]


def _labelled(history: History) -> tuple[str, list[dict[str, Any]]]:
    tasks = _named(history.option("tasks"))
    right, count = history.recent("preference/accuracy", 1), history.option("batch")
    method = str(history.option("algorithm") or "The run")
    what = "scores replies as people do" if method == "reward-model" else "makes replies that people prefer more likely"
    found = f" In the last step {percent(right)} of the pairs were in the right order." if right is not None else ""
    return f"{method} trains a model that {what}, from the labels{f' in {tasks}' if tasks else ''}.", [
        _part(
            "Read",
            "generate",
            f"A step reads all replies to {counted(count, 'prompt')}." if count else "Replies are read.",
        ),
        _part("Compare", "observe", f"The model orders the replies to each prompt.{found}"),
        _part("Update", "update", "Its order moves towards that of the labels."),
    ]


def _part(name: str, phase: str, text: str) -> dict[str, Any]:
    return {"name": name, "phase": phase, "text": text}


def _named(part: Any) -> str:
    """The short name of a part: `reviews-lm` for builtin:reviews-lm, the end of a path, a function's own, `a + b`."""
    if isinstance(part, Mapping):
        return " + ".join(map(_named, part))
    text = part.removeprefix("builtin:") if isinstance(part, str) else ""  # a list holds the tasks themselves
    if text.startswith("<"):  # how a Python object is recorded: <function __main__:positive>
        return re.split(r"[\s:.]", text.strip("<>"))[-1]
    return PurePath(text).name if text.startswith(("/", ".", "~")) else text
