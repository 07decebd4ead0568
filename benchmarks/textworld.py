"""TextWorld games: how fast they are made and played, and what players without a model score.

    python -m benchmarks.textworld --speed      # five minutes -> benchmarks/results/textworld-speed.json
    python -m benchmarks.textworld --players    # an hour if all games must be made, else two minutes
                                                # -> benchmarks/results/textworld-players.json
    python -m benchmarks.textworld --trained    # half an hour a row -> benchmarks/results/textworld-trained.json

A trained player starts as `builtin:rooms`, which has never seen TextWorld, or as a larger model made from nothing.
First it learns to write admissible commands, from random play of the training games of every kind; all rows begin with
this reader. It then learns the walkthroughs of the training games of one kind (sft), and then plays them (ppo), on one
thread. Every unseen game is played 4 times with sampled commands and once with the likeliest ones. All times are
processor time of one process, so that other work on the machine does not count.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import operant
from benchmarks.kept import restore, whole
from benchmarks.rooms import evaluate
from operant.api import runs
from operant.apps.games import textworld
from operant.apps.games.textworld import TextWorld, TextWorldGame
from operant.envs.players import FixedPlayer, OverlapPlayer, RandomPlayer, WalkthroughPlayer, play

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = ROOT / "runs/bench-textworld", ROOT / "benchmarks/results"
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "tw-simple, detailed goal": ({"game": "tw-simple", "goal": "detailed"}, 25),
    "tw-simple, brief goal": ({"game": "tw-simple", "goal": "brief", "train_games": 20}, 25),
    "tw-simple, no goal": ({"game": "tw-simple", "goal": "none", "train_games": 20}, 25),
    "coin collector, level 5": ({"game": "tw-coin_collector", "level": 5}, 10),
    "coin collector, level 10": ({"game": "tw-coin_collector", "level": 10, "train_games": 20}, 20),
    "treasure hunter, level 5": ({"game": "tw-treasure_hunter", "level": 5}, 6),
    "tw-cooking": ({"game": "tw-cooking"}, 20),
}
"""The options of each kind of game, and the most turns: near twice the walkthrough. Where games are hardly ever
repeated, fewer of them are made: they are needed to leave out what repeats them, and for the fixed route."""
EPISODES = 2
"""Episodes of each unseen game and player."""
TRAINED = (
    "tw-simple, detailed goal",
    "tw-simple, brief goal",
    "coin collector, level 5",
    "treasure hunter, level 5",
    "coin collector, level 10",
    "tw-cooking",
)
"""The kinds of games that a model is trained on."""
READ_STEPS, PASSES = 600, 4
"""Steps on random play, of 32 commands each, and passes over the walkthroughs."""
TURNS = 20
"""Most turns of an episode when speed is measured."""


def players() -> None:
    """The score of each player in the unseen games, divided by the largest score, and the share of games won."""
    rows = []
    for name, (options, turns) in KINDS.items():
        world = TextWorld(**options)
        tasks = world.games("test")
        dropped, described = world.dropped, list(world._select(False, world.train_games, set()).values())
        route = max(set(described), key=described.count).split("\n")
        makers = {
            "random": RandomPlayer,
            "fixed": lambda route=route: FixedPlayer(route),
            "overlap": lambda: OverlapPlayer(repeat=True),
            "overlap, no repeats": OverlapPlayer,
            "walkthrough": WalkthroughPlayer,
        }
        for player, make in makers.items():
            scores, wins, lengths = [], 0, []
            for task in tasks:
                game = world.make(task)
                for episode in range(EPISODES):
                    states = play(game, make(), seed=f"{task.id}/{episode}", max_turns=turns)
                    last = states[-1][1]
                    scores.append(last.score / last.most)
                    wins, lengths = wins + last.won, [*lengths, len(states)]
                game.close()
            row = {
                "games": name,
                "player": player,
                "unseen": len(tasks),
                "train": len(described),
                "dropped": dropped,
                "max_turns": turns,
            }
            row |= {"episodes": len(scores), "score": statistics.mean(scores), "wins": wins / len(scores)}
            rows.append(row | {"turns": statistics.mean(lengths)})
            print(row, flush=True)
        _write("players", rows, episodes_per_game=EPISODES)


def speed(steps: int = 300) -> None:
    """Turns per second of processor time, seconds to make a game, and memory."""
    import textworld as theirs

    rows, process = [], psutil.Process()
    imported = process.memory_info().rss
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tw-simple", "tw-coin_collector", "tw-treasure_hunter", "tw-cooking", "custom"):
            kind = TextWorld(game=name).kind(False)
            answer, seconds = textworld.maker(None), []
            for seed in range(1, 5):
                path = f"{folder}/{name}-{seed}.json"
                for request in ({"path": path, "kind": kind, "seed": seed}, {"path": path}):
                    begin = sum(os.times()[:4])  # the compiler is a process of its own
                    answer(request)
                    seconds.append(sum(os.times()[:4]) - begin)
            game = str(Path(path).with_suffix(".z8"))
            row = {"game": name, "first": sum(seconds[:2]), "describe": statistics.median(seconds[2::2])}
            row |= {"compile": statistics.median(seconds[3::2])}
            infos = theirs.EnvInfos
            row["theirs, text"] = _theirs(game, infos(), steps)
            some = {"description": True, "inventory": True, "admissible_commands": True}
            row["theirs, some"] = _theirs(game, infos(**some), steps // 3)
            every = {name: True for name in infos.__slots__ if name != "extras"}
            row["theirs, all"] = _theirs(game, infos(**every), steps // 10)
            textworld._SEEN.clear()
            row["ours, first"] = _ours(game, steps // 3, 0)
            _ours(game, 3 * steps, 1)
            row["ours, later"] = _ours(game, steps, 2)
            textworld._SEEN.clear()
            _ours(game, steps, 1, frozenset())
            row["ours, text"] = _ours(game, steps, 2, frozenset())
            before = process.memory_info().rss
            live = [TextWorldGame(game) for _ in range(20)]
            for playing in live:
                playing.reset()
            row["live_mb"] = (process.memory_info().rss - before) / 20e6
            del live
            rows.append(row)
            print(row, flush=True)
            _write("speed", rows, steps=steps, imported_mb=imported / 1e6)


def _theirs(path: str, infos: Any, steps: int) -> float:
    """Turns per second of TextWorld's own environment, in the same episodes as `_ours`."""
    import textworld as theirs

    game = TextWorldGame(path)
    episodes = [play(game, RandomPlayer(), seed=f"0/{n}", max_turns=TURNS) for n in range(steps // TURNS + 1)]
    game.close()
    env = theirs.start(path, infos)
    begin = time.process_time()
    for episode in episodes:
        env.reset()
        for command, _ in episode:
            env.step(command)
    return sum(map(len, episodes)) / (time.process_time() - begin)


def _ours(path: str, steps: int, seed: int, wanted: frozenset[str] = textworld.ALL) -> float:
    """Turns per second of `TextWorldGame`, played at random from the beginning, again and again."""
    game, played, number = TextWorldGame(path, wanted | {"commands"}), 0, 0
    begin = time.process_time()
    while played < steps:
        played += len(play(game, RandomPlayer(), seed=f"{seed}/{number}", max_turns=TURNS))
        number += 1
    seconds = time.process_time() - begin
    game.close()
    return played / seconds


def trained(kind: str, size: str, choose: bool, minutes: float, seed: int) -> None:
    """Walkthroughs, then PPO for so many minutes; what both reach in unseen games goes to a file of its own."""
    options, turns = KINDS[kind]
    shown = {"memory": 1, "invalid": -0.02, "choose": choose, "max_turns": turns}
    world, folder = TextWorld(**options, **shown), RUNS / _row_name(kind, size, choose, seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = list(_walkthroughs(world))
    (folder / "walkthroughs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain: dict[str, Any] = {"quiet": True, "threads": "1", "probes": 0, "seed": seed}
    sft: dict[str, Any] = {"algorithm": "sft", "steps": PASSES * len(rows) // 32, "batch": 32, "lr": 5e-4}
    sft["schedule"] = "linear"
    run = operant.train(reader(size), str(folder / "walkthroughs.jsonl"), out=folder / "sft", **plain, **sft)
    whole(run)
    found: dict[str, Any] = {"games": kind, "size": size, "choose": choose, "seed": seed, "max_turns": turns}
    found["sft"] = evaluate(run.policy, world, world.games("test"))
    ppo = plain | {"recipe": "textworld", "policy": str(run.path / "export"), "steps": 100_000, "schedule": "constant"}
    ppo |= {"warmup": 5e-5, "batch": 32}  # of five steps
    ppo |= {f"env.{name}": value for name, value in (options | shown).items()}
    begin = time.process_time()
    for run in runs(out=folder / "ppo", **ppo):
        found["seconds"] = time.process_time() - begin
        if found["seconds"] > 60 * minutes and run.metrics:
            break  # the run ends and is saved, like one that was interrupted
    whole(run)
    found |= {"steps": len(run.metrics), "ppo": evaluate(run.policy, world, world.games("test"))}
    (RUNS / f"{folder.name}.json").write_text(json.dumps(found))
    print(json.dumps(found), flush=True)


def _row_name(kind: str, size: str, choose: bool, seed: int) -> str:
    return f"{kind}-{size}-{'choice' if choose else 'free'}-{seed}".replace(", ", "-").replace(" ", "-")


def _walkthroughs(world: TextWorld) -> Iterator[dict[str, str]]:
    """One row for each command of the solutions of the training games."""
    for task in world.games("train"):
        prompt = world.reset({0: task})[0].text
        while (command := world.playing(0)[0].expert()) is not None:
            yield {"prompt": prompt, "completion": f" {command}"}
            prompt = world.step({0: command})[0].text


def reader(size: str) -> str:
    """The folder of a model that writes admissible commands, as drawn in random play. It is trained once."""
    folder = RUNS / f"reader-{size}"
    if not (folder / "export").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "random.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _random_play()))
        options: dict[str, Any] = {
            "quiet": True,
            "threads": "1",
            "probes": 0,
            "algorithm": "sft",
            "batch": 32,
            "lr": 1e-3,
        }
        options |= {"steps": READ_STEPS, "warmup": 0.05, "schedule": "linear", "out": folder / "sft"}
        start = "builtin:rooms" if size == "0.5M" else _larger(folder / "start")
        run = operant.train(start, str(folder / "random.jsonl"), **options)
        whole(run)
        (run.path / "export").rename(folder / "export")
    return str(folder / "export")


def _random_play(rows: int = 4000) -> Iterator[dict[str, str]]:
    """So many rows of each kind: a verb is drawn, and then one of its commands."""
    for kind in TRAINED:
        options, turns = KINDS[kind]
        world, chance, made = TextWorld(**options, memory=1, max_turns=turns), random.Random(kind), 0
        tasks = world.games("train")
        while made < rows:
            step, ended = world.reset({0: tasks[made % len(tasks)]})[0], False
            while not ended:
                commands = world.playing(0)[1].commands
                verb = chance.choice(sorted({command.split()[0] for command in commands}))
                command = chance.choice([command for command in commands if command.startswith(verb)])
                yield {"prompt": step.text, "completion": f" {command}"}
                step, made = world.step({0: command})[0], made + 1
                ended = step.terminated or step.truncated


def _larger(folder: Path) -> str:
    """A model of 1.6 million weights that has read nothing."""
    size: Any = {"hidden_size": 160, "num_hidden_layers": 4, "num_attention_heads": 5, "intermediate_size": 432}
    ends: Any = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": True}
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(vocab_size=2048, max_position_embeddings=1024, **size, **ends)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "src/operant/builtin/rooms").save_pretrained(folder)
    return str(folder)


def all_trained(only: str | None, minutes: float, seeds: list[int], at_once: int) -> None:
    """Train every row that has no file yet, and gather them. `only` names parts of the rows' names."""
    rows = [(kind, "0.5M", choose, seed) for seed in seeds for choose in (False, True) for kind in TRAINED]
    rows += [(kind, "1.6M", False, seed) for seed in seeds for kind in TRAINED]

    def run(row: tuple[str, str, bool, int]) -> None:
        name = _row_name(*row)
        if (RUNS / f"{name}.json").is_file() or (only and not any(part in name for part in only.split(","))):
            return
        kind, size, choose, seed = row
        words = [sys.executable, "-m", "benchmarks.textworld", "--one", kind, size, str(int(choose)), str(seed)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run([*words, "--minutes", str(minutes)], cwd=ROOT, env=environment, check=True)

    reader("0.5M")  # by one process; the rows share it
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, rows))
    found = [json.loads(path.read_text()) for path in sorted(RUNS.glob("*.json"))]
    _write("trained", found, passes=PASSES, read_steps=READ_STEPS)


def _write(name: str, rows: list[dict[str, Any]], **known: Any) -> None:
    result = {"command": f"python -m benchmarks.textworld --{name}", **known, "rows": rows}
    (RESULTS / f"textworld-{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--speed", action="store_true", help="turns per second, seconds to make games, memory")
    parser.add_argument("--players", action="store_true", help="scores of players without a model")
    parser.add_argument("--trained", action="store_true", help="scores of trained models")
    parser.add_argument(
        "--only", help="with --trained: parts of the names of rows, as tw-simple-detailed-goal-0.5M-choice,coin"
    )
    parser.add_argument("--minutes", type=float, default=6.0, help="of PPO")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="with --trained: keep the rows of the committed results")
    parser.add_argument("--one", nargs=4, metavar=("KIND", "SIZE", "CHOOSE", "SEED"), help="one row, in this process")
    args = parser.parse_args()
    if args.one:
        kind, size, choose, seed = args.one
        trained(kind, size, choose == "1", args.minutes, int(seed))
        return 0
    if not (args.speed or args.players or args.trained):
        parser.error("say --speed, --players or --trained")
    if args.speed:
        speed()
    if args.players:
        players()
    if args.trained:
        if args.keep:
            names = ("games", "size", "choose", "seed")
            restore(
                RESULTS / "textworld-trained.json", lambda row: RUNS / f"{_row_name(*(row[n] for n in names))}.json"
            )
        all_trained(args.only, args.minutes, [int(seed) for seed in args.seeds.split(",")], args.at_once)
    return 0


if __name__ == "__main__":
    sys.exit(main())
