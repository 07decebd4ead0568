"""W7: seconds until the demo task's mean reward is 0.9, ours and TRL 0.11.4's, in turn. Ours is run three times: all
weights, with a trunk, and with a trunk at twice the rate.

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
"""How much faster half of the layers are trained in `FASTER`, which the table names."""
NEVER = 1e9
"""For what TRL cannot turn off."""


def sides(seed: int) -> dict[str, tuple[list[str], dict[str, Any]]]:
    """How each side is started, and what it is told."""
    ours = [sys.executable, str(SIDES / "operant_demo.py")]
    python, _ = command_of(PEER)
    return {
        FULL: (ours, {"options": {"seed": seed, "model.train_layers": None}}),
        TRUNK: (ours, {"options": {"seed": seed, "model.train_layers": "auto"}}),
        FASTER: (ours, {"options": {"seed": seed, "model.train_layers": "auto", "optimizer.lr": RATE * rate()}}),
        PEER: ([python, str(SIDES / "trl_0_11_demo.py")], theirs(seed)),
    }


def rate() -> float:
    """The demo's own."""
    return configure({}, "sentiment").learner["optimizer"].lr


def theirs(seed: int) -> dict[str, Any]:
    """The demo's own configuration, in TRL's words."""
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


def learn(seed: int, limit: float, steps: int | None = None, say=print) -> dict[str, dict[str, Any]]:
    """One seed: every side steps in turn until it is there, at its last step, or over `limit` seconds of its own."""
    told = sides(seed)
    steps = steps or told[PEER][1]["steps"]
    with ExitStack() as stack:
        running = {name: stack.enter_context(Side(name, *how)).build() for name, how in told.items()}
        everyone = dict(running)
        while running:
            for name, side in list(running.items()):
                side.step()
                there = reached([a["reward"] for a in side.answers])
                spent = sum(a["seconds"] for a in side.answers)
                if there or len(side.answers) >= steps or spent > limit:
                    del running[name]
                    outcome = "reached" if there else f"not reached ({side.answers[-1]['reward']:.2f})"
                    say(f"  seed {seed}, {name}: {outcome} after {len(side.answers)} steps, {spent:.1f} s", flush=True)
        return {name: _curve(side) for name, side in everyone.items()}


def _curve(side: Side) -> dict[str, Any]:
    rewards = [a["reward"] for a in side.answers]
    seconds = [a["seconds"] for a in side.answers]
    told = {"reached": reached(rewards), "steps": len(rewards), "seconds": sum(seconds), "reward": rewards}
    told |= {"kl": [a["kl"] for a in side.answers], "step_seconds": seconds}
    return told | {"peak_mb": max(a["peak_mb"] for a in side.answers), "trained": side.about["trained"]}


def run(seeds: int = 3, limit: float = 900.0, steps: int | None = None, say=print) -> list[dict[str, Any]]:
    """A row for each of ours. A side that never gets there counts with all its seconds, and is named."""
    curves = [learn(seed, limit, steps, say) for seed in range(1, seeds + 1)]
    return [row(name, curves) for name in (FULL, TRUNK, FASTER)]


def row(name: str, curves: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    ours, other = [c[name] for c in curves], [c[PEER] for c in curves]
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(ours, other, strict=True)]
    seconds = {"operant": median(a["seconds"] for a in ours), "peer": median(b["seconds"] for b in other)}
    peaks = {"operant": max(a["peak_mb"] for a in ours), "peer": max(b["peak_mb"] for b in other)}
    said = [f"{side} did not reach {GOAL}: seed {i}" for i, c in enumerate(curves, 1) for side in _failed(c, name)]
    if ours[0]["trained"] != other[0]["trained"]:
        said.append(f"trained {ours[0]['trained']:,} here, {other[0]['trained']:,} there: no trunk: trains every layer")
    if name == FASTER:
        said.append(f"a rate of {RATE * rate():g} here, {rate():g} there: what is trained of the model is less")
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
        "differences": said,
    }


def _failed(curves: dict[str, dict[str, Any]], name: str) -> list[str]:
    return [side for side in (name, PEER) if not curves[side]["reached"]]
