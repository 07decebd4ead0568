"""Builds the objects that a configuration names. Cheap checks come first, so that errors show before a model loads."""

import warnings
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

from operant import distributed, rewards
from operant.algorithms import find
from operant.data import DataOptions, Order, load_tasks
from operant.data.demonstrations import Demonstrations, WholeTexts
from operant.data.recorded import RecordedReplies, read_recorded
from operant.data.sources import rows_that_decide, share, split_off
from operant.data.tasks import EVERY, left_out
from operant.envs import check_parts
from operant.envs.isolated import IsolatedEnv
from operant.metrics.evaluation import EvaluationMetric, prepared, resolve
from operant.models.base import ReadingPolicy
from operant.models.loading import Trained, load_own_weights, load_policy, saved_action_values
from operant.models.reference import fingerprint
from operant.models.safe_loading import load_tokenizer
from operant.rewards.isolated import under
from operant.runs import named_parts
from operant.runs.ahead import Ahead
from operant.runs.config import Config, opened, option_of_error
from operant.runs.evaluate import Evaluator
from operant.runs.folder import Journal, read_config
from operant.runs.parts import RunParts
from operant.runs.scored_rollouts import Probes
from operant.sampling import check_ids, counter, encode_prompt, template_of
from operant.storage.hub import BUILTIN, OWN, exported, found
from operant.training.learner import Learner, default_engine
from operant.types import Engine, EngineParts, EnvBase, OperantError, Rollout, Task, Tokenizer, shown, with_defaults


def reward_and_world(config: Config, closing: ExitStack, journal: Journal | None) -> tuple[Any, Any, list[Any]]:
    """The reward, the world, and all rewards that judge, also in the world. The arguments are those of `build`."""
    train, own = config.train, {kind: config.parts.get(kind, {}) for kind in ("reward", "env")}
    reward = None if train.reward is None else under(rewards.resolve(train.reward, own["reward"]), config.isolation)
    env = None if train.env is None else named_parts.make("env", train.env, own["env"])
    if (of_run := with_defaults(env, EnvBase).under) is not None:
        env = of_run(config.isolation)
    if isinstance(env, IsolatedEnv):
        closing.callback(env.close)
    judges = [reward, *with_defaults(env, EnvBase).judges]
    for judge in judges:
        closing.callback(rewards.close, judge)
        if journal is not None:
            rewards.keep_in(judge, journal)
    return reward, env, judges


