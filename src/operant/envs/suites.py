"""Games of suites that others made, by name: `--env textarena:GuessTheNumber-v0`.

A file for each suite says which games there are and how one is played; what all of them need stands here.
"""

import random
import re
import sys
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from operant.bounds import bounded
from operant.envs.games import Game, GameState, Playing, Split, TextGames
from operant.envs.isolated import IsolatedEnv
from operant.import_by_name import nearest
from operant.types import OperantError, Step, Task, require, shown

PROBES = ("no such move",) * 3, ("1", "[1 2]", "[up]", "yes", "[a]")
"""Replies of the two episodes that are played before training."""


class GameError(Exception):
    """A game has done something that cannot be trained on; the text says what, after the word "it"."""


class SuiteGame(Game):
    """One game of a suite. What its package draws from Python's and NumPy's own generators comes from its seed."""

    def __init__(self, seed: int, world: Any = None):
        self.seed, self.world, self.score = seed, world, 0.0
        self._generators = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Inside this context both generators are the game's own, so no game depends on those beside it."""
        outside = random.getstate(), np.random.get_state()
        random.setstate(self._generators[0])
        np.random.set_state(self._generators[1])
        try:
            yield
        finally:
            self._generators = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])


@dataclass(kw_only=True)
class SuiteGames(TextGames):
    """An `Env` of the games of one name in a suite, which differ by their seeds. A game that raises costs its episode.

    The whole history is shown, and the whole reply is the command.
    """

    suite: ClassVar[str | None] = "game"
    lists_commands: ClassVar[bool] = False
    """Whether its games list the commands that are possible."""
    game: str
    """The name of the game in its suite."""
    kwargs: Mapping[str, Any] | None = None
    """Arguments of the game, as the suite names them."""
    commands: tuple[str, ...] = ()
    """The commands that are possible, for games that do not list them: for players, and for `choose`."""
    memory: int | None = bounded(None, at_least=0)
    """Earlier turns in a prompt. None: the whole history, to which each turn is appended."""
    patience: float = bounded(30.0, above=0)
    """Seconds for each answer of the two episodes that are begun, in a process of its own, before training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        wanting = next((name for name in ("choose", "show_commands", "examples") if getattr(self, name)), None)
        known = self.commands or self.lists_commands
        require(known or not wanting, f"env.{wanting} needs the commands that are possible: env.commands=up,down")
        known = self.names()
        if known and self.game not in known:
            hint = nearest(shown(self.game), known) or f"; it has {len(known)}, such as {', '.join(known[:3])}"
            raise OperantError(f"env.{self.suite}={shown(self.game)}: {type(self).__name__} has no such game{hint}")

    @abstractmethod
    def names(self) -> Sequence[str]:
        """The names of the suite's games; empty: unknown."""

    def games(self, split: Split) -> list[Task]:
        """Tasks whose ids are the seeds of their games."""
        return [Task(f"{self.game}/{split}/{i}", self.game) for i in range(getattr(self, f"{split}_games"))]

    def read(self, reply: str) -> tuple[str, str]:
        """The whole reply, or all that follows the mark of a template with thoughts."""
        thought, _, command = reply.partition(mark) if (mark := self._template.thought) else ("", "", reply)
        return " ".join(thought.split())[:2000], command.strip()

    def check(self) -> None:
        """Begin two episodes in a process of its own."""
        own = {f.name for f in fields(self) if f.init} - {f.name for f in fields(TextGames)}
        options = {name: getattr(self, name) for name in own}
        world = IsolatedEnv(type(self), options, workers=1, isolation={"timeout": self.patience, "memory_gb": None})
        try:
            for replies in PROBES:
                at = world.reset({0: self.games("train")[0]})[0]
                for reply in replies:
                    if not (at.failed or at.terminated or at.truncated):
                        at = world.step({0: reply})[0]
                if at.failed:
                    raise OperantError(f"{type(self).__name__} cannot play {self.game!r} here: it {at.info['failure']}")
        finally:
            world.close()

    def _begin(self, slot: int, task: Task) -> Step:
        return _caught(lambda: super(SuiteGames, self)._begin(slot, task))

    def _answer(self, episode: Playing, reply: str) -> Step:
        step = _caught(lambda: super(SuiteGames, self)._answer(episode, reply))
        if step.terminated or step.truncated or step.failed:
            episode.game.close()  # at once: a slot may not be begun again for long
        return step

    def state(self, text: str, **known: object) -> GameState:
        """What a game says, with the commands that the user has named."""
        return GameState(text, commands=self.commands, **known)


def _caught(answer: Callable[[], Step]) -> Step:
    """The answer of a game; of one that raises, that its episode has failed."""
    try:
        return answer()
    except OperantError:
        raise
    except (Exception, SystemExit) as error:
        failed = "timeout" if isinstance(error, TimeoutError) else "raised"
        return Step(failed=failed, info={"failure": reason(error)})


def reason(error: BaseException) -> str:
    """Why a game has failed, with the remedy for what games lack most often."""
    if isinstance(error, GameError):
        return str(error)
    text = " ".join(str(error).replace("*", " ").split())[:300]
    if isinstance(error, SyntaxError):
        version = ".".join(map(str, sys.version_info[:2]))
        return f"is written for a newer Python than {version} ({error.filename}, line {error.lineno}: {error.msg})"
    if isinstance(error, LookupError) and (data := re.search(r"nltk\.download\('(\w+)'\)", text)):
        return f"needs data that NLTK downloads: python -m nltk.downloader {data[1]}"
    return f"raised {type(error).__name__}: {text}"


def seed_of(task: Task) -> int:
    return zlib.crc32(task.id.encode())


def needed(env: str, title: str, package: str = "") -> Any:
    """The package of the games of a world, by the world's own name unless it has another one.

    Raises: OperantError that names the extra, if it is not installed.
    """
    try:
        return import_module(package or env)
    except ImportError as error:
        raise OperantError(f"env={env} needs {title}: pip install 'operant[{env}]' ({error})") from error
