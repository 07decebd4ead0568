"""`operant eval`: models answer held-out tasks, and are compared by the rewards of their replies."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from operant import rewards
from operant.algorithms import find
from operant.apps.code.unit_tests import UnitTests
from operant.data import DataOptions
from operant.data.sources import share
from operant.metrics.evaluation import EvaluationMetric, chosen, prepared, resolve
from operant.metrics.passes import check_samples, numbers_in
from operant.models.policy import Policy
from operant.options import compose, convert
from operant.rewards.failure_policy import IsolationOptions
from operant.rollouts.generation_kwargs import from_generation_kwargs
from operant.runs import named_parts
from operant.runs.evaluate import EvaluationOptions, beam_search
from operant.runs.games import playable
from operant.runs.judged_replies import Kept, Scorer, drawn, part, scorer
from operant.runs.named_models import check, load, run_options, stated_return
from operant.runs.signals import terminated_as_interrupted
from operant.runs.trackers.console import emit, plain
from operant.sampling import Sampling
from operant.storage import atomic_io
from operant.tools.cli.arguments import Options, as_spec, counted, new_file, refuse, taken
from operant.tools.cli.parser import as_typed
from operant.tools.cli.program_files import (
    OF_SEARCH,
    SearchAsked,
    Searches,
    handed_in,
    search_asked,
    searches_of,
    tell_unread,
    with_examples,
)
from operant.tools.cli.reply_files import OwnTasks, ReplyProgress, TaskSet, as_in, reading, take, with_all_fields
from operant.tools.cli.sample_files import ENDINGS, score_samples
from operant.tools.labels.items import MOST
from operant.tools.report.models import Compared
from operant.tools.report.summary import aligned
from operant.training.options import find_device
from operant.training.setup import tell_room
from operant.types import Engine, Env, EnvBase, OperantError, RewardFn, name_of, require, shown, with_defaults

FILES = {"out": (".json",), "report": (".html",), "label": (".jsonl",)}
"""Options that name a file to write, and how its name ends."""
LIMITS = ("level", "seconds", "memory", "at_once", "compare")
"""The limits of a jail that the reward `tests` has."""
Loaded = list[tuple[Policy, Engine]]


@dataclass(frozen=True)
class Plan:
    """What the command line asks for."""

    models: list[str]
    tasks: Callable[..., TaskSet]
    """The tasks, as the tokenizer of `policy` cuts them."""
    source_name: str
    """What the tasks are of, in sentences and files."""
    scorers: list[Scorer]
    metrics: list[EvaluationMetric]
    """pass@k and n@k, which are numbers of all replies to a task."""
    sampling: Sampling
    masked: bool
    """Whether the run had a mask policy, which is not exported: each model then truncates its own distribution."""
    search: EvaluationOptions
    """Its samples, beams and length penalty."""
    programs: SearchAsked | None
    """Each model hands in one program for a task, after this search; None: its replies are judged as they are drawn."""
    env: Any
    """The world of the first model's run, in which all of them reply; None: each task has one reply, as it is drawn."""
    seed: int
    device: str
    files: Mapping[str, Path | None]

    @property
    def judges(self) -> list[RewardFn | None]:
        """The rewards, and those of the world."""
        return [*(one.reward for one in self.scorers), *with_defaults(self.env, EnvBase).judges]


def evaluate(words: Sequence[str], options: Options) -> int:
    """`operant eval runs/a runs/b --tasks FILE --reward letters:e` prints a table; `--report` writes a page."""
    if any(word.endswith(ENDINGS) for word in words):
        return score_samples(words, options)
    plan = planned(words, options)
    try:
        with terminated_as_interrupted():
            compared = answered(plan)
    finally:
        for judge in plan.judges:
            rewards.close(judge)
        if hasattr(plan.env, "close"):
            plan.env.close()
    about = describe(plan, len(compared.tasks))
    print(plain(about))
    emit("\n".join(map(plain, aligned(compared.table()))))
    write(plan, compared, about)
    return 0