def build(
    config: Config,
    *,
    closing: ExitStack,
    journal: Journal | None = None,
    tokenizer: Tokenizer | None = None,
    **of_optimizer: object,
) -> RunParts:
    """Load the models, tasks and reward of a configuration. Raises: OperantError for anything that cannot be loaded.

    journal: for what a reward keeps for a resumed run. closing: gets what ends the processes of rewards, world and
    engine, also if something else cannot be loaded. of_optimizer: `optimizer` and `lr_scheduler` of `Learner`.
    """
    train, sampling = config.train, config.learner["sampling"]
    own = {kind: config.parts.get(kind, {}) for kind in named_parts.KINDS}
    reward, env, judges = reward_and_world(config, closing, journal)
    every = [part for judge in judges for part in rewards.every_part(judge)]
    if config.data.target_field is None and any(map(rewards.as_in_trl, every)):
        config = replace(config, data=replace(config.data, target_field=EVERY))
    engine = None if train.engine is None else named_parts.engine(train.engine, own["engine"])
    source, evaluated = named_parts.sources(train, own["tasks"], env)
    forms = find(train.algorithm).rows | {"form": named_parts.form(train.form, own["form"])}
    metrics = resolve(config.evaluation.metrics, train.policy if isinstance(train.policy, str) else None)
    _check_first_rows(config, (source, evaluated), (reward, env, judges), metrics, forms, tokenizer)
    rewards.check_lengths(reward, sampling.max_tokens)
    for judge in judges:
        rewards.check(judge)
    for metric in metrics:
        metric.check()
    if env is not None:
        check_parts(env)
    given = {"tokenizer": tokenizer, "reference": train.reference, "engine": engine, "env": env, **of_optimizer}
    of_method = {"algorithm": train.algorithm, "total_steps": train.steps, "composed": config.learner}
    learner = Learner(named_parts.policy(train.policy, own["policy"]), **given, **of_method)
    if (close := EngineParts.of(learner.engine).close) is not None:
        closing.callback(close)
    policy = learner.policy
    # The reply of an encoder-decoder takes no space in the context of the prompt.
    of_reply = {"max_new": 0 if policy.encoder_decoder else sampling.max_tokens, "cue": not policy.encoder_decoder}
    bounds = {"context": policy.context, "vocabulary": policy.vocabulary} | forms | of_reply
    recorded = _recorded(config, learner) if train.replies is not None else None
    if policy.tokenizer is None and env is None and recorded is None:
        task = next(iter(load_tasks(source, None, _rows(config), **forms)))
        if not all(isinstance(token, int) for token in task.prompt):
            name = shown(str(train.policy)) if isinstance(train.policy, (str, Path)) else type(train.policy).__name__
            into = "into the model's folder (AutoTokenizer.from_pretrained(ORIGINAL).save_pretrained(FOLDER))"
            how = f"save the tokenizer {into}, pass tokenizer= from Python, or give tasks of token ids"
            raise OperantError(f"policy {name} has no tokenizer, and the tasks are texts: {how}")
    tasks, held_out, of_rows = read_tasks(config, source, evaluated, policy.tokenizer, bounds, recorded)
    if env is None:
        check_chat(config, [*tasks, *held_out], policy.tokenizer)
    useful = [True] * len(tasks)
    if (usable := learner.algorithm.usable) is not None:
        useful = usable([task.scores for task in tasks], learner.options["loss"], whole=True)
        with option_of_error("evaluate", always=True):
            _ = held_out and usable([task.scores for task in held_out], learner.options["loss"], whole=False)
    tasks = [task for task, teaches in zip(tasks, useful, strict=True) if teaches]
    for judge in judges:
        rewards.prepare(judge, held_out, alone=True)
        rewards.read_held_out(judge, held_out)
        tasks = rewards.prepare(judge, tasks)
    rewards.read_with(reward, policy.tokenizer)
    demonstrations = _demonstrations(learner, config.data, [*tasks, *held_out]) if forms["with_replies"] else None
    judging = (rewards.held_out(reward), config.evaluation, demonstrations, metrics)
    evaluator = Evaluator(learner, held_out, *judging) if held_out else None
    room = [t for t in tasks if recorded is None or policy.misfit(len(t.prompt), sampling.max_tokens) is None]
    probed = (held_out or room)[: 0 if learner.algorithm.needs.policy else train.probes]
    probed = probed if demonstrations is None else [demonstrations.opening(task) for task in probed]
    probes = Probes(learner, probed, rewards.held_out(reward)) if probed else None
    notes = tuple(note for judge in judges for part in rewards.described_parts(judge) for note in part.notes)
    if learner.own.parallel == "fsdp" and distributed.world() == 1:
        notes = ("learner.parallel=fsdp in one process: there are no ranks to divide anything over", *notes)
    of_tasks = reduce(lambda found, task: counter(found, f"{task.id!r} {task.prompt!r}"), tasks, 0)
    order = Order(len(tasks), config.learner["learner"].seed, of_tasks)
    more = (probes, demonstrations, useful.count(False), (*of_rows, *notes), None, recorded)
    parts = RunParts(learner, source, tasks, order, reward, held_out, evaluator, *more)
    if not (train.rollouts_ahead or train.partial_rollout_tokens):
        return parts
    return replace(parts, ahead=Ahead(learner, order, reward, train, partial(parts.attempts, samples=train.samples)))


