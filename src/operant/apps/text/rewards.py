"""Rewards that need only the reply and its task. Each function here takes a setting and returns a reward.

letters("e")([rollout])   # [7.0]: seven times the letter e
"""

import re
from collections.abc import Callable
from typing import Any

from operant.import_by_name import extra
from operant.rewards.text_scores import target_words
from operant.types import OperantError, RewardFn, Rollout, require


def each(name: str, score: Callable[[Rollout], float]) -> RewardFn:
    """A reward named `name` that scores one rollout at a time."""

    def reward(rollouts: list[Rollout]) -> list[float]:
        return [score(rollout) for rollout in rollouts]

    reward.__name__ = reward.__qualname__ = name
    return reward


def letters(wanted: str) -> RewardFn:
    """How often the letters of `wanted` occur in the reply, in any case. Raises: OperantError without a letter."""
    require(wanted, "reward 'letters' needs a letter, as in letters:e")
    found = set(wanted.lower())
    return each("letters", lambda rollout: float(sum(c in found for c in rollout.reply.lower())))


def length(setting: str | int) -> RewardFn:
    """Minus the distance of the reply's length in tokens (stop token included) from the wanted length, divided by it.

    `20`: exactly 20 tokens score 0, the maximum. `<=20`: only tokens above 20 lower the score.
    Raises: OperantError for another setting.
    """
    match = re.fullmatch(r"\s*(<=|max)?\s*([1-9]\d*)\s*", str(setting))
    require(match, f"reward 'length:{setting}': give a number of tokens (length:20) or a limit (length:<=20)")
    limit, wanted = bool(match[1]), int(match[2])

    def score(rollout: Rollout) -> float:
        over = len(rollout.ids) - wanted
        return -(max(over, 0) if limit else abs(over)) / wanted

    return each("length", score)


def keyword() -> RewardFn:
    """1 if the word in `task.target` stands in the reply, upper or lower case, else 0; of a list of words their share.

    Raises: OperantError, when called, for a task whose target is neither a word nor a list of words.
    """

    def score(rollout: Rollout) -> float:
        words = target_words(rollout.task, None, "reward 'keyword'")
        found = [re.search(rf"(?<!\w){re.escape(word)}(?!\w)", rollout.reply, re.IGNORECASE) for word in words]
        return sum(match is not None for match in found) / len(words)

    return each("keyword", score)


def ended() -> RewardFn:
    """1 if the reply ended by itself, with a stop token or a stop string, and 0 if its length was cut."""
    return each("ended", lambda rollout: float(rollout.end == "stop"))


def pattern(regex: str) -> RewardFn:
    """1 if the regular expression matches somewhere in the reply, else 0. Raises: OperantError if it is none."""
    try:
        compiled = re.compile(regex)
    except re.error as error:
        raise OperantError(f"reward 'pattern:{regex}' is not a regular expression: {error}") from error
    return each("pattern", lambda rollout: float(compiled.search(rollout.reply) is not None))


def repetition(n: str | int = 3) -> RewardFn:
    """Minus the share of the reply's word `n`-grams that repeat an earlier one: 0 if all differ, down to -1.

    Raises: OperantError for a length below 1.
    """
    if not str(n).strip().isdecimal() or int(n) < 1:
        raise OperantError(f"reward 'repetition:{n}': give the length of the n-grams in words, as in repetition:3")
    size = int(n)

    def score(rollout: Rollout) -> float:
        words = rollout.reply.lower().split()
        grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
        return len(set(grams)) / len(grams) - 1 if grams else 0.0

    return each("repetition", score)


class Vader:
    """VADER's compound score of each rollout, -1 (negative) to 1 (positive): sentiment by a lexicon and a few rules
    (Hutto and Gilbert, 2014). Needs the extra `vader`.

    `text`: `text` (query and reply) or `reply`.
    Raises: OperantError for another `text`.
    """

    __name__ = "vader"

    def __init__(self, text: str = "text"):
        require(text in ("text", "reply"), f"reward 'vader:{text}': give vader:text (query and reply) or vader:reply")
        self.text = text
        self._analyser: Any = None

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        self.check()
        return [self._analyser.polarity_scores(getattr(r, self.text))["compound"] for r in rollouts]

    def check(self) -> None:
        """Load the lexicon. Raises: OperantError if the package is missing."""
        if self._analyser is not None:
            return
        with extra("reward 'vader' needs a package", "vader"):
            from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
        self._analyser = SentimentIntensityAnalyzer()
