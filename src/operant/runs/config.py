"""The options of a run: recipe, preset and the user's options, composed into one checked, complete configuration.

Later values win: defaults < preset of the recipe < recipe < preset of the user < options of the user.
"""

import difflib
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from operant import options
from operant.algorithms import DEFAULT, applicable_options, find, preset
from operant.bounds import bounded, check_bounds
from operant.data import DataOptions
from operant.data.recorded import has_logprobs
from operant.data.sources import held_out_of, read, share
from operant.metrics.evaluation import metric_names
from operant.metrics.registry import CHOSEN, METRICS
from operant.metrics.registry import describe as describe_metric
from operant.rewards.failure_policy import IsolationOptions
from operant.runs import named_parts
from operant.runs.evaluate import EvaluationOptions
from operant.runs.trackers.trackers import tracker_options
from operant.storage import old_names
from operant.storage.hub import BUILTIN, found
from operant.training import select
from operant.training.options import (
    LearnerOptions,
    OptionGroups,
    checked_options,
    option_names,
    own_options,
    schema,
    with_base,
)
from operant.types import EnvBase, OperantError, require, shown, with_defaults

ALIASES = {"model": "policy", "ahead": "rollouts_ahead", "carry": "partial_rollout_tokens"}
"""Second names of options, which are accepted for them."""


