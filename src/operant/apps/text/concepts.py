"""Scores that count words: those that a reply was asked to use, and how different those of all replies are.

RL4LMs' synthetic tasks need no data set: one prompt, many times, and a score of the numbers or dates in the reply.

operant train numbers --tasks.prompt "1 2 3" --tasks.count 64
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from operant.rewards.text_scores import Score, target_words
from operant.rewards.words import ngrams, words
from operant.rewards.words import tokenizer as tokenizer_of
from operant.types import OperantError, Rollout, Task, require

_VOWELS = "aeiou"


class Coverage(Score):
    """The share of the words in `task.target` (or its key `field`) that occur in the reply, 0 to 1.

    A word occurs as it is, or as a regular English inflection of it, or if it is itself one of a word of the reply
    (`inflected`). exact: only as it is. Upper and lower case are equal. An entry of several words occurs if they stand
    one after the other, as they are.
    """

    __name__ = "coverage"
    needs_references = False

    def __init__(self, *, exact: bool = False, field: str | None = None):
        self.exact, self.field = exact, field

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        found = list[float]()
        for rollout in rollouts:
            there, wanted = words(rollout.reply), self.wanted(rollout.task)
            found.append(sum(self.occurs(entry, there) for entry in wanted) / len(wanted))
        return found

    def check_task(self, task: Task) -> None:
        self.wanted(task)

    def wanted(self, task: Task) -> list[list[str]]:
        """The words of each entry. Raises: OperantError for an entry without any."""
        entries = target_words(task, self.field, "score 'coverage'")
        if blank := [entry for entry in entries if not words(entry)]:
            raise OperantError(f"score 'coverage': {blank[0]!r} of task {task.id!r} has no word: leave it out")
        return [words(entry) for entry in entries]

    def occurs(self, entry: list[str], there: list[str]) -> bool:
        """Whether the words of an entry occur among those of a reply."""
        if self.exact or len(entry) != 1:
            return contains(there, entry)
        forms = inflected(entry[0])
        return any(word == entry[0] or word in forms or entry[0] in inflected(word) for word in there)


class RepeatPenalty(Score):
    """-1 if the reply repeats what it was asked, else 0: the words of `task.target` all in a row, or a `banned` phrase.

    So a policy does not earn `coverage` by copying its prompt. Phrases are compared word by word, in lower case and
    without punctuation. A target of one word is not penalised. RL4LMs bans "generate" and "sentence", words of its
    prompt "generate a sentence with: ...".
    """

    __name__ = "repeat_penalty"
    needs_references = False

    def __init__(self, *, banned: tuple[str, ...] = (), field: str | None = None):
        if blank := [phrase for phrase in banned if not words(phrase)]:
            raise OperantError(f"repeat_penalty: banned={blank[0]!r} has no word; give phrases, separated by commas")
        self.banned, self.field = [words(phrase) for phrase in banned], field

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        found = list[float]()
        for rollout in rollouts:
            reply, row = words(rollout.reply), self._row(rollout.task)
            found.append(-float(any(phrase and contains(reply, phrase) for phrase in (row, *self.banned))))
        return found

    def check_task(self, task: Task) -> None:
        self._row(task)

    def _row(self, task: Task) -> list[str]:
        listed = target_words(task, self.field, "score 'repeat_penalty'")
        return [word for entry in listed for word in words(entry)] if len(listed) > 1 else []


class IncreasingNumbers(Score):
    """The number of increasing numbers at the beginning over max(pieces between spaces, `min_tokens` / 2), 0 to 1.

    Pieces that are no numbers are skipped; the count ends at the first number that is not above the one before it.
    """

    __name__ = "increasing_numbers"
    needs_references = False

    def __init__(self, min_tokens: int = 20):
        require(min_tokens >= 1, f"increasing_numbers: min_tokens={min_tokens} must be at least 1")
        self.min_tokens = min_tokens

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        return [increasing(r.reply.split()) / max(len(r.reply.split()), self.min_tokens / 2) for r in rollouts]


class Dates(Score):
    """1 if the reply has a date such as 2023-04-17 (four, two and two digits), else 0."""

    __name__ = "dates"
    needs_references = False

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        return [float(re.search(r"\d{4}-\d{2}-\d{2}", r.reply) is not None) for r in rollouts]


def contains(text: Sequence[str], phrase: Sequence[str]) -> bool:
    """Whether the words of a phrase stand in a text one after the other."""
    return any(list(text[i : i + len(phrase)]) == list(phrase) for i in range(len(text) - len(phrase) + 1))


def inflected(word: str) -> set[str]:
    """The regular English inflections of a word: plural, third person, past and -ing.

    Added are -s, -es, -ed and -ing; -d and -ing in place of a final e; -ies and -ied in place of y; -ed and -ing after
    a doubled last consonant. Irregular forms (ran, men) are not known.
    """
    forms = {word + ending for ending in ("s", "es", "ed", "ing")}
    if word.endswith("e"):
        forms |= {word + "d", word[:-1] + "ing"}
    if word.endswith("y"):
        forms |= {word[:-1] + "ies", word[:-1] + "ied"}
    if len(word) > 2 and word[-1] not in _VOWELS and word[-2] in _VOWELS:
        forms |= {word + word[-1] + "ed", word + word[-1] + "ing"}
    return forms


def increasing(pieces: Sequence[str]) -> int:
    """How many numbers from the first one are each above the one before."""
    count, last = 0, -math.inf
    for piece in pieces:
        try:
            number = float(piece)
        except ValueError:
            continue
        if not math.isfinite(number):
            continue
        if number <= last:
            break
        count, last = count + 1, number
    return count


class Diversity:
    """Numbers of all replies by name, of their words as `tokenizer` finds them; n-grams do not cross replies.

    `msttr`: mean share of different words in segments of `segment` words of the replies one after the other, without
    the rest (Johnson, 1944); absent if there is no whole segment. For each k from 1 to `n`: `distinct_k`, different
    k-grams over all (arXiv:1510.03055); `entropy_k`, the entropy of their distribution in bits; `unique_k`, how many
    occur once. `mean_length`: words of a reply.
    """

    def __init__(self, *, n: int = 3, segment: int = 100, tokenizer: str = "words"):
        require(n >= 1 and segment >= 1, f"diversity: n={n}, segment={segment}: both must be at least 1")
        self.n, self.segment, self.tokens = n, segment, tokenizer_of(tokenizer)

    def __call__(self, rollouts: list[Rollout]) -> dict[str, float | None]:
        replies = [self.tokens(rollout.reply) for rollout in rollouts]
        flat = [word for reply in replies for word in reply]
        segments = [flat[i : i + self.segment] for i in range(0, len(flat) - self.segment + 1, self.segment)]
        found: dict[str, float | None] = {
            "mean_length": len(flat) / len(replies),
            "msttr": fmean(len(set(segment)) / len(segment) for segment in segments) if segments else None,
        }
        for k in range(1, self.n + 1):
            counts = Counter[tuple[str, ...]]()
            for reply in replies:
                counts.update(ngrams(reply, k))
            total = counts.total()
            found |= {
                f"distinct_{k}": len(counts) / total if total else None,
                f"entropy_{k}": -math.fsum(c / total * math.log2(c / total) for c in counts.values()) + 0.0,
                f"unique_{k}": float(sum(count == 1 for count in counts.values())),
            }
        return found


def numbers(*, prompt: str = "Let us generate some numbers: 1 2 3", count: int = 64) -> list[dict[str, str]]:
    """`count` tasks with one prompt; the reward `increasing_numbers` wants numbers that grow."""
    if count < 1 or not prompt.strip():
        raise OperantError(f"tasks.count={count}, tasks.prompt={prompt!r}: give at least one task and a text")
    return [{"prompt": prompt}] * count


def dates(*, prompt: str = "Let us name a date:", count: int = 64) -> list[dict[str, str]]:
    """As `numbers`; the reward `dates` wants a date such as 2024-02-29 in the reply."""
    return numbers(prompt=prompt, count=count)
