"""The environments of GEM: games, problems of maths, logic and code, by name: `pip install 'operant[gem]'`.

operant train --env gem:game:GuessTheNumber-v0-easy
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from operant.envs.games import Game, GameState
from operant.envs.suites import SuiteGame, SuiteGames, needed, seed_of
from operant.types import Task

package = partial(needed, "gem", "GEM")


@dataclass(kw_only=True)
class Gem(SuiteGames):
    """An `Env` of an environment of GEM. Each reply is paid by GEM; an episode that ends with a reward of 1 is won.

    Raises: OperantError as `SuiteGames`.
    """

    def names(self) -> Sequence[str]:
        package()
        from gem.envs.registration import ENV_REGISTRY

        return list(ENV_REGISTRY)

    def make(self, task: Task) -> Game:
        return _Environment(self, seed_of(task))


class _Environment(SuiteGame):
    """One episode of an environment."""

    def __init__(self, world: Gem, seed: int):
        super().__init__(seed, world)
        with self.seeded():
            self.env = package().make(world.game, **(world.kwargs or {}))

    def reset(self) -> GameState:
        with self.seeded():
            rules, _ = self.env.reset(seed=self.seed)
        return self.world.state("", objective=rules.strip())

    def step(self, command: str) -> GameState:
        with self.seeded():
            text, reward, terminated, truncated, info = self.env.step(command)
        self.score += float(reward)
        ended, text = terminated or truncated, "\n".join(filter(None, [text, info.get("suffix")]))
        won = bool(ended and reward >= 1)
        return self.world.state(text, score=self.score, won=won, lost=bool(ended) and not won)
