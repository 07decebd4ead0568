"""Plays tasks in an environment, with replies from an engine, and returns the rollouts.

Token ids are never made twice: a prompt is encoded once, a reply keeps the ids that were generated, and text that the
environment appends is encoded by itself and put after the reply's ids.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

from operant.rollouts import answers
from operant.sampling import Sampling, encode_more, encode_prompt, reply_text, task_key
from operant.types import (
    MAX_TURNS,
    Completion,
    End,
    Engine,
    EngineParts,
    Env,
    EnvBase,
    OperantError,
    Rollout,
    Step,
    Task,
    Tokenizer,
    Turn,
    name_of,
    of_user,
    with_defaults,
)

Fits = Callable[[int, int], bool]
"""Whether a prompt and a reply of these numbers of tokens fit into the model's context."""
Opening = Callable[[Task, int, list[int], Sequence[Turn]], list[int]]
"""From a task, the number of the attempt among all of the step, a whole prompt of the world and the turns before it to
the prompt that the policy reads."""


class Attempts:
    """Counts the attempts of a step. Attempts at the same task share a group, and have different random numbers."""

    def __init__(self) -> None:
        self.count = 0
        self.first = 0
        """Number of the first attempt at each task. Ranks that count separately begin with numbers far apart."""
        self._samples: Counter[str] = Counter()
        self._groups: dict[str, int] = {}

    def next(self, task: Task) -> tuple[int, int, int]:
        """(place, group, sample) of one more attempt at `task`."""
        group = self._groups.setdefault(task.id, len(self._groups))
        place, sample = self.count, self.first + self._samples[task.id]
        self.count += 1
        self._samples[task.id] += 1
        return place, group, sample

    def state_dict(self) -> dict[str, object]:
        return {"count": self.count, "samples": dict(self._samples), "groups": self._groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self._samples, self._groups = state["count"], Counter(state["samples"]), dict(state["groups"])


class Episode:
    """One attempt in progress."""

    def __init__(
        self,
        task: Task,
        place: int,
        group: int,
        sample: int,
        sampling: Sampling,
        tokenizer: Tokenizer | None,
        opening: Opening | None = None,
    ):
        self.task, self.place, self.group, self.sample = task, place, group, sample
        self.sampling, self.tokenizer, self.opening = sampling, tokenizer, opening
        self.prompt: list[int] = []
        self.own: list[int] | None = None
        """The world's own prompt, if `opening` has made another one of it."""
        self.options: list[tuple[str, list[int]]] | None = None
        """Text and ids of each reply to choose among."""
        self.turns: list[Turn] = []
        self.texts: list[str] = []
        self.info: dict[str, Any] = {}
        self.query = self.key = ""
        self.parent: int | None = None
        """`Turn.parent` of the next turn."""

    @cached_property
    def task_as_text(self) -> Task:
        """The task for the world: with its prompt as text, where that was encoded when the tasks were loaded."""
        ids = self.task.prompt
        if self.tokenizer is None or not ids or not all(isinstance(token, int) for token in ids):
            return self.task
        return replace(self.task, prompt=self.tokenizer.decode(ids, skip_special_tokens=True))

    def start(self, first: Step, fits: Fits = lambda prompt, reply: True) -> Rollout | None:
        """Begin with the environment's first step. Returns the rollout if the world failed, otherwise None.

        Raises: OperantError for a text of the world that leaves no room for a reply.
        """
        self.info |= first.info
        self.key = first.key
        if first.failed is not None:
            return self._ended(first.failed)
        self._add_examples(first)
        own = first.text if first.text and first.text != self.task_as_text.prompt else self.task.prompt  # ids are kept
        self.prompt = self._opened(encode_prompt(self.tokenizer, own))
        self.options = self._encoded(first)
        self.query = self.tokenizer.decode(self.prompt, skip_special_tokens=True) if self.tokenizer else ""
        if first.text and not fits(len(self.prompt), longest := self._longest(self.options)):
            what = f"the first prompt of task {self.task.id!r} has {len(self.prompt)} tokens"
            how = "let the world show less, or lower sampling.max_tokens"
            raise OperantError(f"{what}, and with {longest} of the reply does not fit into the model's context: {how}")
        return None

    def take(self, completion: Completion, text: str, chosen: int | None, options: list[list[int]] | None) -> None:
        """Append a reply. `options`: the ids of all options if it was a choice, and `chosen` its index."""
        c, more = completion, {"allowed": completion.allowed, "states": completion.states}
        if options is not None:
            more = {"options": options, "chosen": chosen, "probabilities": c.probabilities}
        more |= {"unconditioned": self.own, "parent": self.parent}
        self.turns.append(Turn(self.prompt, c.action, c.logprobs, c.values, c.end, c.version, **more))
        self.texts.append(text)

    def answer(self, step: Step, fits: Fits) -> Rollout | None:
        """Apply the environment's answer to the last reply. Returns the rollout if the episode ends, otherwise None."""
        paid = {"reward": float(step.reward), "trained": bool(step.trained), "key": self.key}
        self.turns[-1] = last = replace(self.turns[-1], **paid)
        if missing := [number for number in (*step.paid, step.at or 0) if not 0 <= number < len(self.turns)]:
            raise OperantError(f"task {self.task.id!r}: a step names turn {missing[0]} of {len(self.turns)}")
        if step.at is not None and not self.turns[step.at].action:
            raise OperantError(f"task {self.task.id!r}: a step goes on from turn {step.at}, which is an example")
        for number, reward in step.paid.items():
            self.turns[number] = replace(self.turns[number], reward=self.turns[number].reward + float(reward))
        self.info, self.key = {**self.info, **step.info}, step.key
        if step.failed is not None:
            return self._ended(step.failed)
        first_reply = len(self.turns) == 1
        self._add_examples(step)
        done = step.terminated and not step.truncated
        self.own, self.parent, before = None, step.at, last if step.at is None else self.turns[step.at]
        following = self._opened(encode_prompt(self.tokenizer, step.text)) if step.fresh and step.text else None
        if step.at is not None and step.fresh and not step.text:
            following, self.own = before.prompt, before.unconditioned
            self.parent = step.at - 1 if before.parent is None else before.parent
        if following is None and not done:
            more = before.action + encode_more(self.tokenizer, step.text)
            following = before.prompt + more
            self.own = None if before.unconditioned is None else before.unconditioned + more
        if not (step.terminated or step.truncated):
            assert following is not None  # the episode goes on, so the line above has set it
            if step.fresh and not step.text and step.at is None:
                raise OperantError(f"task {self.task.id!r}: a step with fresh=True has no text to reply to")
            options = self._encoded(step)
            if not fits(len(following), self._longest(options)):
                while not fits(len(following), 1):  # the critic reads what fits, and predicts after it
                    following.pop()
                return self._ended("outgrown", following)
            self.prompt, self.options = following, options
            return None
        end: End = "cut" if step.truncated else last.end if first_reply and not step.examples else "world"
        while end == "cut" and following and not fits(len(following), 0):  # the critic reads what fits
            following.pop()
        return self._ended(end, following if end == "cut" else None)

    def _opened(self, prompt: list[int]) -> list[int]:
        if self.opening is None:
            return prompt
        self.own = prompt
        path, at = list[Turn](), len(self.turns) - 1 if self.parent is None else self.parent
        while at >= 0:  # what other branches have earned is no part of this one
            path.append(turn := self.turns[at])
            at = at - 1 if turn.parent is None else turn.parent
        return self.opening(self.task, self.place, prompt, path[::-1])

    def _add_examples(self, step: Step) -> None:
        """Append the turns that the world has played by itself, which have neither prompt nor action."""
        self.turns += [Turn([], [], reward=float(reward), trained=False) for _, reward in step.examples]
        self.texts += [text for text, _ in step.examples]

    def _encoded(self, step: Step) -> list[tuple[str, list[int]]] | None:
        return None if step.options is None else [(text, encode_more(self.tokenizer, text)) for text in step.options]

    def _longest(self, options: list[tuple[str, list[int]]] | None) -> int:
        """The most tokens of the next reply."""
        ends = int(bool(self.sampling.stops))
        return max(len(ids) + ends for _, ids in options) if options else self.sampling.max_tokens

    def _ended(self, end: End, following: list[int] | None = None) -> Rollout:
        known = (self.info, self.query, following, self.place, self.sampling)
        return Rollout(self.task, self.group, self.turns, self.texts, end, *known)


def play(
    tasks: Sequence[Task],
    *,
    env: Env,
    engine: Engine,
    tokenizer: Tokenizer | None,
    sampling: Sampling,
    seed: int = 0,
    stream: str = "train",
    step: int = 0,
    attempts: Attempts | None = None,
    part: Sequence[int] | None = None,
    max_turns: int = MAX_TURNS,
    fits: Fits = lambda prompt, reply: True,
    opening: Opening | None = None,
) -> list[Rollout]:
    """Play one episode for each task and return the rollouts, in order. All live episodes generate in one batch, or
    `env.most` of them at a time. With `env.waves` above 1 they are cut into as many waves: while the world steps one in
    a thread, the next generates. Tokens are the same; log-probs may differ in their last bits, as batches are smaller.

    A task that appears twice has two attempts in one group, with different random numbers. `attempts` counts earlier
    attempts of the same step. `part`: indices of the tasks to play, with the same results as if all were played; None:
    all of them. `fits`: an episode whose next prompt leaves no room for a reply ends there; by default all fit.
    `opening`: changes the prompts that open an episode or a conversation; they are kept in `Turn.unconditioned`.
    An episode in which the world failed (`Step.failed`) is returned as far as it went, maybe without a turn.
    Raises: OperantError for an exception in the environment or an answer that is not allowed, such as one for other
    slots than it was asked about, and for an episode of more than `max_turns` turns.
    """
    attempts = attempts or Attempts()
    numbered = [(task, *attempts.next(task)) for task in tasks]
    episodes = {slot: Episode(*numbers, sampling, tokenizer, opening) for slot, numbers in enumerate(numbered)}
    episodes = episodes if part is None else {slot: episodes[slot] for slot in part}
    ended: dict[int, Rollout | None] = {}
    waiting, world = iter(episodes), with_defaults(env, EnvBase)
    most, waves = world.most, world.waves

    def leave(slots: Sequence[int], end: object = None) -> None:
        if world.on_leave is not None:  # of two errors the first one is shown
            with suppress(OperantError) if end else nullcontext(), of_user(f"world {name_of(env)!r}: on_leave raised "):
                world.on_leave(slots)

    remember = nullcontext if world.turns == 1 else EngineParts.of(engine).remembering
    pool = ThreadPoolExecutor(1, thread_name_prefix="world") if waves > 1 else nullcontext()
    with ExitStack() as left, remember(), pool as thread:
        left.push(lambda error, *_: leave([*episodes], end=error))
        while slots := list(islice(waiting, most)):
            tasks_of = {slot: episodes[slot].task_as_text for slot in slots}
            ended |= {slot: episodes[slot].start(first, fits) for slot, first in answers.reset(env, tasks_of).items()}
            live = [slot for slot in slots if ended[slot] is None]
            size, asked = -(-len(live) // waves) or 1, deque[Callable[[], dict[int, Step]]]()
            ready = deque(live[i : i + size] for i in range(0, len(live), size))
            while ready or asked:
                if not ready:  # the wave that was asked about first goes on
                    steps = asked.popleft()()
                    ended |= {slot: episodes[slot].answer(answer, fits) for slot, answer in steps.items()}
                    leave([s for s in steps if (rollout := ended[s]) is not None and rollout.end == "outgrown"])
                    ready.append([slot for slot in steps if ended[slot] is None])
                if not (wave := ready.popleft()):
                    continue
                oldest = max((episodes[slot] for slot in wave), key=lambda episode: len(episode.turns))
                if len(oldest.turns) >= max_turns:
                    goes_on = f"{name_of(env)} has not ended task {oldest.task.id!r} after {max_turns} turns"
                    how = "return terminated=True, or truncated=True at a limit of its own; or raise max_turns"
                    raise OperantError(f"{goes_on}: its step must {how}")
                _generate_replies([episodes[s] for s in wave], engine, sampling, seed, stream, step)
                replies, turns = {s: episodes[s].texts[-1] for s in wave}, {s: episodes[s].turns[-1] for s in wave}
                ask = partial(answers.step, env, replies, tasks_of, turns)
                asked.append(ask if thread is None else thread.submit(ask).result)
    return [rollout for slot in episodes if (rollout := ended[slot]) is not None]


def _generate_replies(
    live: list[Episode], engine: Engine, sampling: Sampling, seed: int, stream: str, step: int
) -> None:
    """Generate a reply for every live episode, or choose one if the environment offers options."""
    keys = {id(e): task_key(seed, stream, step, e.task.id, e.sample, len(e.turns)) for e in live}
    free = [e for e in live if e.options is None]
    if free:
        completions = engine.generate([e.prompt for e in free], sampling, [keys[id(e)] for e in free])
        for e, completion in zip(free, completions, strict=True):
            text = reply_text(e.tokenizer, e.prompt, completion.action, sampling) if e.tokenizer else ""
            e.take(completion, text, None, None)
    choosing = [e for e in live if e.options is not None]
    if choosing:
        options = [[ids for _, ids in e.options] for e in choosing]
        picked = engine.choose([e.prompt for e in choosing], options, sampling, [keys[id(e)] for e in choosing])
        for e, ids, (index, completion) in zip(choosing, options, picked, strict=True):
            e.take(completion, e.options[index][0], index, ids)