def planned(words: Sequence[str], options: Options) -> Plan:
    """Read the options, of which those of sampling are left; what is missing is that of the first run."""
    require(words, "expected models to evaluate: operant eval runs/a runs/b --tasks held-out.jsonl")
    require(len({*words}) == len(words), "a model is named twice: its replies to the same task would be the same ones")
    run = run_options(words[0])
    files = {name: new_file(name, options.pop(name, None), endings) for name, endings in FILES.items()}
    samples, device = counted(options, "samples", 1), options.pop("device", "auto")
    many = f"--label: a page shows at most {MOST} replies to a prompt, and here are {len(words)} x {samples}"
    require(files["label"] is None or len(words) * samples <= MOST, many)
    find_device(device)
    own = part(run, "evaluation")
    seed = taken(options, "seed", (own.get("seeds") or [part(run, "learner").get("seed", 0)])[0])
    chat = convert(options.pop("chat", False), bool, "chat")
    typed, of_run, (given, named) = options.pop("tasks", None), None, take(options)
    source, named = as_in(run, typed, named)
    if source is None:
        source, of_run = own_tasks(words[0], run)
        given, named = {**part(run, "data"), **given}, named or named_parts.only(run, "form")
    form, searches = named_parts.stored_form(named), asks_for_search(options)
    asked = options.pop("metrics", None)
    if odd := next((name for name in chosen(asked) if numbers_in(name) is None), None):
        other = "any score of a text is a reward, as in --reward bleu"
        raise OperantError(f"--metrics {odd}: models are compared by pass@k and n@k, such as pass@8 or 1@8; {other}")
    check_samples([*chosen(asked)], samples, "--samples ")
    metrics = resolve(asked)
    paid = "tests" if searches and run.get("reward") is None else not metrics
    specs = [spec for spec in map(as_spec, options.pop("reward", [paid])) if spec is not False]
    unnamed = str(world := run.get("env")).startswith("<")
    require(of_run is None or not unnamed, f"{words[0]} played in {world} of a Python program: give --tasks FILE")
    pays = run.get("reward") is None and world is not None and not unnamed and not playable(world)
    scorers = [Scorer(str(world), None) if pays and spec is True else scorer(spec, run) for spec in specs]
    tests, programs = [part for one in scorers for part in rewards.parts_of(one.reward, UnitTests)], None
    if searches:  # a program has the limits that it will be judged under
        limits = {name: getattr(tests[0].verdicts.options, name) for name in LIMITS} if tests else {}
        programs = search_asked(options | {"samples": samples}, limits)
        options = {name: value for name, value in options.items() if name not in OF_SEARCH}
    given = with_all_fields(given, [one.reward for one in scorers])
    data, form = reading(source, given, form, tests=of_run is None and bool(searches or metrics or tests))
    if not scorers and not metrics:
        raise OperantError("--reward false leaves nothing to compare models by: name a reward, or --metrics pass@1")
    if twice := next((name for name, count in Counter(one.name for one in scorers).items() if count > 1), None):
        raise OperantError(f"--reward {shown(twice)[1:-1]} is given twice, perhaps with other weights: leave one out")
    beams = counted(options, "beams", own.get("beams", 1))
    penalty = options.pop("length_penalty", own.get("length_penalty", 1.0) if beams > 1 else 1.0)
    if programs is not None and beams > 1:
        raise OperantError(f"--beams {beams} beside --tests: the programs of a search are drawn; give --beams 1")
    search = EvaluationOptions(samples=samples, beams=beams, length_penalty=convert(penalty, float, "length_penalty"))
    usual = from_generation_kwargs(compose({"": Sampling}, part(run, "sampling"))[""], part(own, "sampling"))
    sampling = compose({"": Sampling}, {**asdict(usual), **options})[""]
    plan = Plan(
        models=list(words),
        tasks=partial(TaskSet, source, data, seed, chat=chat, form=form, of_run=of_run),
        source_name=str(typed) if of_run is None else of_run.name,
        scorers=scorers,
        metrics=metrics,
        sampling=sampling,
        masked=part(run, "mask").get("by", "") in ("copy", "model"),
        search=search,
        programs=programs,
        env=None if unnamed or programs is not None else world_of(run),
        seed=seed,
        device=device,
        files=files,
    )
    for judge in plan.judges:
        rewards.check(judge)
    return plan


