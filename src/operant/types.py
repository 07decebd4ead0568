"""The core types of the library: tasks, replies, rollouts, batches, and the protocols of engines and environments.

torch is imported only inside the functions that touch a tensor, so that a worker that judges text does not load it.

Shape letters, the same in every file:
B rows, T tokens of a row, E episodes, A actions of an episode, V vocabulary.
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast, get_args

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_Kind = TypeVar("_Kind")
Failure = Literal["raised", "crashed", "timeout"]
"""How a world failed during an episode: it raised an exception, its process died, or it did not answer in time."""
End = Literal["stop", "length", "world", "cut", "outgrown", "raised", "crashed", "timeout"]
"""Why a reply or an episode ended.

`stop`: a stop token or string; `length`: the task's own length limit; `world`: the environment ended it;
`cut`: a step limit cut the episode off, so its last reward is followed by the value of the next state;
`outgrown`: the next prompt left no room for a reply in the model's context, and the value of that state follows too;
`raised`, `crashed`, `timeout`: the world failed (`Failure`), and the episode is not trained on.
"""

LARGEST_FLOAT = 3.4e38
"""Largest number that an option or a reward may have: that of float32, in which almost everything is computed."""
MAX_TURNS = 1000
"""Number of turns after which an episode is refused as endless."""
OUTCOMES = ("compile error", "runtime error", "failed test", "passed")
"""What may become of a program, from worst to best."""


class OperantError(ValueError):
    """A mistake that the user can correct: the message names the value, the reason and the remedy."""

    def __str__(self) -> str:
        return re.sub(r"(\S{300})\S{500,}", r"\1...", super().__str__())  # a value of thousands of characters


def require(good: object, sentence: str) -> None:
    """Raises: OperantError with the sentence, unless `good`."""
    if not good:
        raise OperantError(sentence)


def is_real(number: object) -> bool:
    """Whether it is a finite number that tensors can hold."""
    return isinstance(number, Real) and abs(number) <= LARGEST_FLOAT


class StoppedError(OperantError):
    """A step gives up because the run shall end, and no more than that is wrong."""


class HeardError(OperantError):
    """An error that another rank has met and says: of all ranks, only one prints it."""


def shown(value: object, most: int = 100) -> str:
    """Format a value for an error message: on one line, and cut after `most` characters."""
    try:
        text = " ".join(repr(value[:most] if isinstance(value, (str, bytes, list, tuple)) else value).split())
        cut = text[most:] or (isinstance(value, (str, bytes, list, tuple)) and value[most:])
    except (ValueError, RecursionError):  # an integer of thousands of digits, or a list that contains itself
        return f"<a very large {type(value).__name__}>"
    return text[:most] + "..." if cut else text


LIBRARIES = (*{sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")}, "<")
"""Beginnings of the files of Python's library and of installed packages."""


def describe_error(error: BaseException) -> str:
    """The type, text and line of an exception: `ValueError: no such word (score.py, line 12)`.

    The line is the last one outside of Python's own library and of installed packages: most likely the user's.
    """
    try:
        if isinstance(error, OperantError):
            return str(error)[:1000]
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)] or frames
        no_place = not frames or (isinstance(error, SyntaxError) and error.lineno)  # its text says where
        place = "" if no_place else f" ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})"
        return f"{type(error).__name__}{': ' if (text := str(error)[:1000]) else ''}{text}{place}"
    except BaseException:
        return f"{type(error).__name__}, which cannot be shown"


@contextmanager
def of_user(before: str, behind: str = "") -> Iterator[None]:
    """Describe what code of the user's raises in this context, between these texts. Raises: OperantError."""
    try:
        yield
    except OperantError:
        raise
    except (Exception, SystemExit) as error:
        raise OperantError(f"{before}{describe_error(error)}{behind}") from error


@contextmanager
def said_of(what: object) -> Iterator[None]:
    """Let errors of this context begin with what they are about. Raises: OperantError."""
    try:
        yield
    except OperantError as error:
        raise OperantError(f"{what}: {error}") from error


def cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def brief(self: Task | Completion | Turn | Batch | Outputs) -> str:
    """The repr of a core type: its fields that are not their defaults, with sizes in place of long contents."""
    named = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
    parts = []
    for name, value in ((name, value) for name, value, default in named if value is not default and value != {}):
        tensor = hasattr(value, "dtype")
        text = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if tensor else shown(value)
        if isinstance(value, (list, tuple, dict)) and len(text) > 100:
            text = f"<{type(value).__name__} of {len(value)}>"
        parts.append(f"{name}={text}")
    return f"{type(self).__name__}({', '.join(parts)})"


Message = dict[str, str]
"""A message of a chat: `{"role": "user", "content": "..."}`."""
Reply = str | list[int] | list[Message]
"""A reply of a data set: text, token ids, or chat messages."""


@dataclass(frozen=True)
class Task:
    """One thing to attempt: `Task("imdb/17", "The film was", target=1)`."""

    id: str
    """Its name in the run. Attempts with the same id form a group."""
    prompt: str | list[dict[str, str]] | list[int]
    """Text, chat messages, or token ids. Token ids are used unchanged."""
    target: Any = None
    """Anything that a reward function needs to judge the attempt, such as the right answer."""
    replies: tuple[Any, ...] = ()
    """Replies from a data set, for methods that learn from them: each a text, token ids, or chat messages."""
    scores: tuple[float, ...] = ()
    """What a labeller gave each of `replies`: a higher number is better, and equal ones are a tie. Empty: no labels."""
    references: tuple[str, ...] = ()
    """Good replies that rewards and metrics compare with, such as translations."""


@dataclass(frozen=True)
class Completion:
    """One generated reply: `Completion([40, 12, 0], [-1.2, -0.3, -2.0], None, "stop", 3)`."""

    action: list[int]
    """The token ids of the reply, with its stop token."""
    logprobs: list[float]
    """[len(action)] log-probability of each token as it was sampled; a choice among options has one, its own."""
    values: list[float] | None
    """[len(action)] the critic's value of the state before each token. None if decoding does not compute it."""
    end: End
    """Why the reply ended."""
    version: int
    """Version number of the weights that generated the reply."""
    allowed: Sequence[Sequence[int]] | None = None
    """The token ids that could be drawn at each position. Only truncated sampling sets it."""
    states: Tensor | None = None
    """[len(prompt) + len(action) - 1, D] cached hidden states of the frozen trunk. Only `models/` reads them."""
    probabilities: list[float] | None = None
    """Of a choice: the probability of each option, equal ones have one together; None if the engine tells none."""


@dataclass(frozen=True)
class Turn:
    """One reply and exactly what the policy saw before it."""

    prompt: list[int]
    """The token ids that the policy read."""
    action: list[int]
    """The token ids of the reply, with its stop token."""
    logprobs: list[float] | None = None
    """One per action. None if the reply was not sampled by this library: a forward pass then computes them."""
    values: list[float] | None = None
    """One per action: the critic's value of the state before it. None: a forward pass computes them."""
    end: End = "stop"
    """Why the reply ended."""
    version: int = 0
    """Version number of the weights that generated the reply."""
    allowed: Sequence[Sequence[int]] | None = None
    """As in `Completion`."""
    states: Tensor | None = None
    """[len(prompt) + len(action) - 1, D] as in `Completion`."""
    reward: float = 0.0
    """The environment's reward, paid on the last token of the reply."""
    next_value: float = 0.0
    """Value of the state that follows a cut episode; 0 if the episode ended."""
    options: list[list[int]] | None = None
    """Token ids of the replies to choose among. None if the reply was generated freely. A choice is one action."""
    chosen: int | None = None
    """Index of the chosen reply in `options`."""
    trained: bool = True
    """False: the reply was played and later turns see it, but it is no action of the policy (`Step.trained`)."""
    unconditioned: list[int] | None = None
    """The world's own prompt, if the policy read it with the return that it was asked for; None: `prompt` is that."""
    key: str = ""
    """`Step.key` of the state that the reply was given in."""
    probabilities: list[float] | None = None
    """As in `Completion`."""
    parent: int | None = None
    """The number of the turn that it goes on from, -1 for none; None: the one before it. See `Step.at`."""

    @property
    def count(self) -> int:
        """Number of actions: one per token of a generated reply, one for a choice; none if it is not trained on."""
        return (len(self.action) if self.options is None else 1) if self.trained else 0


