"""A game that others made, learnt by choosing: `python -m benchmarks.guessing`, an hour of one core.

Protocol, fixed before anything was measured. TextArena's GuessTheNumber with the numbers 1 to 5 in three guesses.
`builtin:rooms`, which has never seen numbers, chooses among the five. 40 steps of GRPO on 64 episodes, groups of 8,
seeds 1 to 3; the control `coin` is the same game, paid in training by a coin for each episode. Measured on 64 held-out
games, each played 4 times by sampling and once by the likeliest choice, before and after; `random` draws a number.

A finished row is not repeated. Writes `benchmarks/results/guessing.json`; `make docs` writes the table.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.kept import places, restore, whole
from operant import Learner, train
from operant.apps.games.textarena import TextArena

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = places("bench-guessing", "guessing")
GAME = {"game": "GuessTheNumber-v0", "kwargs": {"max_number": 5, "max_turns": 3}, "commands": tuple("12345")}
GAME |= {"choose": True, "memory": 2, "test_games": 64}
WORLDS = {"grpo": "textarena", "coin": "benchmarks/shuffled.py:Coin"}
OPTIONS = {"policy": "builtin:rooms", "algorithm": "grpo", "samples": 8, "batch": 64, "max_tokens": 4, "probes": 0}
OPTIONS |= {"optimizer.lr": 3e-4, "learner.threads": 1} | {f"env.{name}": value for name, value in GAME.items()}


def won(policy: Any) -> dict[str, float]:
    """The share of held-out games that a policy wins."""
    world = TextArena(**GAME)
    learner = Learner(policy, env=world, algorithm="grpo", reference=None, max_tokens=4, seed=1234, threads=1)
    tasks = world.games("test")
    sampled = learner.play([task for task in tasks for _ in range(4)], stream="evaluate")
    likeliest = learner.play(tasks, stream="evaluate", sampling=replace(learner.sampling, top_k=1))
    shares = {"sampled": sampled, "greedy": likeliest}
    return {name: statistics.mean(r.info["game"]["won"] for r in replies) for name, replies in shares.items()}


def by_chance() -> dict[str, float]:
    """The share that random guesses win."""
    world, wins = TextArena(**GAME), list[bool]()
    for task in world.games("test"):
        for sample in range(4):
            chance, step = random.Random(f"{task.id}/{sample}"), world.reset({0: task})[0]
            while not (step.terminated or step.truncated):
                step = world.step({0: chance.choice(GAME["commands"])})[0]
            wins.append(step.info["game"]["won"])
    return {"sampled": statistics.mean(wins)}


def row(player: str, seed: int, steps: int) -> dict[str, Any]:
    if player == "random":
        return {"player": player, "seed": seed, "won": by_chance()}
    if player == "start":
        return {"player": player, "seed": seed, "won": won("builtin:rooms")}
    begun = time.process_time()
    run = train(env=WORLDS[player], seed=seed, steps=steps, out=RUNS / f"{player}-{seed}", **OPTIONS)
    whole(run)
    return {"player": player, "seed": seed, "seconds": time.process_time() - begun, "won": won(run.policy)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    parser.add_argument("--quick", action="store_true", help="only check that it runs: two steps, no results written")
    given = parser.parse_args()
    if given.quick:
        GAME["test_games"] = OPTIONS["env.test_games"] = 4
        print(json.dumps(row("coin", 1, 2)))
        return

    def place(found: dict[str, Any]) -> Path:
        return RUNS / f"{found['player']}-{found['seed']}.json"

    if given.keep:
        restore(RESULTS, place)
    wanted = [("random", 1), ("start", 1), *((player, seed) for seed in (1, 2, 3) for player in WORLDS)]
    for player, seed in wanted:
        path = place({"player": player, "seed": seed})
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(row(player, seed, 40)), encoding="utf-8")
    rows = [json.loads(place({"player": player, "seed": seed}).read_text(encoding="utf-8")) for player, seed in wanted]
    result = {"command": "python -m benchmarks.guessing", "rows": rows}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