@dataclass(frozen=True)
class TrainOptions:
    """What is trained, on which tasks, for how long."""

    policy: Any = "builtin:reviews-lm"
    """A folder, builtin:NAME, a Hub name (also name@revision), or module:object that makes a model; from Python also a
    model or a Policy."""
    tasks: Any = None
    """A file, builtin:openings/train or a data set of the Hub; from Python also a list or a function. None: the
    environment's own, if it has any."""
    replies: Any = None
    """Replies made elsewhere, which the steps train on in place of generated ones: a file of recorded conversations
    with token ids and log-probs (docs/engines.md); from Python also a list. None: the policy generates them."""
    replies_version: int | None = bounded(None, at_least=0)
    """What `replies` calls the weights that the run begins with; none: the newest version that they name."""
    form: Any = None
    """Makes tasks of rows as a data set publishes them: summarize, translate, commongen, totto, narrativeqa, dialog,
    imdb, extract, or module:function; from Python also a function. None: the options `data.*` name the fields."""
    reward: Any = None
    """A name (builtin:sentiment, letters:e), module:function, or {name: weight}; from Python also a function."""
    env: Any = None
    """The environment: a name, or module:object; from Python also an object, class or function. None: the policy
    replies once to each prompt."""
    engine: Any = None
    """What generates the replies: a name, or module:object; from Python also an object, class or function. None: the
    policy itself, in this process (native for a transformers model)."""
    reference: Any = "copy"
    """The model that KL is measured to: copy (of the initial policy), none, or a model."""
    algorithm: str = "ppo"
    preset: str | None = None
    """Option values of another system, by name; of several, separated by commas, later ones replace earlier ones."""
    steps: int = bounded(100, at_least=1)
    batch: int = bounded(64, at_least=1)
    """Replies per step, over all ranks."""
    samples: int = bounded(1, at_least=1)
    """Replies to each prompt of a step."""
    redraw: int = bounded(0, at_least=0)
    """Most rounds of a step in which prompts whose replies all have one reward are thrown away, and the next ones are
    played instead (DAPO's dynamic sampling). What the last round leaves stays, so that a step has its size; 0: none."""
    retire: float | None = bounded(None, above=0)
    """Prompts to whose replies a step gives a mean raw reward of this or more are drawn no more, down to as many as a
    step needs: of rewards of 0 and 1 it is the share of right replies (ScaleRL: 0.9); none: all are drawn."""
    reward_chunks: int = bounded(1, at_least=1)
    """Calls of the reward per step, each with a part of the prompts, in a thread while the next part is generated. For
    rewards that wait or compute elsewhere and judge each reply by itself; 1: one call with all replies."""
    rollouts_ahead: int = bounded(0, at_least=0)
    """Steps that rollouts are generated ahead of training, in a thread: they are at most so many updates old, and
    `learner.importance` is then token unless it is given. 0: each step generates its own."""
    partial_rollout_tokens: int = bounded(0, at_least=0)
    """Most tokens of a reply in a step: the next one continues those that have not ended, with its weights, and
    `learner.importance` is then token unless it is given. 0: each step generates its replies to their ends."""
    evaluate: Any = None
    """Held-out tasks, evaluated before and after training with the same random numbers; 10% holds out that share of the
    tasks, which the seed chooses and training never draws. None: none, or if the tasks are the environment's own, those
    that it keeps for tests; the word none, or false, evaluates nothing there either."""
    evaluate_every: int = bounded(0, at_least=0)
    """Steps between evaluations during training; 0: only before and after."""
    best: str | None = None
    """A metric: the model of the step with its largest value is exported to best/, and that step's checkpoint is kept.
    A minus before the name means the smallest value."""
    probes: int = bounded(32, at_least=0)
    """Probe prompts, from the held-out tasks if there are any, that policy and reference answer; 0: none."""
    probe_every: int = bounded(5, at_least=1)
    """Steps between answers to the probe prompts; they are also answered before and after training."""
    trackers: tuple[str, ...] | Mapping[str, Any] = ()
    """Services that the run also logs to: tensorboard, wandb, trackio, or module:class; several are separated by
    commas, or are a mapping from each name to its options."""
    checkpoint: str = bounded("resume", choices=("resume", "light", "both"))
    """resume: the whole state, for an exact resume. light: only the trained weights, for a resume with
    --fresh-optimizer. both: one of each kind."""
    checkpoint_minutes: float = bounded(10.0, at_least=0)
    """Minutes between checkpoints; 0: one after every step. One is always written at the end or on an interrupt."""
    checkpoint_every: int = bounded(0, at_least=0)
    """Steps between further checkpoints; 0: only by time."""
    keep: int = bounded(2, at_least=1)
    """How many of the newest checkpoints of each kind are kept."""
    keep_every: int = bounded(0, at_least=0)
    """Steps between checkpoints that are never deleted; 0: none."""
    silence_minutes: float = bounded(0.0, at_least=0, at_most=60 * 24 * 30, rule="between 0 and 43200, a month")
    """Minutes without progress (a token, a micro-batch, a new phase) after which the stacks of all threads are written
    to log.txt and the process ends with code 1; the run can be resumed. 0: never, for a reward that asks a person. Slow
    phases are logged either way."""
    samples_every: int = 10
    """Steps between sample replies on the console; 0: none."""

    def __post_init__(self) -> None:
        check_bounds(self)
        prompts, rest = divmod(self.batch, self.samples)
        use = f"the replies to a prompt; use batch={(prompts + 1) * self.samples}"
        require(not rest, f"batch={self.batch} is not a multiple of samples={self.samples}, {use}")
        few = f"a step has only {prompts} prompts; use at most {prompts}"
        require(self.reward_chunks <= prompts, f"reward_chunks={self.reward_chunks}: {few}")

    @property
    def evaluates(self) -> bool:
        """Whether there are held-out tasks; those of a world that has tasks of its own count, and may be none."""
        own = self.tasks is None and self.replies is None
        return self.evaluate is not False and (self.evaluate is not None or own)


@dataclass(frozen=True)
class Config:
    """The options of a run by group; `learner` holds the groups that the Learner takes."""

    train: TrainOptions
    data: DataOptions
    evaluation: EvaluationOptions
    isolation: IsolationOptions
    learner: OptionGroups
    parts: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """The options of the parts that the run names, by kind: env, engine, reward, tasks, trackers."""
    left_out: Mapping[str, list[str]] = field(default_factory=dict)
    """Options of a recipe or preset, by its name, that belong to another algorithm and were left out."""


