"""Plays the games of a world by any player, and records them: what `operant play` does.

world = game_world("rooms", {"env.memory": 3})
played = Recorded(world)
play_by_model(played, world.games("test"), policy, engine, model_sampling({}, {}))
played.games[0]["won"], played.turns[0]         # the record of the first game, and its rows of prompt and completion
"""

import inspect
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from operant.envs import ENVS
from operant.envs.games import Game, GameState, TextGames
from operant.envs.isolated import FORMS, without_form
from operant.envs.players import PLAYERS, Player
from operant.import_by_name import names_object, nearest
from operant.models.policy import Policy
from operant.options import arguments, compose
from operant.rollouts.play import Opening, play
from operant.runs import named_parts
from operant.sampling import Sampling
from operant.training.setup import tell_room
from operant.types import Engine, Env, OperantError, Step, Task, name_of, of_user, require, shown

REPLY = {"max_tokens": 64, "stop_strings": ("\n",)}
"""How a model replies that is no run of operant: up to a line break."""


@dataclass
class Recorded:
    """A world that keeps what it asked and was answered: prompts and replies by slot, and the records of the games."""

    world: TextGames
    prompts: dict[int, str] = field(default_factory=dict)
    turns: dict[int, list[dict[str, str]]] = field(default_factory=dict)
    """Rows of prompt and completion, of commands that the game has understood. A prompt is all that the policy reads
    before its reply."""
    refused: Counter[int] = field(default_factory=Counter)
    """Commands that the game has not understood, by slot."""
    games: dict[int, dict[str, Any]] = field(default_factory=dict)
    """As `Rollout.info["game"]`; a game that has failed has none."""
    failures: dict[int, str] = field(default_factory=dict)
    """Why games have failed, by slot."""

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]:
        with of_user(f"world {name_of(self.world)!r}: reset raised "):
            steps = self.world.reset(tasks)
        for slot, step in self._sound(steps):
            self.prompts[slot], self.turns[slot], self.games[slot] = step.text, [], step.info["game"]
        return steps

    def _sound(self, steps: Mapping[int, Step]) -> list[tuple[int, Step]]:
        """The answers of games that have not failed; of those that have, the reason is kept, and no record."""
        failed = {slot: str(step.info.get("failure", step.failed)) for slot, step in steps.items() if step.failed}
        self.failures |= failed
        self.games = {slot: game for slot, game in self.games.items() if slot not in failed}
        return [(slot, step) for slot, step in steps.items() if slot not in failed]

    def step(self, replies: Mapping[int, str]) -> dict[int, Step]:
        with of_user(f"world {name_of(self.world)!r}: step raised "):
            steps = self.world.step(replies)
        for slot, step in self._sound(steps):
            own = [turn for turn in step.info["game"]["turns"] if turn["by"] == "policy"]  # the world may play examples
            if own[-1]["valid"]:
                self.turns[slot].append({"prompt": self.prompts[slot], "completion": replies[slot]})
            else:
                self.refused[slot] += 1
            self.prompts[slot] = step.text if step.fresh else self.prompts[slot] + replies[slot] + step.text
            self.games[slot] = step.info["game"]
        return steps


class OwnPlayer:
    """A player class of the user. What it raises, and what it returns that is no text, becomes an OperantError."""

    def __init__(self, name: str, made: Callable[[], Player]):
        """made: a class, or a function that makes one."""
        self.name = name
        with of_user(f"player {shown(name)} cannot be made without arguments: "):
            self.player: Player = made()
        if not callable(getattr(self.player, "act", None)):
            raise OperantError(f"player {shown(name)} has no act(state, game, chance), which returns the next command")

    def act(self, state: GameState, game: Game, chance: random.Random) -> str:
        with of_user(f"player {shown(self.name)} raised "):
            command = self.player.act(state, game, chance)
        require(isinstance(command, str), f"player {shown(self.name)} returned {shown(command)}; a command is a text")
        return command


def player_names() -> list[str]:
    return [name for name in PLAYERS.names() if name != "fixed"]  # it replays commands, which no option gives


def simple_player(name: str) -> Callable[[], Player] | None:
    """What makes a player of that name, or of `module:class`; None if it is the folder or name of a model."""
    if name in player_names():
        return PLAYERS.find(name)
    if ":" in name and names_object(name, PLAYERS):
        return partial(OwnPlayer, name, PLAYERS.find(name))
    if "/" not in name and ":" not in name and not Path(name).exists():
        known = ["human", *player_names()]
        players = f"{', '.join(known)}, module:class, or the folder of a run or model"
        raise OperantError(f"player {shown(name)} is unknown{nearest(name[:100], known) or '.'} Players: {players}")
    return None


