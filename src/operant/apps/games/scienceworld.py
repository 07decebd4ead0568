"""The tasks of ScienceWorld: `pip install 'operant[scienceworld]'`, and Java, such as the package default-jre-headless.

operant train --env scienceworld:find-plant --memory 3
"""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from operant.bounds import bounded
from operant.envs.games import Game, GameState, Split, TextGames
from operant.envs.suites import SuiteGame, SuiteGames, needed
from operant.types import Task, require, shown

REFUSED = ("No known action matches that input.", "Ambiguous request", "It's not clear how")
"""How the simulator answers a command that it does not carry out."""

package = partial(needed, "scienceworld", "ScienceWorld")


@dataclass(kw_only=True)
class ScienceWorld(SuiteGames):
    """An `Env` of a task of ScienceWorld, whose variations are its games. Each live game has a Java process of its own.

    The score is ScienceWorld's, from 0 to 1; below 0 a game is lost. Raises: OperantError as `SuiteGames`, and if there
    is no Java.
    """

    lists_commands = True
    memory: int | None = bounded(3, at_least=0)
    """Earlier turns in a prompt. None: the whole history, to which each turn is appended."""
    most: int = bounded(8, at_least=1)
    """Games that are played at a time."""
    simplifications: str = "easy"
    """What is made easier, separated by commas: easy (all but electricity), or teleportAction, openDoors, ..."""

    def names(self) -> Sequence[str]:
        given = f"env.kwargs={shown(self.kwargs)}"
        require(not self.kwargs, f"{given}: a task of ScienceWorld has no arguments; use env.simplifications")
        require(not self.commands, f"env.commands={shown(self.commands)}: ScienceWorld lists its own; leave it out")
        package()
        from scienceworld.constants import ID2TASK

        return sorted(set(ID2TASK.values()))

    def games(self, split: Split) -> list[Task]:
        """The first variations that ScienceWorld keeps for training, and for tests."""
        env = self.simulator()
        env.load(self.game, 0, self.simplifications)
        variations = env.get_variations_train() if split == "train" else env.get_variations_test()
        end(env)
        most = getattr(self, f"{split}_games")
        return [Task(f"{self.game}/{split}/{n}", self.game) for n in sorted(variations)[:most]]

    read = TextGames.read

    def playing(self, slot: int) -> tuple[Game, GameState]:
        """The game in a slot and its state, with the commands that are possible, which take long to find."""
        game, state = super().playing(slot)
        if isinstance(game, _Variation) and game.env is not None:
            state = replace(state, commands=game.possible())
        return game, state

    def make(self, task: Task) -> Game:
        return _Variation(self, int(task.id.rpartition("/")[2]))

    def simulator(self) -> Any:
        """A new simulator: one that has played lists things in another order."""
        require(shutil.which("java"), "env=scienceworld needs Java, such as apt-get install default-jre-headless")
        return package().ScienceWorldEnv("", envStepLimit=1_000_000)


class _Variation(SuiteGame):
    """One variation of a task."""

    def __init__(self, world: ScienceWorld, variation: int):
        super().__init__(variation, world)
        self.env: Any = world.simulator()
        self.env.load(world.game, variation, world.simplifications)
        self.solution: list[str] | None = None
        self.given: list[str] = []

    def reset(self) -> GameState:
        self.env.server.reset()
        return self.seen("look around")

    def step(self, command: str) -> GameState:
        self.given.append(command)
        return self.seen(command)

    def seen(self, command: str) -> GameState:
        """The state after a command. The simulator's own `step` also finds what is possible, in ten times as long."""
        text, server, look = self.env.server.step(command).strip(), self.env.server, self.env.look().strip()
        place, score = re.search(r"This (?:room|outside location) is called the ([\w ]+)", look), server.getScore()
        ended, asked = server.getCompleted() or score < 0, self.world.choose or self.world.show_commands
        return GameState(
            text,
            description=look,
            inventory=self.env.inventory().strip(),
            objective=self.env.taskdescription().replace("Task Description:", "").strip(),
            commands=self.possible() if asked or self.world.examples else (),
            score=score,
            won=ended and score >= 1,
            lost=ended and score < 1,
            valid=not text.startswith(REFUSED),
            place=place[1] if place else "",
        )

    def possible(self) -> tuple[str, ...]:
        """The commands that the simulator would carry out now, some hundreds."""
        return tuple(sorted(set(self.env.get_valid_action_object_combinations())))

    def expert(self) -> str | None:
        """The next command of ScienceWorld's solution, which another simulator finds, while it has been followed."""
        if self.solution is None:
            other = self.world.simulator()
            other.load(self.world.game, self.seed, self.world.simplifications, generateGoldPath=True)
            self.solution = list(other.get_gold_action_sequence())
            end(other)
        done = len(self.given)
        return self.solution[done] if self.given == self.solution[:done] and done < len(self.solution) else None

    def close(self) -> None:
        if self.env is not None:
            end(self.env)
            self.env = None


def end(env: Any) -> None:
    """End a simulator and its process."""
    env.close()
    env._gateway.java_process.wait()  # its finaliser writes to a process that is not known to have ended
