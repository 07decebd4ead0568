"""`operant play`: people, players and models play the games of a world, side by side; their games can be recorded."""

import json
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from operant.data import DataOptions, load_tasks
from operant.envs import check_parts, own_games
from operant.envs.games import Game, GameState, TextGames, observed
from operant.options import compose
from operant.rollouts import answers
from operant.runs.games import (
    Recorded,
    game_worlds,
    model_sampling,
    named_world,
    play_by_model,
    play_by_player,
    simple_player,
)
from operant.runs.named_models import load, run_options, stated_return
from operant.runs.named_parts import flattened
from operant.runs.trackers.console import emit, plain
from operant.storage import atomic_io
from operant.tools.cli.arguments import Options, new_file, refuse, taken
from operant.tools.report.summary import aligned, game_row
from operant.types import Env, EnvBase, OperantError, Step, name_of, require, shown, with_defaults

HUMAN = "human"
GAMES = 20
"""Games of each player, unless a person plays."""


class LeftError(Exception):
    """A person has left the game."""


def entered() -> str:
    """A line of the terminal. Raises: LeftError for `quit`, the end of the input, and Ctrl-C."""
    try:
        line = input("> ")
    except (EOFError, KeyboardInterrupt):
        print()
        raise LeftError from None
    if line.strip() == "quit":
        raise LeftError
    return line


class Human:
    """A person at the terminal."""

    begun = False

    def act(self, state: GameState, game: Game, chance: random.Random) -> str:
        """Show the state and ask for a command; `?` lists those that are admissible. Raises: LeftError as `entered`."""
        if not self.begun:
            say(state.objective, "(? lists the commands, quit leaves)")
        self.begun = True
        say(observed(state), state.inventory)
        while (line := entered().strip()) == "?":
            say(", ".join(state.commands) or "The game names no commands.")
        return line


@dataclass(frozen=True)
class _Asked:
    """What the command line asks for."""

    players: list[str]
    count: int
    split: Any
    transcripts: int
    seed: int
    record: Path | None
    only_won: bool
    sampling: dict[str, Any]
    data: DataOptions


def _asked(options: Options) -> _Asked:
    """Take the command's own options out of `options`, which keeps those of the world. Raises: OperantError."""
    players = list(dict.fromkeys(options.pop("player", None) or [HUMAN]))
    count = taken(options, "games", 1 if HUMAN in players else GAMES)
    split, transcripts = options.pop("split", "test"), taken(options, "transcript", 0)
    require(split in ("train", "test"), f"--split {shown(split)}: it must be train or test")
    if count < 1 or transcripts < 0:
        raise OperantError(f"--games {count} --transcript {transcripts}: at least 1 game, and 0 transcripts or more")
    record, only_won = new_file("record", options.pop("record", None)), bool(options.pop("only_won", False))
    require(record is not None or not only_won, "--only-won is about what is recorded: give --record FILE too")
    data, sampling = ({n: options.pop(n) for n in [*options] if n.startswith(g)} for g in ("data.", "sampling."))
    model_sampling({}, sampling)
    refuse({} if "tasks" in options else data, data, " is about the rows of a file: give --tasks FILE too")
    read, seed = compose({"data": DataOptions}, data)["data"], taken(options, "seed", 0)
    return _Asked(players, count, split, transcripts, seed, record, only_won, sampling, read)


