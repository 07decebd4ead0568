"""Any OpenEnv server whose actions and observations hold texts, by URL: `pip install 'operant[openenv]'`.

operant train --env openenv:http://127.0.0.1:8000 --env.action message
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from operant.bounds import bounded
from operant.envs.games import Game, GameState
from operant.envs.suites import GameError, SuiteGame, SuiteGames, needed, seed_of
from operant.types import OperantError, Task, shown

package = partial(needed, "openenv", "websockets", "websockets.sync.client")


@dataclass(kw_only=True)
class OpenEnv(SuiteGames):
    """An `Env` of the server whose URL is `game`: each live episode is a session, a connection of its own to its `/ws`.
    `kwargs` go to the server with each reset.

    Raises: OperantError for a URL without http or https, or if the package websockets is not installed.
    """

    action: str = "message"
    """The field of an action that the command is sent in."""
    shows: tuple[str, ...] = ()
    """The fields of an observation that are shown; without any, all that are texts."""
    timeout: float = bounded(60.0, above=0)
    """Seconds for an answer; an episode without one ends as `timeout`."""
    most: int = bounded(1, at_least=1)
    """Episodes at a time: the sessions that the server has, which is one unless it says otherwise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.game.startswith(("http://", "https://")):
            raise OperantError(f"env.game={shown(self.game)}: it must be the URL of an OpenEnv server, http://...")
        package()

    def names(self) -> Sequence[str]:
        return []

    def make(self, task: Task) -> Game:
        return _Session(self, seed_of(task))


class _Session(SuiteGame):
    """One session."""

    def __init__(self, world: OpenEnv, seed: int):
        super().__init__(seed, world)
        url = f"ws{world.game.removeprefix('http').rstrip('/')}/ws"
        try:
            connection = package().connect(url, open_timeout=world.timeout, max_size=None, proxy=None)
            self.socket = connection.__enter__()  # newer versions connect here
        except (OSError, ValueError) as error:
            raise GameError(f"has no server that answers at {url}: {type(error).__name__}: {error}") from error

    def reset(self) -> GameState:
        return self.ask("reset", {"seed": self.seed, **(self.world.kwargs or {})})

    def step(self, command: str) -> GameState:
        return self.ask("step", {self.world.action: command})

    def ask(self, kind: str, data: Mapping[str, object]) -> GameState:
        """Send a message, and read the state in its answer."""
        try:
            self.socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self.socket.recv(timeout=self.world.timeout))
            found = answer["data"]
            if answer["type"] == "error":
                raise GameError(f"answers {kind} with an error: {shown(found)}")
            observation = found["observation"]
            shows = self.world.shows or [name for name, value in observation.items() if isinstance(value, str)]
            text = "\n".join(str(observation[name]) for name in shows)
            reward = float(found.get("reward") or 0.0)
        except BaseException:
            self.close()
            raise
        self.score, done = self.score + reward, bool(found.get("done"))
        return self.world.state(text, score=self.score, won=done and reward > 0, lost=done and reward <= 0)

    def close(self) -> None:
        self.socket.close()