def asks_for_search(options: Options) -> bool:
    """Whether `--tests` is given, which is taken."""
    if not options.pop("tests", False):
        refuse(options, OF_SEARCH, " is about programs that tests judge: give --tests too")
        return False
    why = "they count replies as they are drawn, and with --tests each model hands in one program for a task"
    refuse(options, ["metrics"], f" beside --tests: {why}; leave one of the two out")
    return True


def own_tasks(name: str, run: Mapping[str, object]) -> tuple[object, OwnTasks]:
    """What the held-out tasks of a run are read from, and how it reads them."""
    source, tasks = run.get("evaluate") or None, run.get("tasks")
    named = tasks is not None and not str(tasks).startswith("<")
    options = named_parts.stored_options("tasks", run) if named else {}
    listed = [f"a list of {len(x)}" if isinstance(x, list) else str(x) for x in (source, tasks)]
    asked, source = (listed[0], source) if (held_out := share(source)) is None else (" of ".join(listed), tasks)
    if source is None or str(source).startswith("<"):
        if source is None and (world := playable(run.get("env"))):
            raise OperantError(f"{name} learnt to play {world}: measure it with `operant play {world} --player {name}`")
        what = "names no held-out tasks" if source is None else f"evaluated {source} of Python"
        raise OperantError(f"{name} {what if run else 'is no run'}: name the tasks, as in --tasks held-out.jsonl")
    data, rows = compose({"": DataOptions}, part(run, "data"))[""], find(str(run.get("algorithm", "ppo"))).rows
    own = OwnTasks(asked, tasks if named else None, options, data, part(run, "learner").get("seed", 0), rows, held_out)
    return named_parts.held_out_source(tasks, source, options), own


def world_of(run: Mapping[str, object]) -> Env | None:
    """The world that a run plays in, under its limits; None: single replies, or the games of `operant play`."""
    if (name := run.get("env")) is None or playable(name):
        return None
    made = named_parts.make("env", name, named_parts.stored_options("env", run))
    under = with_defaults(made, EnvBase).under
    return made if under is None else under(compose({"": IsolationOptions}, part(run, "isolation"))[""])


def answered(plan: Plan) -> Compared:
    """Let each model answer the tasks, by the same random numbers."""
    for name in plan.models[1:]:
        check(name)
    loaded, searches = [load(plan.models[0])], None
    tasks = plan.tasks(policy=loaded[0][0])
    if plan.programs is not None:
        loaded.clear()
        tasks.tasks, hidden = with_examples(tasks.tasks)
        if alone := len(tasks.tasks) - len(hidden):
            without = f"{alone} of {len(tasks.tasks)} tasks have no hidden tests"
            print(f"{without}: the examples choose the program and score it, so the score is too high", file=sys.stderr)
        searches = searches_of(plan.programs, plan.seed, plan.device, plan.sampling)
    for judge in plan.judges:
        tasks.show_to(judge)
    prepared(plan.metrics, tasks.tasks)
    progress, kept = ReplyProgress(len(plan.models) * len(tasks.tasks) * plan.search.samples), Kept()
    try:
        for place in range(len(plan.models)):
            answer(plan, tasks, place, loaded, searches, kept, progress)
    except KeyboardInterrupt:
        tell_finished(plan, tasks, kept)
        raise
    return in_table(plan, tasks, range(len(plan.models)), kept)