@dataclass(frozen=True)
class Rollout:
    """One attempt at one task: an episode."""

    task: Task
    """What was attempted."""
    group: int
    """Number of the group: all attempts at the same task in one step share it."""
    turns: list[Turn]
    """The replies in order, each with what the policy saw before it."""
    texts: list[str]
    """The replies as text, cut before a stop string, without the stop token."""
    end: End = "stop"
    """Why the episode ended."""
    info: dict[str, Any] = field(default_factory=dict)
    """Anything that the environment reported about the episode. With `unanswered`, its `reply` is empty."""
    query: str = ""
    """The first prompt as text."""
    following: list[int] | None = None
    """Of a cut or outgrown episode: the prompt that would come next, as far as it fits. Its value is the bootstrap."""
    place: int | None = None
    """Index of this rollout among all rollouts of its step, over all ranks; None if unknown."""
    sampling: Any = None
    """The `Sampling` that its replies were drawn with; None if they were generated elsewhere."""
    demonstrated: bool = False
    """Whether it is a demonstration: its replies were not generated by the policy, and are not judged."""

    def __repr__(self) -> str:
        texts = f"{shown(self.query)} -> {shown(self.reply)}"
        return f"Rollout({texts}, turns={len(self.turns)}, actions={self.count}, end={self.end!r}, group={self.group})"

    @property
    def parents(self) -> list[int] | None:
        """The number of the turn that each turn goes on from, -1 where it opens the episode; None without branches."""
        if all(turn.parent is None for turn in self.turns):
            return None
        return [number - 1 if turn.parent is None else turn.parent for number, turn in enumerate(self.turns)]

    @property
    def failed(self) -> bool:
        """Whether the world failed: the episode is not judged and not trained on, and may have no turns."""
        return self.end in get_args(Failure)

    @property
    def count(self) -> int:
        """Number of actions in all turns."""
        return sum(turn.count for turn in self.turns)

    @property
    def reply(self) -> str:
        """The last reply; empty if there is none, or it called a tool whose result nothing has answered."""
        return self.texts[-1] if self.texts and not self.info.get("unanswered") else ""

    @property
    def text(self) -> str:
        """The query and all replies as one text."""
        return self.query + "".join(self.texts)

    @property
    def paid(self) -> float:
        """Sum of the environment's rewards over all turns, also of those that are not trained on."""
        return sum(turn.reward for turn in self.turns)

    @property
    def ids(self) -> list[int]:
        """The token ids of the last reply; empty if there is none."""
        return self.turns[-1].action if self.turns else []

    @property
    def messages(self) -> list[dict[str, str]]:
        """The attempt as chat messages."""
        asked = [message for message in self.task.prompt if isinstance(message, dict)]
        start = asked or [{"role": "user", "content": self.query}]
        return start + [{"role": "assistant", "content": text} for text in self.texts]


@dataclass(frozen=True)
class Step:
    """An environment's answer to one reply."""

    text: str = ""
    """The text that the policy reads next."""
    fresh: bool = False
    """False: `text` is appended after the reply, whose token ids do not change. True: `text` is a whole new prompt that
    replaces the conversation so far, and opens a new row of the same episode."""
    reward: float = 0.0
    """Reward of the reply."""
    terminated: bool = False
    """Whether the episode has ended."""
    truncated: bool = False
    """Whether a step limit cuts the episode off here; the value of the next state then follows."""
    info: dict[str, Any] = field(default_factory=dict)
    """Anything to report; it is merged into `Rollout.info`."""
    options: list[str] | None = None
    """Replies to choose among; None: the policy generates its reply freely."""
    trained: bool = True
    """False: the reply was played and later turns see it, but it is not trained on: it has no gradient and no KL. It
    counts as a turn, and its reward is paid on the last trained reply before it, discounted between turns."""
    key: str = ""
    """The state that is replied to next, equal in all attempts at a task that are in it, for methods that compare."""
    examples: Sequence[tuple[str, float]] = ()
    """Turns that the world itself has played after this reply, before the policy is asked again: the text of each, such
    as an expert's command, and its reward. They are turns like those that are not trained on, and no reply is generated
    for them. `text` has to tell the policy what happened in them."""
    at: int | None = None
    """The number of the turn that the episode goes on from; None: the last. `text` is appended after its reply; with
    `fresh` and no text the policy replies to the prompt of that turn once more. Turns that go on from the same one are
    branches (`rollouts/branches.py`)."""
    paid: Mapping[int, float] = field(default_factory=dict)
    """Rewards of earlier replies, by the numbers of their turns."""
    failed: Failure | None = None
    """How the world failed in this episode, which ends here and is not trained on; None: it has not. `info["failure"]`
    may hold a sentence for the log."""