OWN = {"": TrainOptions, "data": DataOptions, "evaluation": EvaluationOptions, "isolation": IsolationOptions}


def config_schema(algorithm: str, named: Mapping[str, object] | None = None) -> options.Schema:
    """All options of a run, by group. named: the parts that it names, by kind, whose options are groups too.

    Raises: OperantError for an unknown name.
    """
    return {**OWN, **schema(find(algorithm)), **named_parts.groups(named_in() if named is None else named)}


def named_in(*sources: Mapping[str, object]) -> dict[str, object]:
    """The parts that flat options name, by kind; the first source that names one wins."""
    every = (*sources, options.defaults(TrainOptions))
    found = {kind: next((o[kind] for o in every if o.get(kind) is not None), None) for kind in named_parts.KINDS}
    return {kind: None if options.is_none(value) else value for kind, value in found.items()}


def configure(given: Mapping[str, object], recipe: str | None = None) -> Config:
    """Compose the options and check them.

    Raises: OperantError for an unknown recipe, part or option, a wrong type or an impossible value.
    """
    with _placed(given, recipe):
        chosen, schema, whole, left_out = chosen_options(given, recipe)
        own_groups = _of_a_run(schema)
        of_run = options.names(own_groups)
        built = options.compose(own_groups, {name: value for name, value in whole.items() if name in of_run})
        train, data, evaluation, isolation = (built.pop(group) for group in OWN)
        parts = {kind: {**options.defaults(own_groups[kind]), **part} for kind, part in built.items()}
        method = find(chosen)
        corrects = method.source != "data" and not ("condition" in method.options or method.needs.action_values)
        _check_replies(train, data)
        known = train.replies is not None and "replay" not in method.options and has_logprobs(*opened(train.replies))
        if (train.rollouts_ahead or train.partial_rollout_tokens or known) and corrects:
            whole.setdefault("learner.importance", "token")
        learner = checked_options(chosen, {name: value for name, value in whole.items() if name not in of_run})
        config = Config(replace(train, algorithm=chosen), data, evaluation, isolation, learner, parts, left_out)
        _check_best(config.train, config.evaluation)
        _check_together(config)
        check_ahead(config.train, learner["learner"], learner["sampling"].max_tokens)
        return config


@contextmanager
def _placed(given: Mapping[str, object], recipe: str | None) -> Iterator[None]:
    """Let an error about an option of the user's own recipe name file and line."""
    try:
        yield
    except OperantError as error:
        path = found(recipe) if recipe and recipe not in recipes() else None
        about = re.match(r"(?:option )?'?([\w.-]+)", str(error))
        if path is not None and about is not None and path.is_file():
            near, lines = [about[1], about[1].rpartition(".")[2]], dict[str, int]()
            with suppress(OperantError):
                lines = _lines(path)
            if {*near}.isdisjoint(given) and (named := next((name for name in near if name in lines), None)):
                raise OperantError(f"{path}, line {lines[named]}: {error}") from error
        raise


def _lines(path: Path) -> dict[str, int]:
    """The line of each option of a YAML file, by its name as `group.name` or `name`. Raises as `read_mapping`."""
    import yaml

    def named(node: yaml.Node, before: str) -> Iterator[tuple[str, int]]:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            name = f"{before}{key.value}".replace("-", "_")
            yield name, key.start_mark.line + 1
            yield from named(value, f"{name}.") if not before else ()

    options.read_mapping(path)
    return dict(named(yaml.SafeLoader(path.read_text(encoding="utf-8")).get_single_node(), ""))


class Chosen(NamedTuple):
    """The options of a run before they are converted and checked together."""

    algorithm: str
    schema: dict[str, Any]
    """All options that the run has, by group."""
    values: dict[str, Any]
    """Those that are not their defaults, by full name."""
    left_out: dict[str, list[str]]


