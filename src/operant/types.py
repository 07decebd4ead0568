"""The nouns of the library. Everything else is a function between two of them.

torch is imported where a tensor is touched, so that a worker that judges text has none of it.

Shape letters, the same in every file:
B rows, T tokens of a row, E episodes, A actions of an episode, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

End = Literal["stop", "length", "world", "cut"]
"""Why a reply or an episode ended.

`stop`: a stop token or string; `length`: the task's own length limit; `world`: the environment;
`cut`: a step limit cut the episode, so the value of the next state follows.
"""


class OperantError(ValueError):
    """A mistake that the user can mend: the message names the value, the reason and the remedy."""

    def __init__(self, message: str = ""):
        super().__init__(re.sub(r"(\S{300})\S{500,}", r"\1...", message))  # a value of thousands of characters


def shown(value: Any, most: int = 100) -> str:
    """A value as a message quotes it: on one line, and not longer than so many characters."""
    try:
        text = " ".join(repr(value[:most] if isinstance(value, (str, bytes, list, tuple)) else value).split())
        cut = text[most:] or (isinstance(value, (str, bytes, list, tuple)) and value[most:])
    except (ValueError, RecursionError):  # a whole number of thousands of digits, or something that holds itself
        return f"<a very large {type(value).__name__}>"
    return text[:most] + "..." if cut else text


@dataclass(frozen=True)
class Task:
    """One thing to attempt: `Task("imdb/17", "The film was", target=1)`."""

    id: str
    prompt: str | list[dict[str, str]] | list[int]
    """Text, chat messages, or token ids that are used as they are."""
    target: Any = None
    """What a reward needs to judge the attempt."""
    replies: tuple[Any, ...] = ()
    """Given replies, for methods that learn from them: each a text, token ids, or the messages that follow."""


@dataclass(frozen=True)
class Completion:
    """One generated reply: `Completion([40, 12, 0], [-1.2, -0.3, -2.0], None, "stop", 3)`."""

    action: list[int]
    """The ids, the stop token included."""
    logprobs: list[float]
    """[len(action)] under the distribution that was sampled from; of a choice [1], among the options."""
    values: list[float] | None
    """[len(action)] the critic's value of the state before each token, where decoding knows it."""
    end: End
    version: int
    """Of the weights that spoke."""
    allowed: list[list[int]] | None = None
    """For truncated sampling alone: the ids that could be drawn at each position."""
    states: Tensor | None = None
    """Trunk states, for `policy/` alone."""


@dataclass(frozen=True)
class Turn:
    """One reply and exactly what the policy saw before it."""

    prompt: list[int]
    action: list[int]
    logprobs: list[float] | None = None
    """One an action. None where the reply was not sampled here: one forward pass fills them in."""
    values: list[float] | None = None
    end: End = "stop"
    version: int = 0
    allowed: list[list[int]] | None = None
    states: Tensor | None = None
    reward: float = 0.0
    """Paid by the world on the last token of the reply."""
    next_value: float = 0.0
    """Value of the state that follows a cut episode; 0 where the episode ended."""
    options: list[list[int]] | None = None
    """For a choice among given replies, which is one action: their ids."""
    chosen: int | None = None

    @property
    def count(self) -> int:
        """How many actions it is: one a token, and one where it was chosen among given replies."""
        return len(self.action) if self.options is None else 1


@dataclass(frozen=True)
class Rollout:
    """One attempt at one task. Attempts at the same task of one step share `group`."""

    task: Task
    group: int
    turns: list[Turn]
    texts: list[str]
    """The replies as text, cut before a stop string, without the stop token."""
    end: End = "stop"
    info: dict[str, Any] = field(default_factory=dict)
    query: str = ""
    """The first prompt as text."""
    following: list[int] | None = None
    """Of a cut episode: the prompt that would have come next, whose value is the bootstrap."""
    place: int | None = None
    """Where it stands among all rollouts of its step, on every rank; None where nobody has counted."""
    sampling: Any = None
    """The `Sampling` that its replies were drawn with; None where they came from elsewhere."""

    @property
    def reply(self) -> str:
        """The last reply."""
        return self.texts[-1]

    @property
    def text(self) -> str:
        """Query and replies, joined."""
        return self.query + "".join(self.texts)

    @property
    def paid(self) -> float:
        """What the world paid for all turns together."""
        return sum(turn.reward for turn in self.turns)

    @property
    def ids(self) -> list[int]:
        """The token ids of the last reply."""
        return self.turns[-1].action

    @property
    def messages(self) -> list[dict[str, str]]:
        """The attempt as chat messages."""
        given = self.task.prompt
        asked = [message for message in given if isinstance(message, dict)]
        start = asked or [{"role": "user", "content": self.query}]
        return start + [{"role": "assistant", "content": text} for text in self.texts]