class Env(Protocol):
    """An environment that plays many episodes side by side. A slot is an integer that identifies one episode.

    An episode may also end because the next prompt leaves no room in the model's context, so `step` may be called with
    any part of the live slots, and `reset` with slots that were used before. An exception ends the run, which can be
    resumed (`Step.failed` ends one episode). `operant.check_env` plays a world and checks all this.

    What a world may have beside these two methods is declared in `EnvBase`.
    """

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]:
        """Begin an episode in each slot, and return the first `Step` of each: its text is the first prompt.

        An empty text stands for the task's own prompt. Of a first step, `text`, `options`, `examples`, `key` and `info`
        are read.
        """
        ...

    def step(self, replies: Mapping[int, str]) -> dict[int, Step]:
        """Answer the reply in each slot with a `Step`, for these slots and no others.

        The slots are those of the episodes that have not ended.
        """
        ...


class EnvBase:
    """The optional parts of an `Env`, with the values of a world that lacks them; it need not be a subclass."""

    pays: bool = True
    """Whether it pays rewards; if not, the run needs a reward function."""
    most: int | None = None
    """The largest number of episodes that it plays at the same time; None: no limit."""
    turns: int | None = None
    """1 if every episode has one turn, so that an engine keeps nothing for a next one; None: unknown."""
    waves: int = 1
    """Parts of the live episodes: `step` is called for one, in a thread, while the next generates."""
    branches: bool = False
    """Whether its episodes may go on from other turns than the last (`Step.at`)."""
    judges: Sequence[RewardFn] = ()
    """Rewards that the world calls. They read the tasks of the run before it, as the run's own does."""
    suite: str | None = None
    """The option whose value may follow its name in a table: with `game`, `env=NAME:VALUE` is `env.game=VALUE` too."""
    games: Callable[[Literal["train", "test"]], list[Task]] | None = None
    """Returns its own tasks, for a run that names none."""
    measure: Callable[[Callable[[str], int], int | None], None] | None = None
    """Called once by the learner, with a function from a text to its number of tokens and the most tokens of a prompt
    (None: no limit), for a world that shortens its prompts."""
    on_turns: Callable[[Mapping[int, Turn]], None] | None = None
    """Called before `step` with the turn of each reply: its token ids, their log-probs, and how it ended."""
    on_leave: Callable[[Sequence[int]], None] | None = None
    """Called with slots whose episodes go no further: one has outgrown the context, or all of a step have ended."""
    under: Callable[[Any], Env] | None = None
    """Returns the world with the `isolation` options of a run."""
    for_evaluation: Callable[[], Env] | None = None
    """Returns the world in which a policy is measured, if that is another one."""
    check: Callable[[], None] | None = None
    """Called before models load; it raises `OperantError` for what is missing."""
    state_dict: Callable[[], dict[str, Any]] | None = None
    """Returns a state that checkpoints keep from step to step."""
    load_state_dict: Callable[[Any], None] | None = None
    """Restores what `state_dict` has returned."""


def as_list(returned: object) -> list[object] | None:
    """A reward's return value as a list with one entry per rollout; None if it is not a collection."""
    single = isinstance(returned, (str, bytes, Mapping)) or getattr(returned, "ndim", 1) == 0
    return list(returned) if isinstance(returned, Iterable) and not single else None


def name_of(thing: object) -> str:
    """The name of a reward or world in metrics and messages."""
    return getattr(thing, "__name__", None) or type(thing).__name__


def with_defaults(thing: object, kind: type[_Kind]) -> _Kind:
    """`thing`, which may lack some attributes of `kind`: these have the values that they have there."""
    return thing if isinstance(thing, kind) else cast(_Kind, _Completed(thing, kind()))


class _Completed:
    def __init__(self, thing: object, defaults: object):
        vars(self).update(thing=thing, defaults=defaults)

    def __getattr__(self, name: str) -> object:
        default = getattr(vars(self)["defaults"], name)
        found = getattr(vars(self)["thing"], name, default)
        return default if callable(default) and not callable(found) else found  # the user's name for something else

    def __setattr__(self, name: str, value: object) -> None:
        setattr(vars(self)["thing"], name, value)