def play(words: Sequence[str], options: Options) -> int:
    """`operant play WORLD --player random --player runs/x`; without a player, a person plays in the terminal."""
    given = dict(options)
    asked, named, source = _asked(given), given.pop("env", None), given.pop("tasks", None)
    words = [*words, *([] if named is None else [str(named)])]
    require(len(words) == 1, "expected one world: operant play rooms")
    makers = {name: Human if name == HUMAN else simple_player(name) for name in asked.players}
    runs = {name: run_options(name) if makers[name] is None else {} for name in asked.players}
    options = flattened({**given, "env": words[0]})
    env = options.pop("env")
    if asked.players == [HUMAN]:
        world = named_world(env, options, {})
        has_tasks = source is not None or with_defaults(world, EnvBase).games is not None
        if world is not None and not isinstance(world, TextGames) and has_tasks:
            return _by_hand(world, source, asked)
    worlds = game_worlds(env, options, runs)
    require(source is None, f"--tasks {shown(source)}: {words[0]} has games of its own; leave it out")
    world = next(iter(worlds.values()))
    check_parts(world)
    models = {name: load(name) for name, maker in makers.items() if maker is None}
    tasks, split = world.games(asked.split)[: asked.count], asked.split
    if not tasks:  # such as game files of one's own, without others for evaluation
        tasks, split = world.games("train")[: asked.count], "train"
    if asked.record is not None and split == "test":
        other = "for a model that is tried on them, give --split train"
        print(f"games of split test are recorded; {other}", file=sys.stderr)
    if len(tasks) < asked.count or split != asked.split:
        print(f"{words[0]}: {len(tasks)} games of split {split} are played; it has no more", file=sys.stderr)
    table, demonstrations, refused = [], list[dict[str, str]](), 0
    try:
        for name, world in worlds.items():
            played, finished = Recorded(world), 0
            try:
                with suppress(LeftError):
                    if (make := makers[name]) is None:
                        sampling = model_sampling(runs[name], asked.sampling)
                        opening = stated_return(name, models[name][0].tokenizer)
                        play_by_model(played, tasks, *models[name], sampling, asked.seed, opening)
                        finished = len(tasks)
                    else:
                        for slot, task in enumerate(tasks):
                            play_by_player(played, slot, task, make(), random.Random(f"{asked.seed}/{task.id}"))
                            finished += 1
                            if make is Human and slot in played.games:
                                say(played.games[slot]["final"]["state"], f"{result(played.games[slot])}.".capitalize())
            finally:  # an interrupted player leaves the turns that it has played
                world.close()
                wanted = [slot for slot, game in played.games.items() if game["won"] or not asked.only_won]
                demonstrations += [row for slot in wanted for row in played.turns[slot]]
                refused += sum(played.refused[slot] for slot in wanted)
            for slot, why in played.failures.items():
                print(f"{name}: game {tasks[slot].id!r} has failed and is left out: {plain(why)}", file=sys.stderr)
            games = [played.games[slot] for slot in range(finished) if slot in played.games]
            for game in games[: asked.transcripts]:
                say(f"--- {name}: {game['name']}, {result(game)}", game["objective"])
                for turn in game["turns"]:
                    by = "" if turn["by"] == "policy" else f"  [{turn['by']}]"
                    thought = f"  ({turn['thought']})" if turn["thought"] else ""
                    say(turn["state"], f"> {turn['command']}{thought}{by}")
                say(game.get("final", {}).get("state", ""))
            table += [game_row(name, games)] if games else []
    except KeyboardInterrupt:
        finished = "below are the players that had finished" if table else "no player has finished"
        print(f"\noperant: interrupted; {finished}", file=sys.stderr)
        raise
    finally:
        if asked.record is not None:
            atomic_io.write_rows(asked.record, demonstrations)
            without = f"; {refused} that the game did not understand were left out" if refused else ""
            print(f"{len(demonstrations)} turns recorded: {asked.record}{without}")
        for line in aligned(table):
            emit(line)
    return 0


def _by_hand(world: Env, source: object, asked: _Asked) -> int:
    """Let a person reply in a world that is no text game. Raises: OperantError for one without tasks, and of it."""
    require(asked.record is None, f"--record is for text games, and {name_of(world)} has none; leave it out")
    cut = asked.data.prompt_tokens
    require(cut is None, f"--data.prompt-tokens {cut}: a person plays without a tokenizer; leave it out")
    given = None if source is None else load_tasks(source, None, asked.data)
    tasks = given or own_games(world, asked.split) or own_games(world, "train")
    try:
        with suppress(LeftError):
            for task in tasks[: asked.count]:
                step, turns = answers.reset(world, {0: task})[0], 0
                paid, prompt = _paid(step), step.text or task.prompt
                while step.failed is None and not (step.terminated or step.truncated):
                    step = answers.step(world, {0: _typed(prompt, step.options)}, {0: task})[0]
                    paid, turns, prompt = paid + _paid(step), turns + 1, step.text
                say(step.text, f"Failed: {step.info.get('failure', step.failed)}" if step.failed else "")
                say(f"The episode has ended after {turns} turn{'s' * (turns != 1)}, with a reward of {paid:g}.")
    finally:
        getattr(world, "close", lambda: None)()
    return 0


def _paid(step: Step) -> float:
    """All that a step pays: for this reply, for earlier ones, and for examples."""
    return step.reward + sum(step.paid.values()) + sum(reward for _, reward in step.examples)


def _typed(prompt: object, options: Sequence[str] | None) -> str:
    """What a person replies, or chooses. Raises: LeftError as `entered`."""
    say(prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False))
    while True:
        if options is not None:
            say("choose one: " + ", ".join(options))
        line = entered()
        if options is None or line in options:
            return line


def result(game: Mapping[str, object]) -> str:
    """How a game ended: `won in 7 turns`."""
    turns = f"{len(game['turns'])} turn{'s' * (len(game['turns']) != 1)}"
    return f"won in {turns}" if game["won"] else f"{'lost after' if game['lost'] else 'not won in'} {turns}"


def say(*texts: str) -> None:
    """Print texts of a world line by line, without characters that would move the cursor or change its colour."""
    for line in (line for text in filter(None, texts) for line in text.splitlines()):
        emit(plain(line))


with suppress(ImportError):  # Windows has none; its import gives `input` line editing and a history
    import readline  # noqa: F401
