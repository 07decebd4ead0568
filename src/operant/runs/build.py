"""Configuration to objects, the cheap before the expensive: a mistake shows before any model loads."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from operant import rewards
from operant.algorithms import find
from operant.data import DataOptions, Order, load_tasks
from operant.options import values
from operant.rollouts.demonstrations import Demonstrations
from operant.runs.config import Config
from operant.runs.evaluate import Evaluator
from operant.runs.probe_prompts import Probes
from operant.sampling import check_ids
from operant.training.learner import Learner
from operant.types import Env, OperantError, RewardFn, Task


@dataclass(frozen=True)
class Built:
    """What a run is made of."""

    learner: Learner
    tasks: list[Task]
    order: Order
    reward: RewardFn | None
    """None where the world alone pays, or the replies are given."""
    held_out: list[Task]
    evaluator: Evaluator | None
    """None where there are no held-out tasks."""
    probes: Probes | None
    demonstrations: Demonstrations | None = None
    """How given replies become rows; None where the policy plays."""


def build(config: Config, *, tokenizer: Any = None, env: Env | None = None) -> Built:
    """Load what the configuration names. Raises: OperantError in a sentence for whatever cannot be had."""
    train, sampling = config.train, config.learner["sampling"]
    reward = None if train.reward is None else rewards.under(rewards.resolve(train.reward), config.isolation)
    given = find(train.algorithm).source == "data"
    for source in (train.tasks, train.evaluate):
        _peek(source, config.data, given)
    if reward is not None:
        rewards.check(reward)
    learner = Learner(
        train.policy,
        tokenizer=tokenizer,
        reference=train.reference,
        algorithm=train.algorithm,
        env=env,
        total_steps=train.steps,
        **{f"{group}.{k}": v for group, made in config.learner.items() for k, v in values(made).items()},
    )
    policy = learner.policy
    # An encoder-decoder reads a prompt and writes a reply of its own length.
    room = 0 if policy.encoder_decoder else sampling.max_tokens
    bounds = {"context": policy.context, "max_new": room, "vocabulary": policy.vocabulary}
    seed = config.learner["learner"].seed
    bounds |= {"with_replies": given}
    tasks = load_tasks(train.tasks, policy.tokenizer, config.data, seed, **bounds)
    held_out = load_tasks(train.evaluate, policy.tokenizer, config.data, seed, **bounds) if train.evaluate else []
    demonstrations = _demonstrations(learner, config.data, [*tasks, *held_out]) if given else None
    evaluator = Evaluator(learner, held_out, reward, config.evaluation, demonstrations) if held_out else None
    asked = (held_out or tasks)[: train.probes]
    asked = asked if demonstrations is None else [demonstrations.opening(task) for task in asked]
    probes = Probes(learner, asked, reward) if asked else None
    return Built(learner, tasks, Order(len(tasks), seed), reward, held_out, evaluator, probes, demonstrations)


def _demonstrations(learner: Learner, data: DataOptions, tasks: list[Task]) -> Demonstrations:
    """Raises: OperantError for the first row that cannot be trained on, before anything is."""
    policy = learner.policy
    if data.loss_on == "all" and policy.encoder_decoder:
        raise OperantError("data.loss_on=all: an encoder-decoder writes replies and no prompts; use replies")
    stop = next(iter(sorted(learner.sampling.stops)), None)
    everything = data.loss_on == "all"
    made = Demonstrations(policy.tokenizer, stop, everything, data.max_length, policy.encoder_decoder)
    for task in tasks:
        for turn in (turn for rollout in made.rollouts([task]) for turn in rollout.turns):
            check_ids([*turn.prompt, *turn.action], policy.vocabulary, f"task {task.id!r}")
            if (why := policy.misfit(len(turn.prompt), len(turn.action))) is not None:
                raise OperantError(f"task {task.id!r} {why}; leave it out, or cut long rows: --data.max-length N")
    return made


def _peek(source: Any, data: DataOptions, given: bool) -> None:
    """Read the first row of a file before any model loads, so that a wrong path or field costs nothing."""
    if isinstance(source, (str, Path)):
        load_tasks(source, None, replace(data, query_tokens=None, limit=1, shuffle=False), with_replies=given)
