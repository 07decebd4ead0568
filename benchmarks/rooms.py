"""What the players of the world of rooms reach: `python -m benchmarks.rooms`, hours on two cores.

Protocol, fixed before anything was measured: 64 games that were never trained on, 8 rooms, 50 turns at most. Each is
played 4 times with sampled commands and once with the likeliest ones. Every player is trained with seeds 1 to 3, on one
thread: PPO for the steps of the recipe, SFT for 4,000 steps and for as many as take as long as PPO, and none for
more than `--minutes` of processor time (other work on the machine does not count). Random play and the starting model
are not trained. Two run at a time. A finished run is not repeated. Writes `benchmarks/results/rooms.json`; `make docs`
writes the tables.
"""

import argparse
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import operant
from benchmarks.kept import restore, whole
from operant import Learner, Task
from operant.api import runs
from operant.apps.games.rooms import Rooms
from operant.machine import about
from operant.types import Env, Rollout

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = ROOT / "runs/bench-rooms", ROOT / "benchmarks/results/rooms.json"
RECIPE: dict[str, Any] = {"recipe": "rooms", "quiet": True, "threads": "1"}


class Shuffled(Rooms):
    """The same games, where every reward was earned by another turn: a turn is paid what the turn before it has earned
    in another episode that is played at the same time."""

    def step(self, replies: Any) -> Any:
        steps = super().step(replies)
        slots = sorted(steps)
        chance = random.Random(f"{slots} {[reply for _, reply in sorted(replies.items())][:8]}")
        paid = [steps[slot].reward for slot in slots]
        chance.shuffle(paid)
        return {slot: operant.Step(**{**vars(steps[slot]), "reward": reward}) for slot, reward in zip(slots, paid)}


PLAYERS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "grpo": {"algorithm": "grpo", "samples": 8, "lr": 5e-4},
    "rejection": {"algorithm": "rejection", "select": "top:25%", "lr": 5e-4, "steps": 120},
    "shuffled": {"env": Shuffled},
    "sft": {"algorithm": "sft", "steps": 4000},
    "sft-long": {"algorithm": "sft", "steps": 10_000},
}
"""The options of each, besides those of the recipe."""


def record(rollout: Rollout) -> dict[str, Any]:
    return rollout.info["game"]


def measured(rollouts: list[Rollout]) -> dict[str, float]:
    """Success rate with its standard error over games, and means over the episodes."""
    games: dict[str, list[bool]] = {}
    for rollout in rollouts:
        games.setdefault(record(rollout)["name"], []).append(record(rollout)["won"])
    rates = [statistics.mean(wins) for wins in games.values()]
    turns = [len(record(r)["turns"]) for r in rollouts if record(r)["won"]]
    optimum = [record(r)["optimum"] for r in rollouts if record(r)["won"]]
    every = [turn for r in rollouts for turn in record(r)["turns"]]
    return {
        "won": statistics.mean(rates),
        "error": statistics.stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else 0.0,
        "score": statistics.mean(record(r)["score"] / record(r)["most"] for r in rollouts),
        "turns": statistics.mean(turns) if turns else math.nan,
        "optimum": statistics.mean(optimum) if optimum else math.nan,
        "valid": statistics.mean(turn["valid"] for turn in every),
        "copied": statistics.mean(turn["copied"] for turn in every),
        "empty": statistics.mean(not turn["command"] for turn in every),
        "states": 1000 * len({(r.task.id, turn["key"]) for r in rollouts for turn in record(r)["turns"]}) / len(every),
        "tokens": statistics.mean(len(turn.prompt) + len(turn.action) for r in rollouts for turn in r.turns),
    }


def evaluate(policy: Any, world: Env, tasks: list[Task], samples: int = 4) -> dict[str, dict[str, float]]:
    """Play held-out tasks: sampled, and with the likeliest tokens."""
    learner = Learner(policy, env=world, algorithm="rloo", reference=None, max_tokens=12, seed=1234, threads="1")
    sampled = learner.play([task for task in tasks for _ in range(samples)], stream="evaluate")
    likeliest = learner.play(tasks, stream="evaluate", sampling=replace(learner.sampling, top_k=1))
    return {"sampled": measured(sampled), "greedy": measured(likeliest)}


def random_play(world: Rooms, tasks: list[Task], samples: int = 4) -> dict[str, dict[str, float]]:
    """A player that draws from the admissible commands."""
    rollouts = []
    for task in tasks:
        for sample in range(samples):
            chance, ended = random.Random(f"{task.id}/{sample}"), False
            world.reset({0: task})
            while not ended:
                step = world.step({0: chance.choice(world.playing(0)[1].commands)})[0]
                ended = step.terminated or step.truncated
            rollouts.append(Rollout(task, 0, [operant.Turn([0], [0])], [""], info=step.info))
    return {"sampled": measured(rollouts)}