def named_world(name: str, options: Mapping[str, object], run: Mapping[str, object]) -> Env | None:
    """The world with the user's options, above those of the run that plays if it was trained there, without examples.

    It is played in this process, also if the run has played it in others (`workers:rooms`). None: of a single turn.
    """
    name = str(without_form(name))
    made, what = named_parts.KINDS["env"].factory(name), f"world {shown(name)}"
    own, trained = {option.removeprefix("env."): value for option, value in options.items()}, dict[str, Any]()
    if without_form(run.get("env")) == name:  # as the run stores them, without those of its worker processes
        stored, form = named_parts.options_of(run, "env"), FORMS.get(str(run["env"]).partition(":")[0])
        trained = {option.removeprefix("env."): run[option] for option in stored}
        trained |= {"examples": 0.0} if "examples" in trained else {}
        trained = {option: x for option, x in trained.items() if form is None or option not in form.options_of_runs}
    return None if made is None else named_parts.make("env", name, arguments(made, trained | own, what))


def game_world(name: str, options: Mapping[str, object], run: Mapping[str, object]) -> TextGames:
    """`named_world` with text games. Raises: OperantError for another one."""
    world, what = named_world(name, options, run), f"world {shown(str(without_form(name)))}"
    if not isinstance(world, TextGames):
        known = ((other, ENVS.find(other)) for other in ENVS.built_in)
        others = ", ".join(other for other, made in known if isinstance(made, type) and issubclass(made, TextGames))
        more = "Any other is played by a person, with --tasks FILE where it has none of its own"
        raise OperantError(f"{what} has no text games to play; worlds that have: {others}. {more}")
    return world


def game_worlds(
    name: str, options: Mapping[str, object], runs: Mapping[str, Mapping[str, object]]
) -> dict[str, TextGames]:
    """The world of each player, with one limit of turns for all: the user's, or the largest of the runs trained there.

    runs: the options of each player's run by the player's name, empty for one that is no run.
    Raises: OperantError as `game_world`.
    """
    worlds = {player: game_world(name, options, run) for player, run in runs.items()}
    there = [player for player, run in runs.items() if without_form(run.get("env")) == without_form(name)]
    if there and not {"max_turns", "env.max_turns"} & options.keys():
        limit = max(worlds[player].max_turns for player in there)
        for world in worlds.values():
            world.max_turns = limit
    return worlds


def playable(env: object) -> str | None:
    """The name by which `operant play` knows the world that a run names; None: it has no text games, or no name."""
    name, made = without_form(env), None
    with suppress(OperantError):  # such as a file that is no longer there
        made = ENVS.find(name) if isinstance(name, str) else None
    return str(name) if inspect.isclass(made) and issubclass(made, TextGames) else None


def model_sampling(run: Mapping[str, object], given: Mapping[str, object]) -> Sampling:
    """How a model replies: as in its run, or up to a line break; the user's options come first."""
    known = run.get("sampling")
    own = {f"sampling.{name}": value for name, value in (known if isinstance(known, Mapping) else REPLY).items()}
    return compose({"sampling": Sampling}, {**own, **given})["sampling"]


def play_by_player(played: Recorded, slot: int, task: Task, player: Player, chance: random.Random) -> None:
    """Let a player play one game to its end."""
    step = played.reset({slot: task})[slot]
    while not (step.failed or step.terminated or step.truncated):
        game, state = played.world.playing(slot)
        step = played.step({slot: played.world.written(player.act(state, game, chance))})[slot]


def play_by_model(
    played: Recorded,
    tasks: Sequence[Task],
    policy: Policy,
    engine: Engine,
    sampling: Sampling,
    seed: int,
    opening: Opening | None = None,
) -> None:
    """Let a model play all games in one batch, with the random numbers of a run's evaluation."""
    if policy.tokenizer is None:
        raise OperantError("the model has no tokenizer, and games are texts: save its tokenizer into its folder")
    sampling = sampling.of(policy)
    tell_room(played.world, policy, sampling)
    how = {"env": played, "engine": engine, "tokenizer": policy.tokenizer, "sampling": sampling, "seed": seed}
    how |= {"stream": "evaluate", "max_turns": played.world.max_turns + 1, "opening": opening}
    play(tasks, **how, fits=lambda prompt, reply: policy.misfit(prompt, reply) is None)
