"""What a turn costs in the worlds of suites: `python -m benchmarks.suites [NAME ...]`, a minute.

The same commands are given to a game by the suite's own interface, and through the world that operant makes of it, both
in this process and in turns. Printed are the medians of milliseconds a turn, with their resets, without any model.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from operant.envs import ENVS
from operant.envs.suites import SuiteGames, seed_of
from operant.types import Task

COMMANDS = {
    "textarena:GuessTheNumber-v0": [f"[{n}]" for n in (10, 5, 15, 3, 18, 7, 12)],
    "textarena:Minesweeper-v0": [f"[{n} {n}]" for n in range(8)],
    "gem:game:GuessTheNumber-v0-hard": [f"\\boxed{{{n}}}" for n in (25, 10, 40, 5, 45)],
    "gem:game:Minesweeper-v0-easy": [f"\\boxed{{reveal {n} {n}}}" for n in range(5)],
    "scienceworld:find-plant": ["open door to greenhouse", "go to greenhouse", "inventory", "go to hallway"] * 2,
}


def textarena(game: str) -> Callable[[Task, Sequence[str]], int]:
    """What plays commands in TextArena itself, and returns the number of turns."""
    import textarena

    env: Any = textarena.make(game)

    def play(task: Task, commands: Sequence[str]) -> int:
        env.reset(num_players=1, seed=seed_of(task))
        for turns, command in enumerate(commands, 1):
            env.get_observation()
            if env.step(command)[0]:
                return turns
        return len(commands)

    return play


def gem(game: str) -> Callable[[Task, Sequence[str]], int]:
    """As `textarena`, in GEM itself."""
    import gem as package

    env = package.make(game)

    def play(task: Task, commands: Sequence[str]) -> int:
        env.reset(seed=seed_of(task))
        for turns, command in enumerate(commands, 1):
            _, _, terminated, truncated, _ = env.step(command)
            if terminated or truncated:
                return turns
        return len(commands)

    return play


def scienceworld(game: str) -> Callable[[Task, Sequence[str]], int]:
    """As `textarena`, in ScienceWorld itself, whose `step` always finds the possible commands."""
    import scienceworld as package

    env = package.ScienceWorldEnv("", envStepLimit=1_000)

    def play(task: Task, commands: Sequence[str]) -> int:
        env.load(game, int(task.id.rpartition("/")[2]), "easy")
        env.reset()
        return sum(len(env.step(command)) > 0 for command in commands)

    return play


def through(world: SuiteGames) -> Callable[[Task, Sequence[str]], int]:
    """As `textarena`, through the world."""

    def play(task: Task, commands: Sequence[str]) -> int:
        world.reset({0: task})
        for turns, command in enumerate(commands, 1):
            step = world.step({0: command})[0]
            if step.terminated or step.truncated:
                return turns
        return len(commands)

    return play


def milliseconds(play: Callable[[Task, Sequence[str]], int], tasks: Sequence[Task], commands: Sequence[str]) -> float:
    """Median over the tasks of the milliseconds a turn."""
    found = []
    for task in tasks:
        begun = time.perf_counter()
        turns = play(task, commands)
        found.append(1000 * (time.perf_counter() - begun) / turns)
    return statistics.median(found)


def main(names: Sequence[str]) -> None:
    """Print a row for each game."""
    own: dict[str, Callable[[str], Any]] = {"textarena": textarena, "gem": gem, "scienceworld": scienceworld}
    print("| game | the suite itself, ms a turn | through operant | more |\n|---|---|---|---|")
    for name in names or COMMANDS:
        suite, _, game = name.partition(":")
        world: SuiteGames = ENVS.find(suite)(game=game)
        tasks = world.games("train")[: 10 if suite == "scienceworld" else 64]
        ours, theirs = through(world), own[suite](game)
        sides = [[milliseconds(side, tasks, COMMANDS[name]) for side in (theirs, ours)] for _ in range(3)]
        one, other = (statistics.median(side) for side in zip(*sides))
        print(f"| `{name}` | {one:.3g} | {other:.3g} | {other - one:+.3f} |", flush=True)
        world.close()


if __name__ == "__main__":
    main(sys.argv[1:])