@dataclass(frozen=True)
class Step:
    """A world's answer to one reply.

    `fresh=False`: `text` is appended after the reply, whose ids stay as they are.
    `fresh=True`: `text` is a whole new prompt (a memory that forgets) and opens a new row of the same episode.
    """

    text: str = ""
    fresh: bool = False
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    options: list[str] | None = None
    """Replies to choose among; None: the policy speaks freely."""


class Env(Protocol):
    """Many episodes, any live subset at a time. A slot is an integer that names one episode."""

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]: ...

    def step(self, replies: Mapping[int, str]) -> dict[int, Step]: ...


class Engine(Protocol):
    """Prompts to completions. `keys` are the counters of the random numbers, one int a prompt."""

    def generate(self, prompts: Sequence[list[int]], sampling: Any, keys: Sequence[int]) -> list[Completion]: ...

    def choose(
        self, prompts: Sequence[list[int]], options: Sequence[list[list[int]]], sampling: Any, keys: Sequence[int]
    ) -> list[tuple[int, Completion]]: ...

    def sync(self, policy: Any, version: int) -> None: ...


@dataclass(frozen=True)
class Choices:
    """The choices among given replies of a batch, C of them with O options and N tokens together; in row order."""

    places: Tensor
    """[C] int: row * T + column of the action, which stands at the first token of the reply that was taken."""
    picked: Tensor
    """[C] int: which option that is."""
    counts: Tensor
    """[C] int: how many options there were."""
    lengths: Tensor
    """[O] int: tokens of each option."""
    ids: Tensor
    """[N] int: those tokens."""

    @staticmethod
    def of(found: Sequence[tuple[int, int, list[list[int]]]]) -> Choices:
        """From (place, picked, options) of each."""
        import torch

        options = [option for _, _, among in found for option in among]
        return Choices(
            places=torch.tensor([place for place, _, _ in found]),
            picked=torch.tensor([picked for _, picked, _ in found]),
            counts=torch.tensor([len(among) for _, _, among in found]),
            lengths=torch.tensor([len(option) for option in options]),
            ids=torch.tensor([token for option in options for token in option]),
        )

    def listed(self) -> list[tuple[int, int, list[list[int]]]]:
        """What `of` was given."""
        options = [part.tolist() for part in self.ids.split(self.lengths.tolist())]
        ends = self.counts.cumsum(0).tolist()
        among = [options[end - n : end] for end, n in zip(ends, self.counts.tolist(), strict=True)]
        return list(zip(self.places.tolist(), self.picked.tolist(), among, strict=True))


Score = float | Mapping[str, float] | Sequence[float] | None
RewardFn = Callable[[list[Rollout]], Sequence[Score]]
"""Judges attempts: one entry a rollout, a float, named floats, one float per action token, or None (abstains)."""