class Tokenizer(Protocol):
    """What is used of a tokenizer of transformers, also of one that a model brings."""

    bos_token_id: int | None
    """The token that begins a text."""
    eos_token_id: int | None
    """The token that ends a text."""
    pad_token_id: int | None
    """The token that fills short rows."""
    pad_token: str | None
    """Its text."""
    mask_token: str | None
    """The text of the token that stands for a word to be found."""
    all_special_ids: Sequence[int]
    """The ids that stand for no text."""
    chat_template: str | None
    """How messages are written."""
    model_max_length: int
    """Most tokens of a text."""
    save_pretrained: Callable[[str | os.PathLike[str]], object]
    """Writes its files into a folder."""

    def __call__(self, text: object, **options: object) -> Any:
        """Encode one text or several, with the options of transformers."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ...

    def batch_decode(self, rows: Sequence[Sequence[int]], **options: object) -> list[str]:
        """Return the text of each row of token ids."""
        ...

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the tokenizer's own name of each id."""
        ...

    def apply_chat_template(self, messages: object, **options: object) -> Any:
        """Return messages as a text, or as token ids."""
        ...


class Engine(Protocol):
    """Generates a completion for each of N prompts.

    `prompts`: N lists of token ids. `sampling`: an `operant.Sampling`. `keys`: [N] a random-number key per prompt, from
    `sampling.task_key`. A completion depends on its prompt and key, and not on the other prompts of the call.
    """

    def generate(self, prompts: Sequence[list[int]], sampling: Any, keys: Sequence[int]) -> list[Completion]:
        """Return one completion for each prompt, in the order of the prompts."""
        ...

    def choose(
        self, prompts: Sequence[list[int]], options: Sequence[list[list[int]]], sampling: Any, keys: Sequence[int]
    ) -> list[tuple[int, Completion]]:
        """Draw one of its `options` (token ids) for each prompt, as `operant.Sampling.choice` says.

        Returns for each prompt the index of the option, and a completion with its ids and a single log-prob [1].
        """
        ...

    def sync(self, policy: Any, version: int) -> None:
        """Use the weights of `policy` from now on: called after each update. Later completions have this `version`."""
        ...


@dataclass(frozen=True)
class EngineParts:
    """What an engine may have besides, found by `EngineParts.of(engine)`; what it lacks has the value that stands here.

    A class of engines has the same parts, as far as they do not need an engine.
    """

    own_weights: bool = False
    """Whether its weights change by `sync` alone, so that it may generate while the policy trains."""
    own_numbers: bool = False
    """Whether another program computes its log-probs, so that they are computed again here."""
    follows: bool = True
    """Whether `sync` gives it the weights of the policy."""
    check_options: Callable[[Mapping[str, Any]], None] | None = None
    """Refuses options before any model is loaded."""
    mask_with: Callable[[Any], None] | None = None
    """Lets the truncated distribution of another policy decide which tokens may be drawn."""
    remembering: Callable[[], AbstractContextManager[Any]] = nullcontext
    """A context in which it may keep what it has computed from turn to turn."""
    generate_more: Callable[..., list[Completion]] | None = None
    """Continues replies that have begun."""
    stream: Callable[[list[int], Any, int], Iterable[int]] | None = None
    """Yields the tokens of one reply (prompt, sampling, key) as they are drawn."""
    close: Callable[[], None] | None = None
    """Ends what it has started."""

    @classmethod
    def of(cls, engine: object) -> EngineParts:
        """The parts that an engine, or a class of engines, has."""
        return cls(**{part.name: getattr(engine, part.name) for part in fields(cls) if hasattr(engine, part.name)})