def with_short_names(recipe: Mapping[str, object], given: Mapping[str, object]) -> tuple[dict[str, object], ...]:
    """A recipe without its `names`, and the given options with the short names that it declares written in full.

    `names: {game: env.game}` lets `--game tw-simple` stand for `--env.game tw-simple`. In both, `ALIASES` become the
    names that they stand for; `model` with a mapping is the group of that name.
    Raises: OperantError for an option that is given under both of its names, or `names` that is no mapping.
    """
    base = dict(recipe)
    short = base.pop("names", None) or {}
    if not isinstance(short, Mapping) or not all(isinstance(name, str) for part in short.items() for name in part):
        raise OperantError(f"names={shown(short)}: give a mapping from short names to options, as in game: env.game")
    return _written({}, base), _written(short, given)


def _written(short: Mapping[str, str], given: Mapping[str, object]) -> dict[str, object]:
    """Options with their short names and aliases written in full."""
    full: dict[str, Any] = {}
    for name, value in given.items():
        plain = str(name).replace("-", "_")
        written = short.get(plain, name if isinstance(value, Mapping) else ALIASES.get(plain, name))
        if written in full or (written != name and written in given):
            raise OperantError(f"option {written} is given twice, as {name} too: remove one of the two")
        full[written] = value
    return full


def chosen_options(given: Mapping[str, object], recipe: str | None) -> Chosen:
    """The values of recipe, presets and user, the later ones above the earlier ones.

    Raises: OperantError for an unknown recipe, part or option.
    """
    base, given = with_short_names(load_recipe(recipe) if recipe else {}, given)
    base, given = named_parts.flattened(base), named_parts.flattened(given)
    for name in ("tasks", "evaluate"):
        if isinstance(given.get(name), str):
            given[name] = str(given[name])  # one of numpy's, which YAML cannot write
        elif hasattr(given.get(name), "__array__"):  # == would compare its elements
            with option_of_error(name):
                given[name] = [row.tolist() if hasattr(row, "tolist") else row for _, row in read(given[name])[1]]
    texts = given.get("preset"), None if "preset" in given else base.get("preset")
    above, below = (preset(text) if isinstance(text, str) and not options.is_none(text) else {} for text in texts)
    chosen = next((o["algorithm"] for o in (given, above, base, below) if o.get("algorithm") is not None), DEFAULT)
    if not isinstance(chosen, str):
        what = f"algorithm={shown(chosen)}"
        raise OperantError(f"{what}: give its name, or module:object, by which a resumed run finds it again")
    named, left_out = named_in(given, base), dict[str, list[str]]()
    for kind, others in named_parts.replaced(base, given).items():
        base = {name: value for name, value in base.items() if name not in others}
        left_out[f"{recipe}, {kind}"] = others
    known = config_schema(chosen, named)
    named_parts.check_owned(named, {**base, **given})
    own, base = own_options(chosen, known, given), _recipe_options(base, chosen, named)
    usable_here = [*options.names(_of_a_run(known)), *option_names(find(chosen))]
    composed = dict(find(chosen).defaults)
    for source, values in ((base.get("preset"), below), (recipe, base), (given.get("preset"), above)):
        fit, foreign = applicable_options(values, chosen, usable_here)
        composed |= fit
        left_out |= {str(source): foreign} if foreign else {}
    # Without a reference, a KL coefficient of a preset or recipe does not apply.
    if options.is_none((composed | own).get("reference", "copy")):
        composed |= dict.fromkeys(("kl.coef", "kl.loss_coef"), 0.0)
    whole = with_base(composed, own)
    tasks = own.get("tasks") or (base.get("tasks") if "evaluate" not in base else None)
    if "evaluate" not in own and (held_out := held_out_of(tasks)) is not None:
        whole["evaluate"] = held_out  # a recipe's own held-out tasks belong to its own tasks
    if whole.get("tasks") is not None and options.is_none(whole.get("evaluate")) and "evaluation.metrics" not in own:
        whole.pop("evaluation.metrics", None)  # a recipe names those of its task, for a run that evaluates
    held = whole.get("evaluate")
    if isinstance(held, str) and (held.lower() == "false" or (whole.get("tasks") is None and options.is_none(held))):
        whole["evaluate"] = False  # the word, above the tests of a world; None is what every run has that names nothing
    return Chosen(chosen, known, whole, left_out)