def train(player: str, seed: int, minutes: float) -> tuple[dict[str, Any], Any]:
    """Train for so many minutes; returns what was measured, and the policy."""
    options = {**RECIPE, **PLAYERS.get(player, {}), "seed": seed, "out": RUNS / f"{player}-{seed}"}
    if options.get("algorithm") == "sft":  # the walkthroughs of the training games go on
        options = {k: v for k, v in options.items() if k != "recipe"}
        options |= {"policy": "builtin:rooms", "tasks": str(ROOT / "runs/bench-rooms/walkthroughs.jsonl"), "batch": 32}
        options |= {"lr": 3e-4, "probes": 0, "schedule": "linear"}
    begin, seconds, curve = time.process_time(), 0.0, []
    for run in runs(**options):
        seconds = time.process_time() - begin
        if run.metrics:
            curve.append([seconds, run.metrics[-1].get("game/won"), run.metrics[-1].get("reward/mean")])
        if seconds > 60 * minutes and run.metrics:
            break  # the run ends and is saved, like one that was interrupted
    whole(run)
    few = curve[:: len(curve) // 100 + 1]
    return {"seconds": seconds, "steps": len(curve), "curve": few}, run.policy


def one(player: str, seed: int, minutes: float, games: int) -> None:
    """One row of the players."""
    world = Rooms(test_games=games, memory=0)
    tasks = world.games("test")
    if player == "random":
        found: dict[str, Any] = {"evaluation": random_play(world, tasks)}
    elif player == "start":
        found = {"evaluation": evaluate("builtin:rooms", world, tasks)}
    else:
        found, policy = train(player, seed, minutes)
        found["evaluation"] = evaluate(policy, world, tasks)
    RUNS.mkdir(parents=True, exist_ok=True)
    (RUNS / f"{player}-{seed}.json").write_text(json.dumps({"player": player, "seed": seed, **found}))
    print(player, seed, json.dumps(found["evaluation"]), flush=True)


VARIANTS: dict[str, dict[str, Any]] = {
    **{f"memory {n}": {"env.memory": n} for n in (0, 1, 3, 8)},
    **{f"template {name}": {"env.template": name} for name in ("state_info_you", "what_do_you_do", "fork", "thought")},
    "examples 0.33": {"env.examples": 0.33, "env.memory": 1},
    "choice": {"env.choose": True},
    **{f"turn discount {g:g}": {"turn_gamma": g} for g in (0, 0.6, 1)},
}
"""Changes of the recipe, one seed each: a model that starts as `builtin:rooms` learns the walkthroughs as the variant
shows them, and then plays. `memory 0` is the recipe itself."""
WARM, STEPS = 100, 12
"""Steps on the walkthroughs, and of PPO, of a variant."""


def variant(name: str) -> None:
    """One row of the variants."""
    changes, out = VARIANTS[name], RUNS / name.replace(" ", "-")
    options = {key.removeprefix("env."): value for key, value in changes.items() if key.startswith("env.")}
    world = Rooms(test_games=32, **{"memory": 0, "invalid": -0.02, **options})
    sys.path[:0] = [str(ROOT / "recipes")]
    import train_rooms_lm

    out.mkdir(parents=True, exist_ok=True)
    shown = {key: value for key, value in {"memory": 0, **options}.items() if key in ("memory", "template")}
    rows = train_rooms_lm.write(out / "rows.jsonl", train_rooms_lm.walkthroughs(200, **shown))
    plain: dict[str, Any] = {"quiet": True, "threads": "1", "probes": 0}
    sft: dict[str, Any] = {"algorithm": "sft", "steps": WARM, "batch": 32, "lr": 3e-4, "schedule": "linear"}
    run = operant.train("builtin:rooms", rows, out=out / "sft", **plain, **sft)
    whole(run)
    found: dict[str, Any] = {"variant": name, "before": evaluate(run.policy, world, world.games("test"), 2)}
    begin = time.process_time()
    ppo = (
        RECIPE
        | plain
        | {"policy": str(run.path / "export"), "steps": STEPS, "warmup": 0.2, "out": out / "ppo"}
        | changes
    )
    run = operant.train(**ppo)
    whole(run)
    found |= {"seconds": time.process_time() - begin, "after": evaluate(run.policy, world, world.games("test"), 2)}
    found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    (RUNS / f"{out.name}.json").write_text(json.dumps(found))
    print(json.dumps(found), flush=True)


def file_of(name: str, seed: object) -> str:
    """The name of the file of a row."""
    return name.replace(" ", "-") if name in VARIANTS else f"{name}-{seed}"


def summary(minutes: float) -> dict[str, Any]:
    rows = [json.loads(path.read_text()) for path in sorted(RUNS.glob("*.json"))]
    return {"command": "python -m benchmarks.rooms", "machine": about(), "minutes": minutes, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="players and variants, separated by commas")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--games", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    parser.add_argument("--one", nargs=2, metavar=("PLAYER", "SEED"), help="one run, in this process")
    given = parser.parse_args()
    if given.one:
        if given.one[0] in VARIANTS:
            variant(given.one[0])
        else:
            one(given.one[0], int(given.one[1]), given.minutes, given.games)
        return
    names = given.only.split(",") if given.only else ["random", "start", *PLAYERS, *VARIANTS]
    seeds = given.seeds.split(",")
    once = ("random", "start", *VARIANTS)
    jobs = [(name, seed) for seed in seeds for name in names if name not in once or seed == seeds[0]]
    if given.keep:
        restore(RESULTS, lambda row: RUNS / f"{file_of(row.get('player', row.get('variant')), row.get('seed'))}.json")
    if {"sft", "sft-long"} & {*names}:
        write_walkthroughs(RUNS / "walkthroughs.jsonl")

    def run(job: tuple[str, str]) -> None:
        if (RUNS / f"{file_of(*job)}.json").is_file():
            return
        words = [sys.executable, "-m", "benchmarks.rooms", "--one", *job, "--minutes", str(given.minutes)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run([*words, "--games", str(given.games)], cwd=ROOT, env=environment, check=True)

    RUNS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(run, jobs))
    RESULTS.write_text(json.dumps(summary(given.minutes), indent=1, allow_nan=True) + "\n", encoding="utf-8")


def write_walkthroughs(path: Path) -> None:
    """The walkthroughs that the starting model was trained on."""
    sys.path[:0] = [str(ROOT / "recipes")]
    import train_rooms_lm

    path.parent.mkdir(parents=True, exist_ok=True)
    train_rooms_lm.write(path, train_rooms_lm.walkthroughs(200, memory=0))


if __name__ == "__main__":
    main()
