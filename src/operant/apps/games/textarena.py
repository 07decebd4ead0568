"""The one-player games of TextArena: `pip install 'operant[textarena]'`.

operant play textarena:GuessTheNumber-v0
operant train --env textarena:GuessTheNumber-v0 --env.commands 1,2,3,4,5 --env.kwargs "{max_number: 5}" --env.choose
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real

from operant.envs.games import Game, GameState
from operant.envs.suites import GameError, SuiteGame, SuiteGames, needed, seed_of
from operant.types import Task, shown

package = partial(needed, "textarena", "TextArena")


@dataclass(kw_only=True)
class TextArena(SuiteGames):
    """An `Env` of a game of TextArena, whose reward is paid at its end. A reward of 1 is a win.

    A command without brackets gets them, as TextArena's own wrapper does. Raises: OperantError as `SuiteGames`.
    """

    def names(self) -> Sequence[str]:
        package()
        from textarena.envs.registration import ENV_REGISTRY

        return [name for name in ENV_REGISTRY if not name.endswith(("-raw", "-train"))]

    def make(self, task: Task) -> Game:
        return _ArenaGame(self, seed_of(task))


class _ArenaGame(SuiteGame):
    """One game, without TextArena's wrappers: it says what is new since the last command."""

    def __init__(self, world: TextArena, seed: int):
        super().__init__(seed, world)
        with self.seeded():
            self.env = package().make(world.game, **(world.kwargs or {}))
            while isinstance(self.env, package().Wrapper):
                self.env = self.env.env

    def reset(self) -> GameState:
        with self.seeded():
            self.env.reset(num_players=1, seed=self.seed)
            if not isinstance(self.env.state, package().SinglePlayerState):  # some do not count their players
                raise GameError("is a game for several players")
            return self.world.state("", objective=self.said())

    def step(self, command: str) -> GameState:
        with self.seeded():
            done, _ = self.env.step(command if "[" in command else f"[{command}]")
            text = self.said()
        rewards, info = self.env.close() if done else ({0: 0.0}, {0: {}})
        reward, info = rewards[0], info[0]
        if not isinstance(reward, Real):
            raise GameError(f"pays a sentence for a wrong command: {shown(reward)}")
        valid = not (self.env.state.error_count or info.get("invalid_move"))
        text = f"{text}\n{info.get('reason', '')}".strip()
        known = {"won": done and reward >= 1, "lost": done and reward < 1, "valid": valid}
        return self.world.state(text, score=float(reward), **known)

    def said(self) -> str:
        """The messages to the player since the last call, without its own."""
        player, messages = self.env.get_observation()
        return "\n".join(str(text).strip() for sender, text, _ in messages if sender != player)