def _of_a_run(schema: options.Schema) -> options.Schema:
    """The groups of options that a Learner does not have."""
    return {group: made for group, made in schema.items() if group in OWN or group in named_parts.KINDS}


def _recipe_options(recipe: Mapping[str, object], chosen: str, named: Mapping[str, object]) -> dict[str, object]:
    """A recipe's options by full name, with its algorithm: the chosen one if the recipe names none and it fits."""
    named_there = recipe.get("algorithm")
    if named_there is None and chosen != DEFAULT:
        with suppress(OperantError):
            return options.resolve(config_schema(chosen, named), {**recipe, "algorithm": chosen})
    written_for = named_there or DEFAULT
    return options.resolve(config_schema(written_for, named), {**recipe, "algorithm": written_for})


def opened(replies: object) -> tuple[Iterable[tuple[int, object]], str]:
    """The rows of recorded conversations, and what errors call them. Raises: OperantError as `data.sources.read`."""
    good = isinstance(replies, (str, Path, list, tuple)) or callable(replies)
    require(good, f"replies is of type {type(replies).__name__}: give a file, a list, or a function that returns one")
    with option_of_error("replies"):
        name, rows = read(replies)
        return _told(rows), str(replies) if isinstance(replies, (str, Path)) else name.replace("tasks", "replies")


def _told(rows: Iterable[tuple[int, object]]) -> Iterator[tuple[int, object]]:
    with option_of_error("replies"):
        yield from rows


@contextmanager
def option_of_error(name: str, *, always: bool = False) -> Iterator[None]:
    """Let an error about a source name the option that it was given in: in the place of `tasks`, or always."""
    try:
        yield
    except OperantError as error:
        if not (text := str(error)).startswith("tasks: ") and not always:
            raise
        raise OperantError(f"{name}: {text.removeprefix('tasks: ')}") from error


def _check_replies(train: TrainOptions, data: DataOptions) -> None:
    """Refuse replies made elsewhere for a method or options that need the policy's own."""
    algorithm, method = find(train.algorithm), f"algorithm={train.algorithm}"
    if train.replies is None:
        require(train.replies_version is None, f"replies_version={train.replies_version} without replies: leave it out")
        return
    own = "what is played; the replies are there already"
    deciding = {"rollouts_ahead": 0, "partial_rollout_tokens": 0, "redraw": 0, "retire": "none"}
    reasons = [
        (algorithm.source == "data", f"{method}: it learns from demonstrations or labels: name the file in tasks"),
        (algorithm.source == "both", f"{method}: it also needs demonstrations of the same tasks"),
        ("mask" in algorithm.copies, f"{method}: its mask decides which tokens may be drawn, so it draws them itself"),
        (train.tasks is not None, f"tasks={shown(train.tasks)}: the prompts are the replies' own; use tasks=none"),
        (train.form is not None, f"form={shown(train.form)}: the prompts are the replies' own; leave it out"),
        (train.env is not None, f"env={shown(train.env)}: a world decides {own}: leave it out"),
        *((x := getattr(train, n), f"{n}={x}: it decides {own}: use {n}={off}") for n, off in deciding.items()),
        (train.reward_chunks > 1, f"reward_chunks={train.reward_chunks}: nothing is generated; leave it out"),
        (share(train.evaluate) is not None, f"evaluate={train.evaluate}: name a file of held-out tasks"),
        (data != DataOptions() and not train.evaluate, "data.*: these options say how tasks are read; leave them out"),
    ]
    if why := next((why for holds, why in reasons if holds), None):
        raise OperantError(f"replies={shown(train.replies)} with {why}")


