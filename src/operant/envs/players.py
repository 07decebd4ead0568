"""Players of text games that are no models: baselines, experts for examples, and partners of `operant play`."""

import random
import re
from collections.abc import Sequence
from typing import Protocol

from operant.envs.games import Game, GameState
from operant.import_by_name import Table


class Player(Protocol):
    """Plays one game. Make a new one for each episode."""

    def act(self, state: GameState, game: Game, chance: random.Random) -> str:
        """The next command; `chance` is the only source of random numbers."""
        ...


class RandomPlayer:
    """Any admissible command, each as likely as the others."""

    def act(self, state: GameState, game: Game, chance: random.Random) -> str:
        return chance.choice(state.commands) if state.commands else "look"


class WalkthroughPlayer:
    """The next command of a solution, as far as the game knows one; else any admissible command."""

    def act(self, state: GameState, game: Game, chance: random.Random) -> str:
        return game.expert() or RandomPlayer().act(state, game, chance)


class OverlapPlayer:
    """The admissible command with the largest share of its words in the objective: reading without understanding.

    Commands that only look are left out. Those that were given least often in the same state come first, or with
    `repeat` last of equal shares.
    """

    def __init__(self, *, repeat: bool = False) -> None:
        self.repeat = repeat
        self._given: dict[tuple[str, str], int] = {}

    def act(self, state: GameState, game: Game, chance: random.Random) -> str:
        wanted = _words(state.objective)

        def rank(command: str) -> tuple[float, float]:
            share = len(wanted & _words(command)) / max(1, len(_words(command)))  # 0 of "12"
            given = self._given.get((state.key, command), 0)
            return (share, -given) if self.repeat else (-given, share)

        able = [c for c in state.commands if not c.startswith(("examine", "look", "inventory"))] or ["look"]
        best = max(map(rank, able))
        command = chance.choice([c for c in able if rank(c) == best])
        self._given[state.key, command] = self._given.get((state.key, command), 0) + 1
        return command


class FixedPlayer:
    """Replays given commands in their order, whatever the game says; then any admissible command.

    What it scores in unseen games tells how much these have in common with the game of the commands.
    """

    def __init__(self, commands: Sequence[str] = ()):
        self._left = list(commands)[::-1]

    def act(self, state: GameState, game: Game, chance: random.Random) -> str:
        return self._left.pop() if self._left else RandomPlayer().act(state, game, chance)


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


PLAYERS = Table(
    "player",
    "operant.players",
    {
        "fixed": "operant.envs.players:FixedPlayer",
        "overlap": "operant.envs.players:OverlapPlayer",
        "random": "operant.envs.players:RandomPlayer",
        "walkthrough": "operant.envs.players:WalkthroughPlayer",
    },
)
"""The class of each player."""


def play(game: Game, player: Player, *, seed: str, max_turns: int) -> list[tuple[str, GameState]]:
    """Play a game to its end, or for `max_turns` turns. Returns the commands, each with the state that followed."""
    chance, state, played = random.Random(seed), game.reset(), []
    while len(played) < max_turns and not (state.won or state.lost):
        command = player.act(state, game, chance)
        state = game.step(command)
        played.append((command, state))
    return played
