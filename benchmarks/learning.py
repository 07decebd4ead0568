"""W7: seconds until the mean reward of the demo task is 0.9, for operant and TRL 0.11.4 in turn. operant runs three
times: with all weights, with a frozen trunk, and with a frozen trunk at twice the learning rate.

The models, prompts, reward and hyper-parameters are the demo's on every side. A side's clock runs during its own steps
only, the first one included; loading is not counted. The mean is over the batches of the last three steps.
"""

import sys
from contextlib import ExitStack
from statistics import mean, median
from typing import Any

from benchmarks.driver import OURS, SIDES, Side, command_of
from operant.runs.config import configure

GOAL, OVER = 0.9, 3
FULL, TRUNK, FASTER, PEER = f"{OURS} full", f"{OURS} trunk", f"{OURS} trunk at twice the rate", "trl-0.11.4"
RATE = 2.0
"""The factor on the learning rate in `FASTER`; the table states it."""
NEVER = 1e9
"""A bound that is never reached, for clipping that TRL cannot turn off."""


def sides(seed: int) -> dict[str, tuple[list[str], dict[str, Any]]]:
    """The command of each side and the specification that it is sent."""
    ours = [sys.executable, str(SIDES / "operant_demo.py")]
    python, _ = command_of(PEER)
    return {
        FULL: (ours, {"options": {"seed": seed, "model.train_layers": None}}),
        TRUNK: (ours, {"options": {"seed": seed, "model.train_layers": "auto"}}),
        FASTER: (ours, {"options": {"seed": seed, "model.train_layers": "auto", "optimizer.lr": RATE * rate()}}),
        PEER: ([python, str(SIDES / "trl_0_11_demo.py")], theirs(seed)),
    }


def rate() -> float:
    """The learning rate of the demo."""
    return configure({}, "sentiment").learner["optimizer"].lr


def theirs(seed: int) -> dict[str, Any]:
    """The configuration of the demo, translated to TRL's options."""
    from operant.data import DataOptions, load_tasks
    from operant.storage.hub import find_model

    config = configure({}, "sentiment")
    train, options = config.train, config.learner
    update, loss, advantage, optimizer = (options[name] for name in ("update", "loss", "advantage", "optimizer"))
    assert optimizer.schedule == "linear" and options["kl"].control == "fixed" and options["score"].normalise
    ppo = {
        "batch_size": train.batch,
        "mini_batch_size": update.minibatch or train.batch,
        "ppo_epochs": update.epochs,
        "learning_rate": optimizer.lr,
        "max_grad_norm": optimizer.max_grad_norm,
        "adap_kl_ctrl": False,
        "init_kl_coef": options["kl"].coef,
        "gamma": advantage["gamma"],
        "lam": advantage["lam"],
        "cliprange": loss["clip"],
        "cliprange_value": loss["value_clip"] or NEVER,
        "vf_coef": loss["value_coef"],
        "ratio_threshold": update.ratio_threshold or NEVER,
    }
    sampling = options["sampling"]
    return {
        "seed": seed,
        "steps": train.steps,
        "ppo": ppo,
        "policy": find_model(train.policy),
        "reward": find_model(train.reward),
        "prompts": [task.prompt for task in load_tasks(train.tasks, None, DataOptions())],
        "generate": {"max_new_tokens": sampling.max_tokens, "min_new_tokens": sampling.min_tokens},
    }


def reached(rewards: list[float]) -> bool:
    return len(rewards) >= OVER and mean(rewards[-OVER:]) >= GOAL


def learn(seed: int, limit: float, steps: int | None = None, log=print) -> dict[str, dict[str, Any]]:
    """One seed: the sides step in turn, each until the goal, its last step or `limit` seconds of its own."""
    specs = sides(seed)
    steps = steps or specs[PEER][1]["steps"]
    with ExitStack() as stack:
        running = {name: stack.enter_context(Side(name, *spec)).build() for name, spec in specs.items()}
        all_sides = dict(running)
        while running:
            for name, side in list(running.items()):
                side.step()
                there = reached([a["reward"] for a in side.answers])
                spent = sum(a["seconds"] for a in side.answers)
                if there or len(side.answers) >= steps or spent > limit:
                    del running[name]
                    outcome = "reached" if there else f"not reached ({side.answers[-1]['reward']:.2f})"
                    log(f"  seed {seed}, {name}: {outcome} after {len(side.answers)} steps, {spent:.1f} s", flush=True)
        return {name: _curve(side) for name, side in all_sides.items()}


def _curve(side: Side) -> dict[str, Any]:
    rewards = [a["reward"] for a in side.answers]
    seconds = [a["seconds"] for a in side.answers]
    curve = {"reached": reached(rewards), "steps": len(rewards), "seconds": sum(seconds), "reward": rewards}
    curve |= {"kl": [a["kl"] for a in side.answers], "step_seconds": seconds}
    return curve | {"peak_mb": max(a["peak_mb"] for a in side.answers), "trained": side.about["trained"]}


def run(seeds: int = 3, limit: float = 900.0, steps: int | None = None, log=print) -> list[dict[str, Any]]:
    """One row for each of our variants. A side that misses the goal counts with all its seconds and is named."""
    curves = [learn(seed, limit, steps, log) for seed in range(1, seeds + 1)]
    return [row(name, curves) for name in (FULL, TRUNK, FASTER)]


def row(name: str, curves: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    ours, other = [c[name] for c in curves], [c[PEER] for c in curves]
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(ours, other, strict=True)]
    seconds = {"operant": median(a["seconds"] for a in ours), "peer": median(b["seconds"] for b in other)}
    peaks = {"operant": max(a["peak_mb"] for a in ours), "peer": max(b["peak_mb"] for b in other)}
    differences = [
        f"{side} did not reach {GOAL} with seed {i}" for i, c in enumerate(curves, 1) for side in _failed(c, name)
    ]
    if ours[0]["trained"] != other[0]["trained"]:
        differences.append(
            f"trained {ours[0]['trained']:,} here, {other[0]['trained']:,} there: no trunk: trains every layer"
        )
    if name == FASTER:
        differences.append(f"learning rate {RATE * rate():g} here, {rate():g} there: fewer weights are trained here")
    return {
        "work": "W7",
        "about": f"the demo task: seconds to mean reward {GOAL} over {OVER} steps, {len(curves)} seeds",
        "peer": PEER,
        "variant": f"ours {name.removeprefix(OURS).strip()}",
        "speed_ratio": seconds["peer"] / seconds["operant"],
        "memory_ratio": peaks["operant"] / peaks["peer"],
        "spread": [min(ratios), max(ratios)],
        "rounds": len(curves),
        "seconds": seconds,
        "peak_mb": peaks,
        "steps": {"operant": [a["steps"] for a in ours], "peer": [b["steps"] for b in other]},
        "curves": {"operant": ours, "peer": other},
        "differences": differences,
    }


def _failed(curves: dict[str, dict[str, Any]], name: str) -> list[str]:
    return [side for side in (name, PEER) if not curves[side]["reached"]]