def _check_together(config: Config) -> None:
    train, algorithm = config.train, find(config.train.algorithm)
    if config.evaluation.metrics and not train.evaluates:
        given = f"evaluation.metrics={shown(config.evaluation.metrics)}"
        how = "as in --evaluate held-out.jsonl, or --evaluate 10% for a share of the tasks; or leave it out"
        raise OperantError(f"{given} without held-out tasks: set evaluate, {how}")
    if share(train.evaluate) is not None and train.tasks is None:
        why = "the tasks are the world's own, which keeps some for tests; leave it out"
        raise OperantError(f"evaluate={shown(train.evaluate)}: {why}")
    if train.tasks is None and train.replies is None:
        world = named_parts.found("env", train.env)
        may_have = inspect.isroutine(world) and not hasattr(world, "games")  # what a function makes is not known yet
        more = ", or give the world games(split), a list of its own for the split (docs/worlds.md)" if train.env else ""
        missing = f"tasks is missing: pass --tasks prompts.txt, or --tasks builtin:openings/train{more}"
        require(may_have or with_defaults(world, EnvBase).games is not None, missing)
    if train.form is not None and (train.tasks is None or algorithm.rows["labelled"]):
        why = "the environment has tasks of its own" if train.tasks is None else "its rows are labelled replies"
        raise OperantError(f"form={shown(train.form)} with algorithm={train.algorithm}: {why}; leave it out")
    config.data.check_beside(train.form)
    sampling, beams = config.learner["sampling"], config.evaluation.beams
    drawing = {"engine": train.engine} | {f"sampling.{n}": getattr(sampling, n) for n in ("stop_strings", "guidance")}
    if beams > 1 and (name := next((name for name, given in drawing.items() if given), None)):
        raise OperantError(f"evaluation.beams={beams} with {name}={shown(drawing[name])}: beam search cannot use it")
    if isinstance(train.trackers, Mapping):
        tracker_options(train.trackers)
    if train.reward is not None and algorithm.needs.policy:
        why = "it generates no replies that could be scored; leave it out"
        raise OperantError(f"reward={shown(train.reward)} with algorithm={train.algorithm}: {why}")
    if train.reward_chunks > 1 and algorithm.source == "data":
        raise OperantError(f"reward_chunks={train.reward_chunks}: {train.algorithm} generates nothing; leave it out")
    if train.env is not None and algorithm.source == "data":
        raise OperantError(f"env={shown(train.env)}: algorithm {train.algorithm} plays in no environment; leave it out")
    selects = config.learner["learner"].select
    judged = algorithm.needs.reward or selects is not None
    if train.reward is None and train.replies is None and algorithm.source != "data" and judged:
        pays = train.env is not None and with_defaults(named_parts.found("env", train.env), EnvBase).pays
        require(pays or algorithm.needs.reward, select.unscored_selection(selects, train.algorithm))
        require(pays, "reward is missing: pass --reward, as in --reward letters:e or --reward my_file.py:function")
    if algorithm.source != "data" and train.samples < algorithm.needs.samples:
        why = "it compares the replies to one prompt, so every advantage would be 0"
        use = f"use samples={algorithm.needs.samples} or more"
        raise OperantError(f"samples={train.samples} with algorithm={train.algorithm}: {why}; {use}")
    if (k := config.learner["advantage"].get("k") or 0) > train.samples:
        raise OperantError(f"advantage.k={k} with samples={train.samples}: it is the best of so many; raise samples")
    kind, number = ("", 0.0) if selects is None else select.parse(selects)
    of_replies = config.learner["learner"].select_unit == "episode"
    if kind == "count" and of_replies and number > train.batch:
        few = f"a step has fewer replies; at most top:{train.batch}"
        raise OperantError(f"learner.select={selects} with batch={train.batch}: {few}")
    if kind == "group" and of_replies and number >= train.samples:
        why = "all replies to a prompt would stay; raise samples, or select fewer"
        raise OperantError(f"learner.select={selects} with samples={train.samples}: {why}")
    supervised, defaults = ("reply_field", "loss_on", "max_length"), options.defaults(DataOptions)
    changed = [f"data.{name}" for name in supervised if getattr(config.data, name) != defaults[name]]
    if algorithm.source == "play" and changed:
        why = "learns from replies that the policy generates; leave it out"
        raise OperantError(f"{changed[0]}: algorithm {train.algorithm} {why}")
    if algorithm.source == "data" and train.samples > 1:
        raise OperantError(f"samples={train.samples} with algorithm={train.algorithm}: it has demonstrations; use 1")
    if "reference" not in algorithm.copies and train.reference not in ("copy", None):
        given = shown(train.reference)
        raise OperantError(f"reference={given}: algorithm {train.algorithm} has no reference; leave it out")