@dataclass(frozen=True)
class Batch:
    """Rows of tokens and, at each token, everything known about it.

    Every [B, T] field talks about the token at the same place: `logprobs[b, t]` is the log-probability of
    `tokens[b, t]` given `tokens[b, :t]`, `values[b, t]` the value of the state before that token. Nothing is
    shifted outside `policy/`. Rows of one episode are in order of time.
    """

    tokens: Tensor
    """[B, T] int."""
    mask: Tensor
    """[B, T] bool: not padding. From lengths, never from ids."""
    actions: Tensor
    """[B, T] bool: chosen by the policy."""
    rewards: Tensor
    """[B, T] 0 where nothing is paid."""
    turns: Tensor
    """[B, T] int: which turn of the episode; -1 off actions."""
    episodes: Tensor
    """[B] int: consecutive numbers 0..E-1."""
    groups: Tensor
    """[B] int."""
    bootstrap: Tensor
    """[E] value of the state that follows the last action: 0 where the episode ended."""
    logprobs: Tensor | None = None
    """[B, T] under the sampling policy; 0 off actions."""
    raw_logprobs: Tensor | None = None
    """[B, T] as `logprobs`, before any truncation: what KL is measured with."""
    ref_logprobs: Tensor | None = None
    """[B, T] under the reference, untruncated."""
    kl: Tensor | None = None
    """[B, T] what the reward's KL term charges, before its coefficient."""
    price: Tensor | None = None
    """[B, T] what a nat of that term costs in units of the advantages, where the update adds its own gradient."""
    values: Tensor | None = None
    """[B, T]"""
    advantages: Tensor | None = None
    """[B, T]"""
    returns: Tensor | None = None
    """[B, T]"""
    weights: Tensor | None = None
    """[B, T] how much each action counts; sums to 1 over an optimizer step (all ranks together)."""
    allowed: tuple[Tensor, Tensor] | None = None
    """Ragged: ids [N] and offsets [B * T + 1] of the tokens that could be drawn."""
    states: Tensor | None = None
    """[B, T, D] what a frozen trunk has computed of every token, for `policy/` alone."""
    choices: Choices | None = None
    """Which actions are choices among given replies, and among which; None: none is."""
    longest: int = 0
    """Columns of the batch that these rows were taken from: what computes them must not depend on how it was cut."""

    @staticmethod
    def given(prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]]) -> Batch:
        """Given replies as rows of their own, one an episode: what has to be known to score them, and nothing else."""
        import torch

        rows = [torch.tensor([*p, *r], dtype=torch.long) for p, r in zip(prompts, replies, strict=True)]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        column = torch.arange(tokens.shape[1])
        mask = column < torch.tensor([len(row) for row in rows])[:, None]
        actions = mask & (column >= torch.tensor([len(p) for p in prompts])[:, None])
        count = torch.arange(len(rows))
        return Batch(
            tokens=tokens,
            mask=mask,
            actions=actions,
            rewards=torch.zeros(tokens.shape),
            turns=torch.where(actions, 0, -1),
            episodes=count,
            groups=count,
            bootstrap=torch.zeros(len(rows)),
        )

    @staticmethod
    def choosing(prompts: Sequence[Sequence[int]], options: Sequence[Sequence[list[int]]]) -> Batch:
        """A choice behind each prompt, as if the first option had been taken: what is needed to score them all."""
        batch = Batch.given(prompts, [among[0][:1] for among in options])
        width = batch.tokens.shape[1]
        found = [(row * width + len(p), 0, list(o)) for row, (p, o) in enumerate(zip(prompts, options, strict=True))]
        return batch.with_(choices=Choices.of(found))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def chosen(self) -> Tensor:
        """[B, T] bool: the actions that are choices."""
        import torch

        where = torch.zeros(self.actions.numel(), dtype=torch.bool, device=self.actions.device)
        if self.choices is not None:
            where[self.choices.places.to(where.device)] = True
        return where.view(self.actions.shape)

    def sizes(self) -> list[int]:
        """Tokens that each row computes: its own, and those of the options that it chooses among."""
        own = self.mask.sum(1).tolist()
        for place, _, among in self.choices.listed() if self.choices is not None else ():
            own[place // self.tokens.shape[1]] += sum(map(len, among))
        return own

    def with_(self, **updates: Any) -> Batch:
        return replace(self, **updates)

    def to(self, device: Any) -> Batch:
        """The batch on a device; the ragged `allowed` and `choices` stay where they are, being read piece by piece."""
        import torch

        if self.tokens.device == torch.device(device):
            return self
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(device) for k, v in moved.items() if isinstance(v, torch.Tensor)})

    def rows(self, index: Tensor | slice) -> Batch:
        """Some rows of the batch, trimmed to the longest of them.

        `episodes` keep their numbers, and `bootstrap` stays whole, so that an episode is known wherever it lies.
        """
        import torch

        width = int(self.mask[index].any(0).nonzero().max()) + 1 if len(self.mask[index]) else 0
        picked: dict[str, Any] = {"longest": max(self.longest, self.tokens.shape[1])}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, torch.Tensor) and f.name != "bootstrap":
                value = value[index]
                picked[f.name] = value[:, :width] if value.ndim > 1 else value
        if self.allowed is not None:
            picked["allowed"] = _pick_ragged(self.allowed, self.tokens.shape, index, width)
        if self.choices is not None:
            picked["choices"] = _pick_choices(self.choices, self.tokens.shape, index, width)
        return replace(self, **picked)


def _pick_choices(choices: Choices, shape: torch.Size, index: Any, width: int) -> Choices | None:
    import torch

    rows = {row: new for new, row in enumerate(torch.arange(shape[0])[index].tolist())}
    held = [(divmod(place, shape[1]), picked, among) for place, picked, among in choices.listed()]
    found = [(rows[row] * width + column, picked, among) for (row, column), picked, among in held if row in rows]
    return Choices.of(sorted(found, key=lambda choice: choice[0])) if found else None


def _pick_ragged(ragged: tuple[Tensor, Tensor], shape: torch.Size, index: Any, width: int) -> tuple[Tensor, Tensor]:
    import torch

    ids, offsets = ragged
    places = torch.arange(shape[0] * shape[1]).view(shape)[index][:, :width].flatten()
    pieces = [ids[offsets[p] : offsets[p + 1]] for p in places.tolist()]
    lengths = torch.tensor([0, *map(len, pieces)])
    return torch.cat(pieces) if pieces else ids[:0], lengths.cumsum(0)


@dataclass(frozen=True)
class Outputs:
    """One forward pass of a policy over a batch, each [B, T] or None; 0 off actions.

    No vocabulary-sized tensor leaves `policy/`.
    """

    logprobs: Tensor
    raw_logprobs: Tensor
    """Temperature-scaled and untruncated; the same object as `logprobs` where sampling is pure."""
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None
    """Of the scaled logits: the soft value of the state."""
    values: Tensor | None = None
    kl: dict[str, Tensor] | None = None
    """Exact divergences from `against`, by name: `reverse` KL(policy || against), `forward` the other."""


AdvantageFn = Callable[[Batch], Batch]
LossFn = Callable[[Outputs, Batch], dict[str, "Tensor"]]
