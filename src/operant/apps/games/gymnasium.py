"""Environments of Gymnasium whose observations are texts: `pip install 'operant[gymnasium]'`.

operant train --env gymnasium:FrozenLake-v1 --env.kwargs "{render_mode: ansi}" --env.actions left,down,right,up
"""

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from operant.bounds import bounded, check_bounds
from operant.import_by_name import extra
from operant.types import OperantError, Step, Task, require, shown

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""The codes with which a terminal's text is coloured."""
LISTED = ("action_mask", "admissible_commands")
"""The keys of `info` under which an environment says which actions are possible now."""


@dataclass
class Gymnasium:
    """An `Env` with an environment of its own for each episode: any number of them, each by itself.

    Its observations are texts (`Text` spaces), or it is made with `render_mode="ansi"`, and its drawing is the text.
    Its actions are texts or discrete. The seed of an episode is made from the task's id. An episode may be both
    terminated and truncated; it is then terminated, and no value follows.
    """

    suite: ClassVar[str | None] = "id"
    id: str | Callable[..., Any]
    """Name of a registered environment, also `module:Name-v0`; from Python also a function that makes one."""
    kwargs: Mapping[str, Any] | None = None
    """Arguments of the environment."""
    actions: tuple[str, ...] = ()
    """Names of discrete actions, in order; by default their numbers."""
    choose: bool = True
    """Choose among the possible actions where they are known, as of discrete ones; otherwise write the action."""
    prompt: str = "{task}\n{observation}\n> "
    """The first prompt, with the task's prompt and the observation in braces."""
    answer: str = "\n{observation}\n> "
    """What follows a reply."""
    fresh: bool = False
    """Whether every observation is a new prompt (made by `prompt`), so that the policy sees no earlier one."""
    invalid: float = 0.0
    """Reward of a reply that is no action. It counts as a turn, and the environment stays as it is."""
    max_turns: int = bounded(100, at_least=1)
    """Turns after which an episode is truncated."""
    train_games: int = bounded(64, at_least=1)
    """Number of the tasks of a run that names none."""
    test_games: int = bounded(16, at_least=0)
    """Number of its held-out tasks, whose seeds are others."""

    def __post_init__(self) -> None:
        check_bounds(self, "env")
        for name in ("prompt", "answer"):
            try:
                getattr(self, name).format(task="", observation="")
            except (LookupError, ValueError, AttributeError, TypeError) as error:
                raise OperantError(
                    f"env.{name}={shown(getattr(self, name))}: it may name {{task}} and {{observation}} in braces, and "
                    f"nothing else ({type(error).__name__}: {error})"
                ) from error
        self.names: list[str] | None = None
        """The discrete actions; None: actions are texts."""
        self.tasks, self.live, self.turns = dict[int, Task](), dict[int, Any](), dict[int, int]()
        self.shown, self.possible = dict[int, dict[str, str]](), dict[int, list[str] | None]()
        """What the templates of a slot are filled with, and its actions."""
        self.idle = [self.make()]

    def make(self) -> Any:
        with extra("env=gymnasium needs Gymnasium", "gymnasium"):
            import gymnasium
        kwargs = self.kwargs or {}
        try:
            made = gymnasium.make(self.id, **kwargs) if isinstance(self.id, str) else self.id(**kwargs)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise OperantError(f"env.id={shown(self.id)} cannot be made: {error}") from error
        if hasattr(made, "num_envs"):
            how = "give what makes one of its environments, and operant plays many"
            raise OperantError(f"env.id={shown(self.id)} makes a vector, which steps all its episodes at once: {how}")
        text, spaces = gymnasium.spaces.Text, (made.observation_space, made.action_space)
        if not isinstance(spaces[0], text) and getattr(made, "render_mode", None) != "ansi":
            raise OperantError(
                f"env.id={shown(self.id)} observes {spaces[0]}, which is no text: wrap it so that it observes text, or "
                "set env.kwargs={render_mode: ansi} if it can draw itself as text"
            )
        if isinstance(spaces[1], gymnasium.spaces.Discrete):
            self.names = list(self.actions) or [str(spaces[1].start + i) for i in range(int(spaces[1].n))]
            why = f"{shown(self.id)} has {spaces[1].n} actions; name each of them"
            require(len(set(self.names)) == int(spaces[1].n), f"env.actions={shown(self.actions)}: {why}")
        elif not isinstance(spaces[1], text):
            raise OperantError(f"env.id={shown(self.id)} has actions in {spaces[1]}; they must be texts or discrete")
        elif self.actions:
            raise OperantError(f"env.actions={shown(self.actions)}: {shown(self.id)} acts by texts; leave it out")
        return made

    def games(self, split: Literal["train", "test"]) -> list[Task]:
        name = self.id if isinstance(self.id, str) else getattr(self.id, "__name__", "game")
        return [Task(f"{name}/{split}/{i}", name) for i in range(getattr(self, f"{split}_games"))]

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]:
        self.idle += [self.live.pop(slot) for slot in tasks if slot in self.live]  # whose last episode was cut off
        for slot, task in tasks.items():
            self.live[slot] = self.idle.pop() if self.idle else self.make()
            self.turns[slot], self.tasks[slot] = 0, task
        first = {slot: self.live[slot].reset(seed=zlib.crc32(task.id.encode())) for slot, task in tasks.items()}
        return {slot: self.seen(slot, *of_slot, template=self.prompt) for slot, of_slot in first.items()}

    def step(self, replies: Mapping[int, str]) -> dict[int, Step]:
        return {slot: self.act(slot, reply) for slot, reply in replies.items()}

    def act(self, slot: int, reply: str) -> Step:
        env, command = self.live[slot], reply.strip()
        self.turns[slot] += 1
        late, possible = self.turns[slot] >= self.max_turns, self.possible[slot]
        if self.names is None and env.action_space.contains(command):
            action = command
        elif self.names is not None and command in (possible or self.names):
            action = env.action_space.start + self.names.index(command)
        else:
            options = possible if self.choose else None
            text = (self.prompt if self.fresh else self.answer).format(**self.shown[slot])
            return Step(text, self.fresh, self.invalid, truncated=late, options=options)
        observation, reward, terminated, truncated, info = env.step(action)
        step = self.seen(slot, observation, info, self.prompt if self.fresh else self.answer)
        ended, cut = bool(terminated), bool(truncated or late) and not terminated
        if ended or cut:
            self.idle.append(self.live.pop(slot))
        return replace(step, fresh=self.fresh, reward=float(reward), terminated=ended, truncated=cut)

    def seen(self, slot: int, observation: object, info: Mapping[str, object], template: str) -> Step:
        """What the policy reads, and the actions that it may choose among."""
        text = observation if isinstance(observation, str) else COLOURS.sub("", self.live[slot].render())
        mask, listed = (info.get(key) for key in LISTED)
        possible = list(map(str, listed)) if listed is not None else self.names
        if mask is not None and self.names is not None:
            possible = [name for name, can in zip(self.names, mask) if can]
        self.possible[slot] = possible or None
        self.shown[slot] = {"task": self.tasks[slot].prompt, "observation": text}
        plain = {key: value for key, value in info.items() if key not in LISTED}
        options = (possible or None) if self.choose else None
        return Step(template.format(**self.shown[slot]), True, options=options, info=plain)

    def close(self) -> None:
        for env in [*self.idle, *self.live.values()]:
            env.close()
