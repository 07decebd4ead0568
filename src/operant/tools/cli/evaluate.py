"""`operant eval`: models answer held-out tasks, and are compared by the rewards of their replies."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from operant import rewards
from operant.algorithms import find
from operant.apps.code.unit_tests import UnitTests
from operant.data import DataOptions
from operant.data.forms import Form
from operant.data.sources import share
from operant.metrics.evaluation import EvaluationMetric, chosen, prepared, resolve
from operant.metrics.passes import check_samples, numbers_in
from operant.options import compose, convert
from operant.rollouts.generation_kwargs import from_generation_kwargs
from operant.runs import named_parts
from operant.runs.evaluate import EvaluationOptions, beam_search
from operant.runs.games import playable
from operant.runs.judged_replies import JudgedReply, Scorer, as_spec, judged, part, scorer
from operant.runs.named_models import check, load, run_options
from operant.runs.signals import terminated_as_interrupted
from operant.sampling import Sampling
from operant.storage import atomic_io
from operant.tools.cli.arguments import new_file
from operant.tools.cli.parser import as_typed
from operant.tools.cli.play import aligned
from operant.tools.cli.program_files import (
    OF_SEARCH,
    SearchAsked,
    SearchParts,
    form_of_problems,
    handed_in,
    parts_of,
    search_asked,
    searcher,
    with_examples,
)
from operant.tools.cli.reply_files import (
    ReplyProgress,
    RunShare,
    TaskSet,
    counted,
    data_options,
    take,
    take_form,
    with_target,
)
from operant.tools.cli.sample_files import ENDINGS, score_samples
from operant.tools.report.models import Compared
from operant.trackers.console import emit, plain
from operant.training.options import find_device
from operant.types import OperantError, shown

FILES = {"out": (".json",), "report": (".html",), "label": (".jsonl",)}
"""Options that name a file to write, and how its name ends."""
LIMITS = ("level", "seconds", "memory", "at_once", "compare")
"""The limits of a jail that the reward `tests` has."""


@dataclass(frozen=True)
class Plan:
    """What the command line asks for."""

    models: list[str]
    source: Any
    source_name: str
    """What the tasks are of, in sentences and files."""
    of_run: RunShare | None
    """Only the tasks that the first run has held out of its own; None: all of the source."""
    data: DataOptions
    form: Form | None
    chat: bool
    scorers: list[Scorer]
    metrics: list[EvaluationMetric]
    """pass@k and n@k, which are numbers of all replies to a task."""
    sampling: Sampling
    masked: bool
    """Whether the run had a mask policy, which is not exported: each model then truncates its own distribution."""
    search: EvaluationOptions
    """Its beams and length penalty."""
    programs: SearchAsked | None
    """Each model hands in one program for a task, after this search; None: its replies are judged as they are drawn."""
    samples: int
    seed: int
    device: str
    files: Mapping[str, Path | None]


def evaluate(words: Sequence[str], options: dict[str, Any]) -> int:
    """`operant eval runs/a runs/b --tasks FILE --reward letters:e` prints a table; `--report` writes a page."""
    if any(word.endswith(ENDINGS) for word in words):
        return score_samples(words, options)
    plan = planned(words, options)
    try:
        with terminated_as_interrupted():
            compared = answered(plan)
    finally:
        for one in plan.scorers:
            one.close()
    about = describe(plan, len(compared.tasks))
    print(plain(about))
    for line in aligned(compared.table()):
        emit(plain(line), sys.stdout)
    write(plan, compared, about)
    return 0


def planned(words: Sequence[str], options: dict[str, Any]) -> Plan:
    """Read the options, of which those of sampling are left; what is missing is that of the first run.

    Raises: OperantError for one that is not valid, or missing.
    """
    if not words:
        raise OperantError("expected models to evaluate: operant eval runs/a runs/b --tasks held-out.jsonl")
    if len(set(words)) < len(words):
        raise OperantError("a model is named twice: its replies to the same task would be the same ones")
    run = run_options(words[0])
    files = {name: new_file(name, options.pop(name, None), endings) for name, endings in FILES.items()}
    samples, device = counted(options, "samples", 1), options.pop("device", "auto")
    find_device(device)
    seed = convert(options.pop("seed", part(run, "learner").get("seed", 0)), int, "seed")
    chat = convert(options.pop("chat", False), bool, "chat")
    source, given, named = options.pop("tasks", None), take(options, DataOptions), take_form(options)
    of_run = None
    if not (typed := source is not None):
        source, given = own_tasks(words[0], run), {**part(run, "data"), **given}
        of_run = own_share(run)
        named = named or named_parts.only(run, "form")
    form = named_parts.stored_form(named)
    searches = asks_for_search(options)
    metrics = metrics_of_tasks(options.pop("metrics", None), samples)
    paid = "tests" if searches and run.get("reward") is None else not metrics
    specs = [as_spec(spec) for spec in options.pop("reward", [paid])]
    scorers = [scorer(spec, run) for spec in specs if spec is not False]
    tests = [part for one in scorers for part in rewards.parts_of(one.reward, UnitTests)]
    programs = None
    if searches:  # a program has the limits that it will be judged under
        limits = {name: getattr(tests[0].verdicts.options, name) for name in LIMITS} if tests else {}
        programs = search_asked(options | {"samples": samples}, limits)
        options = {name: value for name, value in options.items() if name not in OF_SEARCH}
    if form is None and typed and (searches or metrics or tests):
        form = form_of_problems(source, given)
        given = with_target(source, given) if form is None else given
    if not scorers and not metrics:
        raise OperantError("--reward false leaves nothing to compare models by: name a reward, or --metrics pass@1")
    names = [one.name for one in scorers]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise OperantError(f"--reward {shown(twice)[1:-1]} is given twice: leave one of the two out")
    own = part(run, "evaluation")
    beams = counted(options, "beams", own.get("beams", 1))
    penalty = convert(options.pop("length_penalty", own.get("length_penalty", 1.0)), float, "length_penalty")
    if programs is not None and beams > 1:
        raise OperantError(f"--beams {beams} beside --tests: the programs of a search are drawn; give --beams 1")
    search = EvaluationOptions(samples=samples, beams=beams, length_penalty=penalty)
    sampling = compose({"": Sampling}, {**part(run, "sampling"), **options})[""]
    for one in scorers:
        rewards.check(one.reward)
    evaluated = part(own, "sampling")
    kept = {name: value for name, value in evaluated.items() if name not in options}
    return Plan(
        models=list(words),
        source=source,
        source_name=str(source) if of_run is None else of_run.source_name,
        of_run=of_run,
        data=data_options(source, given) if form is None else compose({"": DataOptions}, given)[""],
        form=form,
        chat=chat,
        scorers=scorers,
        metrics=metrics,
        sampling=from_generation_kwargs(sampling, kept),
        masked=part(run, "mask").get("by", "") in ("copy", "model"),
        search=search,
        programs=programs,
        samples=samples,
        seed=seed,
        device=device,
        files=files,
    )


def asks_for_search(options: dict[str, Any]) -> bool:
    """Whether `--tests` is given, which is taken. Raises: OperantError for an option that does not go with it."""
    if not options.pop("tests", False):
        if odd := next((name for name in OF_SEARCH if name in options), None):
            raise OperantError(f"--{odd.replace('_', '-')} is about programs that tests judge: give --tests too")
        return False
    if "metrics" in options:
        raise OperantError(
            "--metrics beside --tests: they count replies as they are drawn, and with --tests each model hands in one "
            "program for a task; leave one of the two out"
        )
    return True


def metrics_of_tasks(given: Any, samples: int) -> list[EvaluationMetric]:
    """The metrics pass@k and n@k that are asked for. Raises: OperantError for any other one, or a k above `samples`."""
    if odd := next((name for name in chosen(given) if numbers_in(name) is None), None):
        raise OperantError(
            f"--metrics {odd}: models are compared by pass@k and n@k, such as pass@8 or 1@8; any score of a text is a "
            "reward, as in --reward bleu"
        )
    check_samples([*chosen(given)], samples, "--samples ")
    return resolve(given)


def own_tasks(name: str, run: Mapping[str, Any]) -> Any:
    """The held-out tasks of a run. Raises: OperantError if it has none, or if no file holds them."""
    source = run.get("evaluate") or None
    if share(source) is not None:
        source = run["tasks"]
        if not str(source).startswith("<"):
            return named_parts.source(source, named_parts.stored_options("tasks", run))
    if source is None or str(source).startswith("<"):
        if source is None and (world := playable(run.get("env"))):
            raise OperantError(f"{name} learnt to play {world}: measure it with `operant play {world} --player {name}`")
        why = "is no run" if not run else "has no held-out tasks" if source is None else f"evaluated {source} of Python"
        raise OperantError(f"{name} {why}: name the tasks, as in --tasks held-out.jsonl")
    return source


def own_share(run: Mapping[str, Any]) -> RunShare | None:
    """The share that a run holds out of its own tasks; None if it names its held-out tasks otherwise."""
    named = run.get("evaluate")
    if (held_out := share(named)) is None:
        return None
    seed, rows = part(run, "learner").get("seed", 0), find(str(run.get("algorithm", "ppo"))).rows
    return RunShare(f"{named} of {run['tasks']}", held_out, seed, rows)


def answered(plan: Plan) -> Compared:
    """Let each model answer the tasks, by the same random numbers.

    Raises: OperantError for tasks or a model that cannot be loaded, or a prompt that is too long.
    """
    for name in plan.models[1:]:
        check(name)
    found, loaded = list[list[list[JudgedReply]]](), [load(plan.models[0])]
    tasks = TaskSet(
        plan.source, plan.data, plan.seed, chat=plan.chat, policy=loaded[0][0], form=plan.form, of_run=plan.of_run
    )
    shared = None
    if plan.programs is not None:
        loaded.clear()
        tasks.tasks, hidden = with_examples(tasks.tasks)
        if alone := len(tasks.tasks) - len(hidden):
            without = f"{alone} of {len(tasks.tasks)} tasks have no hidden tests"
            print(f"{without}: the examples choose the program and score it, so the score is too high", file=sys.stderr)
        shared = parts_of(plan.programs, plan.device, plan.sampling)
    for one in plan.scorers:
        rewards.prepare(one.reward, tasks.tasks)
    prepared(plan.metrics, tasks.tasks)
    progress = ReplyProgress(len(plan.models) * len(tasks.tasks) * plan.samples)
    try:
        for name in plan.models:
            found.append([])
            for replies in answers(plan, tasks, name, loaded, shared):
                found[-1].append(replies)
                progress.add(plan.samples, name)
    except KeyboardInterrupt:
        tell_finished(plan, tasks, found)
        raise
    return in_table(plan, tasks, plan.models, found)


def in_table(
    plan: Plan, tasks: TaskSet, models: Sequence[str], found: Sequence[Sequence[list[JudgedReply]]]
) -> Compared:
    """The models with their replies to the first tasks, as many of each model."""
    answered = tasks.tasks[: len(found[0])]
    listed = [{"id": task.id, "prompt": tasks.text(task)} for task in answered]
    measured = {
        metric.name: [
            metric.made.of_tasks([(task, [r.text for r in replies]) for task, replies in zip(answered, of_model)])
            for of_model in found
        ]
        for metric in plan.metrics
    }
    return Compared(models, listed, found, [one.name for one in plan.scorers], plan.seed, measured)


def tell_finished(plan: Plan, tasks: TaskSet, found: Sequence[Sequence[list[JudgedReply]]]) -> None:
    """Print what an interrupted evaluation has found: a table of the models that have answered all tasks, and one of
    the model that has answered some."""
    whole = len(tasks.tasks)
    for count in sorted({len(replies) for replies in found} - {0}, reverse=True):
        some = [(name, replies) for name, replies in zip(plan.models, found) if len(replies) == count]
        print(plain(f"\nof the first {count:,} of {whole:,} tasks:" if count < whole else f"\nof all {whole:,} tasks:"))
        for line in aligned(in_table(plan, tasks, *zip(*some)).table()):
            emit(plain(line), sys.stdout)
    kept = "above is what was finished" if any(found) else "no reply was judged yet"
    text = f"operant: interrupted; {kept}, and no file is written; the same command begins again"
    print(f"\n{text}", file=sys.stderr)


def answers(
    plan: Plan, tasks: TaskSet, name: str, loaded: list[Any], shared: SearchParts | None
) -> Iterator[list[JudgedReply]]:
    """Yield the replies of a model to each task. It is in memory until the last one; of `loaded` it is taken."""
    if shared is not None:
        search, policy = searcher(shared, name, plan.seed, plan.device, plan.sampling)
        yield from handed_in(search, tasks.of(policy, plan.sampling.max_tokens), plan.scorers, plan.sampling)
        return
    policy, engine = loaded.pop() if loaded else load(name)
    policy = policy.to(find_device(plan.device))
    engine = beam_search(policy, plan.search) or engine
    mine, numbers = tasks.of(policy, plan.sampling.max_tokens), {"samples": plan.samples, "seed": plan.seed}
    for _, replies in judged(mine, policy, engine, plan.sampling, plan.scorers, stream="evaluate", **numbers):
        yield replies


def describe(plan: Plan, count: int) -> str:
    """A sentence on how the replies were made: the tasks, and what of the sampling is no default."""
    settings, defaults = asdict(plan.sampling), asdict(Sampling())
    named = {name: x for name, x in settings.items() if x != defaults[name] or name in ("temperature", "max_tokens")}
    sampling = ", ".join(f"{name} {as_typed(x)}" for name, x in named.items())
    sampling += f", beams {plan.search.beams}" if plan.search.beams > 1 else ""
    sampling += ", masked by each model itself, because an export has no mask policy" if plan.masked else ""
    each = "one reply each" if plan.samples == 1 else f"{plan.samples} replies each"
    each = each if plan.programs is None else plan.programs.describe()
    return f"{count:,} tasks of {plan.source_name}, {each}, by the same random numbers; seed {plan.seed}, {sampling}"


def write(plan: Plan, compared: Compared, about: str) -> None:
    """Write the files that are asked for. Raises: OperantError if the disk refuses."""
    out, report, label = (plan.files[name] for name in FILES)
    if out is not None:
        asked = {"models": plan.models, "tasks_of": plan.source_name, "samples": plan.samples, "seed": plan.seed}
        if plan.programs is not None:
            asked["search"] = asdict(plan.programs)
        whole = asked | {"sampling": asdict(plan.sampling)} | compared.as_plain()
        atomic_io.write(out, atomic_io.strict_json(whole) + "\n")
        print(f"scores and replies: {out}")
    if report is not None:
        compared.page(report, about)
        print(f"side by side: {report}")
    if label is not None:
        rows = compared.label_rows()
        atomic_io.write(label, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        alone = sum(len(row["replies"]) == 1 for row in rows)
        print(f"replies to judge: {label}" + (f" ({alone} tasks have only one different reply)" if alone else ""))