def answer(
    plan: Plan, tasks: TaskSet, at: int, loaded: Loaded, searches: Searches | None, kept: Kept, progress: ReplyProgress
) -> None:
    """Let a model answer each task. It is in memory until the last one; of `loaded` it is taken."""
    name = plan.models[at]
    how: dict[str, Any] = {"scorers": plan.scorers, "sampling": plan.sampling}
    if searches is not None:
        search, policy = searches(name)
        make = partial(handed_in, search=search, **how)
    else:
        search, (policy, engine) = None, loaded.pop() if loaded else load(name)
        policy = policy.to(find_device(plan.device))
        how |= {"engine": beam_search(policy, plan.search) or engine, "samples": plan.search.samples, "seed": plan.seed}
        if plan.env is not None:
            tell_room(plan.env, policy, plan.sampling.of(policy))
        how |= {"env": plan.env, "opening": stated_return(name, policy.tokenizer)}
        make = partial(drawn, policy=policy, stream="evaluate", **how)
    mine = tasks.of(policy, plan.sampling.max_tokens)
    kept.fill(at, mine, make, plan.search.samples, partial(progress.add, name=name))
    if search is not None:
        tell_unread(search)


def in_table(plan: Plan, tasks: TaskSet, places: Sequence[int], kept: Kept) -> Compared:
    """The models of these places with their replies to the first tasks, as many of each model."""
    found = [[*kept.of(place).values()] for place in places]
    answered = tasks.tasks[: len(found[0])]
    listed = [{"id": task.id, "prompt": tasks.text(task)} for task in answered]
    texts = [[(task, [r.text for r in replies]) for task, replies in zip(answered, of_model)] for of_model in found]
    measured = {metric.name: [metric.made.of_tasks(of_model) for of_model in texts] for metric in plan.metrics}
    names, rewarded = [plan.models[place] for place in places], [one.name for one in plan.scorers]
    return Compared(names, listed, found, rewarded, plan.seed, measured)


def tell_finished(plan: Plan, tasks: TaskSet, kept: Kept) -> None:
    """Print what an interrupted evaluation has found: a table of the models that have answered all tasks, and one of
    the model that has answered some."""
    whole, counts = len(tasks.tasks), Counter(place for place, _ in kept.done)
    for count in sorted({*counts.values()}, reverse=True):
        print(plain(f"\nof the first {count:,} of {whole:,} tasks:" if count < whole else f"\nof all {whole:,} tasks:"))
        table = in_table(plan, tasks, [p for p in counts if counts[p] == count], kept).table()
        emit("\n".join(map(plain, aligned(table))))
    finished = "above is what was finished" if counts else "no reply was judged yet"
    print(f"\noperant: interrupted; {finished}, and no file is written; the same command begins again", file=sys.stderr)


def describe(plan: Plan, count: int) -> str:
    """A sentence on how the replies were made: the tasks, and what of the sampling is no default."""
    settings, defaults = asdict(plan.sampling), asdict(Sampling())
    named = {name: x for name, x in settings.items() if x != defaults[name] or name in ("temperature", "max_tokens")}
    sampling = ", ".join(f"{name} {as_typed(x)}" for name, x in named.items())
    sampling += f", beams {plan.search.beams}" if plan.search.beams > 1 else ""
    sampling += ", masked by each model itself, because an export has no mask policy" if plan.masked else ""
    each = "one reply each" if plan.search.samples == 1 else f"{plan.search.samples} replies each"
    each = each if plan.programs is None else plan.programs.describe()
    each += "" if plan.env is None else f" in the world {name_of(plan.env)}"
    tasks = f"{count:,} task{'s' * (count != 1)}"
    return f"{tasks} of {plan.source_name}, {each}, by the same random numbers; seed {plan.seed}, {sampling}"


def write(plan: Plan, compared: Compared, about: str) -> None:
    out, report, label = (plan.files[name] for name in FILES)
    if out is not None:
        asked = {"models": plan.models, "tasks_of": plan.source_name, "samples": plan.search.samples, "seed": plan.seed}
        asked |= {} if plan.programs is None else {"search": asdict(plan.programs)}
        whole = asked | {"sampling": asdict(plan.sampling)} | compared.as_plain()
        atomic_io.write(out, atomic_io.strict_json(whole) + "\n")
        print(f"scores and replies: {out}")
    if report is not None:
        compared.page(report, about)
        print(f"side by side: {report}")
    if label is not None:
        rows = compared.label_rows()
        atomic_io.write_rows(label, rows)
        alone = len(compared.tasks) - len(rows)
        print(f"replies to judge: {label}" + (f" (without {alone} tasks whose replies are all equal)" if alone else ""))