def check_ahead(train: TrainOptions, own: LearnerOptions, tokens: int) -> None:
    """Refuse rollouts, of at most `tokens` tokens, that cannot be generated ahead, carried over or drawn again."""
    algorithm, stale = find(train.algorithm), own.max_staleness
    apart = named_parts.has_own_weights(train.engine)
    switches = algorithm.update == "trust-region" and not apart
    method, asks = f"algorithm={train.algorithm}", "condition" in algorithm.options
    either = [
        (algorithm.source == "data", f"{method}: it plays no rollouts; leave it out"),
        (asks, f"{method}: what its prompts ask for depends on the step before; leave it out"),
        ("mask" in algorithm.options, f"{method}: its mask may follow the policy; leave it out"),
        (train.reward_chunks > 1, f"reward_chunks={train.reward_chunks}: rewards judge whole steps; leave it out"),
        (train.redraw > 0, f"redraw={train.redraw}: rewards decide what a step draws again; use redraw=0"),
        (train.retire is not None, f"retire={train.retire}: rewards decide what is drawn next; leave it out"),
    ]
    too_old = stale is not None and stale < train.rollouts_ahead
    ahead = [
        (switches, f"{method}: its update switches the kernels of attention; use engine=ray, which has its own"),
        (own.parallel == "fsdp" and not apart, "parallel=fsdp: its update frees weights in use; use parallel=ddp"),
        (too_old, f"learner.max_staleness={stale}: rollouts would be too old"),
    ]
    age = train.rollouts_ahead + (-(-tokens // train.partial_rollout_tokens) - 1 if train.partial_rollout_tokens else 0)
    long = f"learner.max_staleness={stale}: the longest replies are {age} steps old, and would be left out"
    none = f"sampling.max_tokens={tokens}: no reply would be carried over"
    whole = f"{none}; lower partial_rollout_tokens, or leave it out"
    carry = [(stale is not None and stale < age, long), (train.partial_rollout_tokens >= tokens, whole)]
    scored = [
        (algorithm.source != "play", f"{method}: it learns from demonstrations; leave it out"),
        (train.reward is None and train.env is None, "no reward: nothing is compared; set one, or leave it out"),
    ]
    alone = (train.samples < 2, f"samples={train.samples}: rewards of one reply never differ; use samples=2 or more")
    for name, number, reasons in (
        ("redraw", train.redraw, [*scored, alone]),
        ("retire", train.retire, scored),
        ("rollouts_ahead", train.rollouts_ahead, either + ahead),
        ("partial_rollout_tokens", train.partial_rollout_tokens, either + carry),
    ):
        if why := next((why for holds, why in reasons if number and holds), None):
            raise OperantError(f"{name}={number} with {why}")


def _check_best(train: TrainOptions, evaluation: EvaluationOptions) -> None:
    if train.best is None:
        return
    name, chosen = train.best.removeprefix("-"), [f"evaluate/{metric}" for metric in metric_names(evaluation.metrics)]
    metric = describe_metric(name)
    if metric is None or (metric.group == CHOSEN and not {name, name.rpartition("/")[0]} & set(chosen)):
        near = difflib.get_close_matches(name, [*(n for n, m in METRICS.items() if m.group != CHOSEN), *chosen], 1)
        hint = f"did you mean {near[0]!r}?" if near else "docs/metrics.md lists all metrics"
        hint = f"choose it: evaluation.metrics={name.removeprefix('evaluate/')}" if name in METRICS else hint
        raise OperantError(f"best={train.best!r} is not a metric of this run; {hint}")
    if name.startswith("evaluate/") and not (train.evaluates and train.evaluate_every):
        raise OperantError(f"best={train.best!r} is measured by evaluations: set evaluate and evaluate_every")


def recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    return {path.stem: path for path in sorted(BUILTIN.glob("*.yaml"))}


def load_recipe(name: str) -> dict[str, object]:
    """A recipe by name, or a YAML file. Raises: OperantError with the nearest name."""
    path = recipes().get(name) or found(name)
    if path is None or not path.is_file():
        near = difflib.get_close_matches(str(name)[:100], recipes(), 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(recipes())}, and any YAML file"
        if re.fullmatch(r"-*[a-z][\w.-]*=.*", str(name)):
            hint = f"options begin with two dashes: --{str(name).lstrip('-')[:100]}"
        elif str(name).endswith((".yaml", ".yml")):
            hint = f"there is no file {str(Path(name).absolute())[:300]}"
        raise OperantError(f"recipe {shown(name)} is unknown; {hint}")
    recipe = old_names.current(options.read_mapping(path), path)
    why = "out is no option of a recipe, as each run has its own folder: give --out FOLDER"
    require("out" not in recipe, f"{path}: {why}")
    return recipe


def as_mapping(config: Config) -> dict[str, object]:
    """The whole configuration as plain data, for config.yaml; a Python object becomes its description."""
    own = {"": config.train, "data": config.data, "evaluation": config.evaluation, "isolation": config.isolation}
    every = {group: options.values(made) for group, made in {**own, **config.learner}.items()}
    groups: dict[str, Any] = {group: {name: describe(x) for name, x in of.items()} for group, of in every.items()}
    # By full name: an option of a part may itself be called `name`.
    parts = {f"{kind}.{name}": describe(value) for kind, part in config.parts.items() for name, value in part.items()}
    whole = groups.pop("") | parts | groups
    for name in sorted(("tasks", "evaluate", "replies"), key=lambda name: -_values(whole[name])):
        if isinstance(rows := whole[name], list) and _values(whole) > options.MOST:  # no file with more is read again
            whole[name] = f"<list of {len(rows)}>"
    return whole


def describe(value: Any) -> object:
    """Plain data unchanged; a function as <function module:name>; any other object, and a list with one, as <type>."""
    if type(value).__module__ == "numpy" and not hasattr(value, "__len__"):
        value = value.item()  # a number
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, (float, str)):
        return float(value) if isinstance(value, float) else str.__str__(value)  # numpy's are none of YAML's
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (tuple, list)) and _values(value) < math.inf:
        return [describe(part) for part in value]
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: describe(v) for k, v in value.items()}
    if callable(value) and hasattr(value, "__qualname__"):
        return f"<function {value.__module__}:{value.__qualname__}>"
    size = f" of {len(value)}" if hasattr(value, "__len__") else ""
    return f"<{type(value).__name__}{size}>"


def _values(value: object) -> float:
    """How many values plain data have; infinity of anything that holds an object."""
    if isinstance(value, (tuple, list)):
        return 1 + sum(map(_values, value))
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return 1 + sum(1 + _values(part) for part in value.values())
    plain = value is None or isinstance(value, (bool, int, float, str, Path))
    return 1 if plain or (type(value).__module__ == "numpy" and not hasattr(value, "__len__")) else math.inf