def _check_first_rows(
    config: Config,
    sources: tuple[object, object],
    judged_by: tuple[object, object, list[object]],
    metrics: list[EvaluationMetric],
    forms: dict[str, object],
    tokenizer: Tokenizer | None,
) -> None:
    """Refuse a wrong path or field, messages without a template, or too large a share, before any model loads.

    sources: the tasks, and the held-out ones. judged_by: the reward, the world, and all that judges.
    """
    (source, evaluated), (reward, env, judges), part = sources, judged_by, share(config.train.evaluate)
    for rows, measured in ((source, []), (evaluated, metrics)):
        kinds = (str, Path, list, tuple) if measured or reward or config.train.form else (str, Path)
        if isinstance(rows, kinds):
            with option_of_error("evaluate") if rows is evaluated and rows is not source else nullcontext():
                prepared(measured, first := load_tasks(rows, None, _rows(config), **forms), alone=True)
            for judge in judges:
                rewards.prepare(judge, first, alone=True)
            if env is None:
                check_chat(config, first, tokenizer)
            if part is not None:
                split_off(load_tasks(rows, None, _rows(config, rows_that_decide(part)), **forms), part, 0)


def read_tasks(
    config: Config,
    source: object,
    evaluated: object,
    tokenizer: Tokenizer | None,
    bounds: dict[str, object],
    recorded: RecordedReplies | None = None,
) -> tuple[list[Task], list[Task], list[str]]:
    """The tasks, the held-out ones, and sentences on rows that are left out, and on a share that is held out.

    Raises: OperantError as `load_tasks`.
    """
    seed, part = config.learner["learner"].seed, share(config.train.evaluate)
    notes = [*recorded.notes] if recorded is not None else []

    def read(rows: object) -> list[Task]:
        tasks = load_tasks(rows, tokenizer, config.data, seed, passed=(passed := Counter()), **bounds)
        notes.extend(left_out(passed, rows))
        texts = passed["texts"] and rows is source and config.train.env is None
        if texts and template_of(tokenizer) and config.data.query_range() is None:
            reads = "it reads them as they are, without it; --data.chat true makes each text the message of a user"
            notes.append(f"the policy has a chat template, and the prompts are no messages: {reads}")
        return tasks

    tasks = read(source) if recorded is None else recorded.tasks
    if part is not None:
        tasks, held_out = split_off(tasks, part, seed)
        whole = len(tasks) + len(held_out)
        more = "; labels of one prompt stay together" if len(held_out) > 2 * part * whole + 1 else ""
        of = f"(evaluate={config.train.evaluate}, seed {seed}{more})"
        notes.append(f"{len(held_out)} of {whole} tasks are held out {of}")
        return tasks, held_out, notes
    with option_of_error("evaluate"):
        return tasks, read(evaluated) if evaluated else [], notes


def trained(folder: Path) -> tuple[Trained, Engine]:
    """The policy that a run has exported, and the engine that the run names, with the run's options of both.

    Raises: OperantError if the policy cannot be loaded or made again.
    """
    config, exported = named_parts.flattened(read_config(folder)), folder / "export"
    name, engine = config.get("policy"), config.get("engine")
    if named_parts.is_object("policy", name) and (exported / OWN).is_file():
        made = named_parts.policy(name, named_parts.stored_options("policy", config))
        policy = load_policy(made, tokenizer=load_tokenizer(exported))
        load_own_weights(policy, exported)
    else:
        policy = load_policy(str(exported), value=saved_action_values(exported))
    if engine is None or str(engine).startswith("<"):  # none, or an object of a Python program
        return policy, default_engine(policy)
    return policy, named_parts.make("engine", engine, named_parts.stored_options("engine", config), policy)


def recorded_replies(source: object, learner: Learner, version: int | None = None) -> list[Rollout]:
    """Read conversations that were recorded elsewhere, to train on: `learner.step(replies, [0.0] * len(replies))`.

    source: a file, a list or a function (docs/engines.md). Their rewards are in their turns, to which the scores of
    `step` are added. version: what the records call the weights of the learner; None: the newest that they name. It
    warns of what is lost, such as missing log-probs.
    Raises: OperantError that names the row, for a field that is missing or cannot be right.
    """
    found = _read(source, learner, version)
    for note in found.notes:
        warnings.warn(note, stacklevel=2)
    return [rollout for group in found.groups.values() for rollout in group]