class TrainablePolicy(Protocol):
    """What a policy has to have. `Policy` wraps any transformers model; `models.base.PolicyBase` has the defaults."""

    tokenizer: Any
    """None if prompts are token ids."""
    vocabulary: int
    """Number of token ids."""
    context: int | None
    """Most tokens of a prompt with its reply; None: no limit."""
    stop_tokens: tuple[int, ...]
    """The ids that end a reply."""
    device: Any
    """The torch device of the weights."""
    version: int
    """The training step that made the weights."""
    has_values: bool
    """Whether there is a critic."""

    def forward(self, batch: Batch, sampling: Any, **kwargs: Any) -> Outputs:
        """Compute log-probs and entropy, with a critic also values, at every action of the batch: each [B, T]."""
        ...

    def values(self, batch: Batch) -> Tensor | None:
        """[B, T] the value of the state before each action; None without a critic."""
        ...

    def trainable(self) -> list[torch.nn.Parameter]:
        """The parameters that an optimizer changes."""
        ...

    def misfit(self, prompt: int, reply: int) -> str | None:
        """Why a prompt and reply of these lengths, in tokens, do not fit; None if they do."""
        ...

    def state_dict(self) -> dict[str, object]:
        """The weights by name."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> object:
        """Set the weights."""
        ...


@dataclass(frozen=True)
class Choices:
    """The C choices among options in a batch, in row order; together they have O options and N tokens."""

    places: Tensor
    """[C] int: row * T + column of the action, which is the first token of the chosen option."""
    picked: Tensor
    """[C] int: index of the chosen option."""
    counts: Tensor
    """[C] int: number of options."""
    lengths: Tensor
    """[O] int: number of tokens of each option."""
    ids: Tensor
    """[N] int: the tokens of all options, one after the other."""

    @staticmethod
    def of(found: Sequence[tuple[int, int, list[list[int]]]]) -> Choices:
        """Make it from a list of (place, picked, options), one for each choice."""
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
        """The list that `of` was made from: (place, picked, options) of each choice."""
        options = [part.tolist() for part in self.ids.split(self.lengths.tolist())]
        ends = self.counts.cumsum(0).tolist()
        among = [options[end - n : end] for end, n in zip(ends, self.counts.tolist(), strict=True)]
        return list(zip(self.places.tolist(), self.picked.tolist(), among, strict=True))

    def of_rows(self, index: Tensor | slice, shape: torch.Size, width: int) -> Choices | None:
        """The choices in some rows of a batch of `shape` [B, T], cut to `width` columns; None if there are none."""
        import torch

        rows = {row: new for new, row in enumerate(torch.arange(shape[0])[index].tolist())}
        choices = [(divmod(place, shape[1]), picked, among) for place, picked, among in self.listed()]
        found = [(rows[row] * width + column, picked, among) for (row, column), picked, among in choices if row in rows]
        return Choices.of(sorted(found, key=lambda choice: choice[0])) if found else None


@dataclass(frozen=True)
class Judgement:
    """What a reward may return in place of a score: `Judgement(-0.6, {"passed": 3.0}, "runtime error", "IndexError")`.

    A subclass may add methods, but no fields.
    """

    score: float | Sequence[float] | None
    """The score: a float, one float per action token [A], or None if the reward abstains."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log by name. They are not added to the score, as the named floats of a mapping are."""
    outcome: str = ""
    """The class of the outcome, such as "passed": a short text, one of a small set. Empty: none."""
    message: str = ""
    """Why: an error, a rationale. It is shown with the reply, and cut after `rewards.evaluate.LONGEST` characters."""


Score = float | Mapping[str, float] | Sequence[float] | Judgement | None
"""A float, named floats (their sum is the score), one float per action token, a `Judgement`, or None: it abstains."""
RewardFn = Callable[[list[Rollout]], Sequence[Score]]
"""Judges rollouts: returns one score for each, in their order. Any callable will do.

A reward may also have these attributes, all of them optional; `operant.rewards.RewardBase` has their defaults:

- `__name__`: its name in metrics and messages; without it, the name of its class.
- `check()`: loads what the reward needs, such as a model. It is called before training, so that a mistake shows early,
  and raises `OperantError`.
- `judged(rollouts)`: returns an `operant.rewards.Judged` (scores, named parts, outcomes, notes), and is called instead
  of the reward itself. It checks its answers, or calls `operant.rewards.judge` on the rewards that it is made of.
- `needs_references`: whether it compares with the references of tasks; `check_task(task)`: raises `OperantError` for a
  task that it cannot judge; `read_tasks(tasks)`: gets all tasks of the training, once before it.
- `wants_greedy = True` and `see_greedy(rollouts)`, which a run calls first, with the greedy reply to each prompt.
- `state_dict()` and `load_state_dict(state)`: a state that training changes. It is saved with each checkpoint, restored
  on resume, and taken back if a step fails. A `torch.nn.Module` counts as constant.
"""
Total = float | list[float] | None
"""A score as a reward returns it: a number, one number per action token, or None if the reward abstained."""