def _read(source: object, learner: Learner, version: int | None) -> RecordedReplies:
    (rows, name), policy = opened(source), learner.policy
    weights = "" if policy.shards is not None else fingerprint(policy)
    return read_recorded(rows, name, policy, learner.sampling, weights=weights, version=version)


def _recorded(config: Config, learner: Learner) -> RecordedReplies:
    """The replies of the run. Raises: OperantError for a broken record, or for groups that make no step."""
    train, found = config.train, _read(config.train.replies, learner, config.train.replies_version)
    name = shown(train.replies)
    if found.unscored and (kind := learner.own.importance) != "none":
        what = f"learner.importance={kind}, and {found.unscored} has a reply without log-probs"
        raise OperantError(f"{what}, which it needs: set learner.importance=none, or leave such records out")
    if not found.paid and train.reward is None and learner.algorithm.needs.reward:
        raise OperantError(f"{name}: no record has a `reward`; give each one, or pass --reward to judge the replies")
    largest, groups = max(map(len, found.groups.values())), len(found.groups)
    if largest != train.samples:
        use = f"use samples={largest}, and a batch that is a multiple of it"
        raise OperantError(f"samples={train.samples}: the largest group of {name} has {largest} replies; {use}")
    if groups < train.batch // train.samples:
        raise OperantError(f"batch={train.batch}: {name} has {groups} groups; use batch={groups * largest} or less")
    return found


def _rows(config: Config, most: int = 1) -> DataOptions:
    return replace(config.data, query_tokens=None, limit=min(most, config.data.limit or most), shuffle=False)


def check_chat(config: Config, tasks: list[Task], tokenizer: Tokenizer | None) -> None:
    """Raises: OperantError for tasks that are messages if the tokenizer (None: not known) has no chat template."""
    chats = [task.prompt for task in tasks if any(isinstance(part, dict) for part in task.prompt[:1])]
    if chats and tokenizer is None and isinstance(name := config.train.policy, (str, Path)):
        folder = BUILTIN / str(name).removeprefix("builtin:") if str(name).startswith("builtin:") else found(name)
        tokenizer = load_tokenizer(exported(folder)) if folder is not None and folder.is_dir() else None
    if chats and tokenizer is not None:
        encode_prompt(config.learner["model"].templated(tokenizer), chats[0])


def _demonstrations(learner: Learner, data: DataOptions, tasks: list[Task]) -> Demonstrations:
    """Prepare supervised training. Raises: OperantError for the first row that cannot be trained on."""
    policy = learner.policy
    if isinstance(policy, ReadingPolicy) and policy.whole_texts:
        texts = WholeTexts(policy.tokenizer, None, longest=min(data.max_length or policy.context, policy.context))
        texts.rollouts(tasks)
        return texts
    if (on_prompt := data.loss_on == "all") and (policy.encoder_decoder or learner.algorithm.needs.labels):
        why = "an encoder-decoder does not generate its prompts" if policy.encoder_decoder else "labels are of replies"
        raise OperantError(f"data.loss_on=all: {why}; use replies")
    stop = next(iter(sorted(learner.sampling.stops)), None)
    demonstrations = Demonstrations(policy.tokenizer, stop, on_prompt, data.max_length, policy.encoder_decoder)
    for task in tasks:
        for turn in (turn for rollout in demonstrations.rollouts([task]) for turn in rollout.turns):
            check_ids([*turn.prompt, *turn.action], policy.vocabulary, f"task {task.id!r}")
            if (why := policy.misfit(len(turn.prompt), len(turn.action))) is not None:
                raise OperantError(f"task {task.id!r} {why}; leave it out, or cut long rows: --data.max-length N")
    return demonstrations