def totals(scores: Sequence[Total], rollouts: Sequence[Rollout]) -> list[float | None]:
    """One number per rollout: its score (summed over tokens) plus the environment's pay; None if it abstained."""
    summed = [sum(score) if isinstance(score, list) else score for score in scores]
    return [None if score is None else score + r.paid for score, r in zip(summed, rollouts, strict=True)]


@dataclass(frozen=True)
class Batch:
    """Rows of tokens and, at each token, everything known about it.

    Every [B, T] field describes the token at the same position: `logprobs[b, t]` is the log-probability of
    `tokens[b, t]` given `tokens[b, :t]`, `values[b, t]` the value of the state before that token. Only `models/` shifts
    by one. The rows of an episode are in order of time.
    """

    tokens: Tensor
    """[B, T] int: token ids, 0 at padding."""
    mask: Tensor
    """[B, T] bool: True at real tokens. It is made from lengths, never from token ids."""
    actions: Tensor
    """[B, T] bool: True at tokens that the policy chose."""
    rewards: Tensor
    """[B, T] reward paid at each action; 0 elsewhere."""
    turns: Tensor
    """[B, T] int: index of the turn within its episode; -1 off actions."""
    episodes: Tensor
    """[B] int: number of the row's episode, 0..E-1."""
    groups: Tensor
    """[B] int: number of the row's group."""
    bootstrap: Tensor
    """[E] value of the state that follows the last action; 0 if the episode ended."""
    logprobs: Tensor | None = None
    """[B, T] log-probability under the distribution that was sampled from; 0 off actions."""
    raw_logprobs: Tensor | None = None
    """[B, T] as `logprobs`, but before any truncation. KL is measured with these."""
    ref_logprobs: Tensor | None = None
    """[B, T] log-probability under the reference, untruncated."""
    kl: Tensor | None = None
    """[B, T] the KL term that is charged in the reward, before its coefficient."""
    price: Tensor | None = None
    """[B, T] cost of one nat of that term in units of the advantages, if the update adds the term's own gradient."""
    values: Tensor | None = None
    """[B, T] the critic's value of the state before each token."""
    advantages: Tensor | None = None
    """[B, T] how much better than expected each action was."""
    returns: Tensor | None = None
    """[B, T] the target of the critic."""
    weights: Tensor | None = None
    """[B, T] weight of each action in the loss; they sum to 1 over an optimizer step, all ranks together, before the
    importance weights are multiplied in."""
    staleness: Tensor | None = None
    """[B, T] int: versions between the weights that generated each action and the policy; None if all are current."""
    importance: Tensor | None = None
    """[B, T] importance weight of each action; None: there are none."""
    allowed: tuple[Tensor, Tensor] | None = None
    """The token ids that could be drawn at each position, as a ragged array: ids [N] and offsets [B * T + 1]."""
    states: Tensor | None = None
    """[B, T, D] cached hidden states of the frozen trunk at every token. Only `models/` reads them."""
    choices: Choices | None = None
    """The actions that are choices among options; None if there are none."""
    skipped: Tensor | None = None
    """[B, T] int: at the last action of a turn, how many turns come after it, before the next action, that are not
    trained on; 0 elsewhere. None: every turn is trained on."""
    anchors: Tensor | None = None
    """[B, T] int: number of the state that each action's turn began in, equal for equal keys in a group; -1 off
    actions. None for methods that do not compare turns."""
    demonstrated: Tensor | None = None
    """[B] bool: True at rows of demonstrations, in a step that also has replies of the policy; None in others."""
    unscored: Tensor | None = None
    """[B, T] bool: the actions whose log-probs scoring has to compute, if the sampler's are known of others only."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """[B, T] each, or [B]: what the method's hook `look` has added, by name."""
    hinted: Batch | None = None
    """The same rows as a teacher reads them: other prompts, and the same actions in the same order."""
    longest: int = 0
    """Columns of the batch that these rows were taken from. Kernels are chosen by it, so that cutting a batch into
    micro-batches does not change which one runs."""

    @staticmethod
    def given(prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]]) -> Batch:
        """Make a batch of known prompts and replies, one row and episode each, with the fields that scoring needs."""
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
        """Make a batch with one choice after each prompt, to score all options. The first option counts as chosen."""
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
        """Number of tokens that a forward pass computes for each row: its own, and those of its options."""
        own = self.mask.sum(1).tolist()
        for place, _, among in self.choices.listed() if self.choices is not None else ():
            own[place // self.tokens.shape[1]] += sum(map(len, among))
        return own if self.hinted is None else list(map(max, own, self.hinted.sizes()))

    def with_(self, **updates: object) -> Batch:
        """A copy of the batch with some fields replaced."""
        return replace(self, **updates)

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device. `allowed` and `choices` stay on the CPU, because they are read piece by piece."""
        import torch

        if self.tokens.device == torch.device(device):
            return self
        moved: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        moved["extra"] = {name: x.to(device) for name, x in self.extra.items()}
        return replace(self, **moved, hinted=None if self.hinted is None else self.hinted.to(device))

    def rows(self, index: Tensor | slice) -> Batch:
        """Some rows of the batch, cut to the longest of them. Episodes keep their numbers; `bootstrap` stays whole."""
        import torch

        index = index.cpu() if isinstance(index, torch.Tensor) else index  # as the rows that are counted below
        width = int(self.mask[index].any(0).nonzero().max()) + 1 if len(self.mask[index]) else 0
        picked: dict[str, Any] = {"longest": max(self.longest, self.tokens.shape[1])}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, torch.Tensor) and f.name != "bootstrap":
                picked[f.name] = value[index][:, :width] if value.ndim > 1 else value[index]
        picked["extra"] = {name: x[index][:, :width] if x.ndim > 1 else x[index] for name, x in self.extra.items()}
        picked["hinted"] = None if self.hinted is None else self.hinted.rows(index)
        if self.allowed is not None:
            ids, offsets = self.allowed
            places = torch.arange(self.tokens.numel()).view(self.tokens.shape)[index][:, :width].flatten()
            pieces = [ids[offsets[place] : offsets[place + 1]] for place in places.tolist()]
            lengths = torch.tensor([0, *map(len, pieces)])
            picked["allowed"] = torch.cat(pieces) if pieces else ids[:0], lengths.cumsum(0)
        if self.choices is not None:
            picked["choices"] = self.choices.of_rows(index, self.tokens.shape, width)
        return replace(self, **picked)


@dataclass(frozen=True, eq=False)
class Divided:
    """This rank's rows of a tensor of the sizes `shape`, of which each rank has some (`distributed.bounds`)."""

    rows: Tensor
    """Those of this rank, [R, ...]."""
    shape: tuple[int, ...]
    """The sizes of the whole tensor."""


@dataclass(frozen=True)
class Outputs:
    """The results of one forward pass of a policy over a batch: each [B, T], 0 off actions, or None.

    No tensor with a vocabulary axis leaves `models/`.
    """

    logprobs: Tensor
    """Log-probability of each action under the distribution that was sampled from."""
    raw_logprobs: Tensor
    """The same with temperature but without truncation; the same tensor as `logprobs` if nothing is truncated."""
    entropy: Tensor | None = None
    """Entropy of the untruncated distribution before each action."""
    logsumexp: Tensor | None = None
    """Logsumexp of the scaled logits: the soft value of the state."""
    values: Tensor | None = None
    """The critic's value of the state before each action."""
    q: dict[str, Tensor] | None = None
    """Of a policy with Q values: `one` and `two`, both estimates of the value of each action, and `one_nll` and
    `two_nll`, the negative log-prob of the action under softmax(Q)."""
    outcomes: Tensor | None = None
    """[B, T, C] of an outcome critic: the logit of each outcome for what of the reply stands before each action."""
    kl: dict[str, Tensor] | None = None
    """Exact divergences from another policy q: `reverse` is KL(policy || q), `forward` is KL(q || policy)."""


for _kind in (Task, Completion, Turn, Batch, Outputs):
    _kind.__repr__ = brief

AdvantageFn = Callable[[Batch], Batch]
"""Fills in `advantages` (and `returns`)."""
LossFn = Callable[[Outputs, Batch], dict[str, "torch.Tensor"]]
"""Returns named [B, T] tensors: `loss`, and metrics."""
