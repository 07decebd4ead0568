"""`operant generate MODEL --tasks FILE --tests`: programs chosen by their example tests, refined and repaired.

{"id": "p/0", "prompt": "Twice x.", "replies": ["def f(x): ..."], "programs": [{"outcome": "passed", ...}]}

With --all every candidate is a row: for a critic of outcomes, and with `--form repair` for a model that repairs.
`operant eval MODEL ... --tests` compares models by the programs that they hand in after such a search.
"""

import difflib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from operant.apps.code.critic_score import CriticScore
from operant.apps.code.problems import problem_of
from operant.apps.code.repair import TEMPLATE, check_template
from operant.apps.code.search import CUTS, Candidate, Search, SearchOptions, Writer, chosen
from operant.apps.code.verdicts import Verdicts
from operant.data import DataOptions
from operant.data.forms import Form
from operant.import_by_name import Table, names_object
from operant.metrics.passes import n_at_k, pass_at_k
from operant.options import compose, convert
from operant.options import read as read_option
from operant.runs import named_parts
from operant.runs.judged_replies import AT_ONCE, JudgedReply, Kept, Scorer
from operant.runs.named_models import load
from operant.sampling import Sampling, encode_prompt
from operant.sandbox.jail import JailOptions, Verdict
from operant.storage import atomic_io
from operant.tools.cli.arguments import new_file
from operant.tools.cli.reply_files import (
    OF_PROMPTS,
    ReplyProgress,
    TaskSet,
    counted,
    cuts,
    data_options,
    first_row,
    stamp,
    take,
    take_form,
    with_target,
)
from operant.tools.diagnosis.intervals import wilson
from operant.trackers.console import emit
from operant.training.options import find_device
from operant.types import OUTCOMES, OperantError, Rollout, Task, Turn, shown

OF_SEARCH = ("refine", "cut", "repair", "repairs", "repair_template", "rounds", "budget", "critic", "jail")
"""Options of a search for programs."""
OF_TESTS = (*OF_SEARCH, "submit", "all")
"""Options of `operant generate` that only apply to programs with tests."""
OF_OTHERS = ("best_of", "temperatures", "distinct", "reward")
"""Options of replies to a file that do not apply to them."""
OF_PROBLEMS = frozenset({"tests", "test_list", "entry_point", "input_output"})
"""Fields by which the form `code` knows problems."""
CRITICS = Table("critic", "operant.critics", {})


@dataclass(frozen=True)
class SearchAsked:
    """The search that a command line asks for."""

    options: SearchOptions
    repairer: str | None
    """None: the policy itself."""
    template: str
    critic: str | None
    jail: JailOptions

    def describe(self) -> str:
        """How the program that is handed in was found."""
        own, ways = self.options, list[str]()
        if own.refine:
            ways.append(f"refined by {own.refine}")
        if own.repair:
            ways.append(f"repaired by {self.repairer or 'the model itself'}")
        rounds = f", then {own.rounds} x {own.samples} {' or '.join(ways)}" if ways else ""
        most = "" if own.budget is None else f", {own.budget} at most"
        by = "" if self.critic is None else f" and the critic {self.critic}"
        return f"of {own.samples} program{'s' * (own.samples > 1)} each{rounds}{most}, the best by the examples{by}"


@dataclass(frozen=True)
class ProgramsAsked:
    """What the command line asks for."""

    model: str
    sampling: Sampling
    search: SearchAsked
    submit: int
    seed: int
    device: str
    out: Path | None
    all: bool

    def made_by(self, tasks: TaskSet) -> dict[str, Any]:
        """What the candidates depend on."""
        known = {name: x for name, x in asdict(self).items() if name not in ("out", "all", "submit", "device")}
        stamps = [stamp(name) for name in (self.model, self.search.repairer, self.search.critic) if name is not None]
        return known | {"weights": stamps, "tasks": [[t.id, t.prompt, t.target] for t in tasks.tasks]}


def write_programs(words: Sequence[str], options: dict[str, Any]) -> int:
    """Search for programs that solve the tasks, and write the chosen ones to `--out`, or print them."""
    source, chat = options.pop("tasks"), convert(options.pop("chat", False), bool, "chat")
    given, form = take(options, DataOptions), named_parts.stored_form(take_form(options))
    asked = what_is_asked(words, options)
    form = form or form_of_problems(source, given)
    data = data_options(source, with_target(source, given)) if form is None else compose({"": DataOptions}, given)[""]
    policy = load(asked.model)[0] if cuts(data) or form is not None else None
    tasks = TaskSet(source, data, asked.seed, chat=chat, policy=policy, form=form)
    tasks.tasks, hidden = with_examples(tasks.tasks)
    shared = parts_of(asked.search, asked.device, asked.sampling)
    kept = None if asked.out is None else Kept(asked.out, asked.made_by(tasks), dict)
    if kept is not None and kept.done:
        print(f"the programs of {len(kept.done)} tasks were made before, and are kept", file=sys.stderr)
    done = {} if kept is None else {task: rows for (_, task), rows in kept.done.items()}
    try:
        search_on(asked, tasks, hidden, shared, done, kept)
    except KeyboardInterrupt:
        if kept is not None:
            print(f"\noperant: interrupted; {kept.path} has {len(kept.done)} tasks, and the same command goes on from "
                  "there", file=sys.stderr)  # fmt: skip
        raise
    finish(asked, tasks, [done[task.id] for task in tasks.tasks], hidden, kept)
    return 0


def what_is_asked(words: Sequence[str], options: dict[str, Any]) -> ProgramsAsked:
    """Read the options, of which those of sampling are left. Raises: OperantError for one that is not valid."""
    if odd := next((name for name in (*OF_PROMPTS, *OF_OTHERS) if name in options), None):
        raise OperantError(
            f"--{odd.replace('_', '-')} beside --tests: programs are chosen by their tests; leave one of the two out"
        )
    if len(words) > 1:
        raise OperantError(f"--tests takes one model, and {words[1]!r} is a second: `operant eval` compares models")
    search, submit = search_asked(options), counted(options, "submit", 1)
    if submit > search.options.samples:
        raise OperantError(
            f"--submit {submit} of --samples {search.options.samples}: no more are submitted than are sampled"
        )
    device = options.pop("device", "auto")
    find_device(device)
    return ProgramsAsked(
        model=words[0],
        search=search,
        submit=submit,
        seed=convert(options.pop("seed", 0), int, "seed"),
        device=device,
        out=new_file("out", options.pop("out", None), (".jsonl",)),
        all=bool(options.pop("all", False)),
        sampling=compose({"": Sampling}, options)[""],
    )


def form_of_problems(source: Any, given: Mapping[str, Any]) -> Form | None:
    """The form of rows that are published problems, or hold tests and no target, if no field is named as the target."""
    named = given.get("target_field") or given.get("text_field")
    row = None if named else first_row(source)
    alone = isinstance(row, Mapping) and "target" not in row and not OF_PROBLEMS.isdisjoint(row)
    return named_parts.form("code", {}) if alone else None


def search_asked(options: dict[str, Any], limits: Mapping[str, Any] | None = None) -> SearchAsked:
    """Take the options of a search, and the number of samples. limits: of programs, where `jail` names no others.

    Raises: OperantError for one that is not valid.
    """
    refine, cut = bool(options.pop("refine", False)), options.pop("cut", None)
    repairer, critic = options.pop("repair", None), options.pop("critic", None)
    if cut is not None and cut not in CUTS:
        raise OperantError(f"--cut {shown(cut)[1:-1]}: programs are cut by {', '.join(CUTS)}")
    if cut is not None and not refine:
        raise OperantError(f"--cut {cut} says where programs are cut to be refined: give --refine too")
    if cut == "critic" and critic is None:
        raise OperantError("--cut critic needs a critic: name it, as in --critic runs/critic")
    if idle := next((name for name in ("repairs", "repair_template") if name in options and repairer is None), None):
        raise OperantError(f"--{idle.replace('_', '-')} is about repairing: give --repair policy or --repair MODEL too")
    if idle := next((n for n in ("rounds", "budget") if n in options and not refine and repairer is None), None):
        raise OperantError(f"--{idle} counts what is refined and repaired: give --refine or --repair too")
    own = SearchOptions(
        samples=counted(options, "samples", 1),
        refine=(cut or ("line" if critic is None else "critic")) if refine else None,
        repair=counted(options, "repairs", 1) if repairer is not None else 0,
        rounds=counted(options, "rounds", 1),
        budget=counted(options, "budget", 1) if "budget" in options else None,
    )
    jail = read_option(options.pop("jail", {}))
    if not isinstance(jail, Mapping):
        raise OperantError(f"--jail {shown(jail)}: give options in braces, as in --jail '{{seconds: 2}}'")
    return SearchAsked(
        own,
        repairer=None if repairer in (None, "policy") else str(repairer),
        template=check_template(str(options.pop("repair_template", TEMPLATE))),
        critic=critic,
        jail=compose({"jail": JailOptions}, {"jail": {**(limits or {}), **jail}})["jail"],
    )


@dataclass(frozen=True)
class SearchParts:
    """What the searches of several models share."""

    asked: SearchAsked
    critic: Any
    verdicts: Verdicts
    repairer: Writer | None


def parts_of(asked: SearchAsked, device: str, sampling: Sampling) -> SearchParts:
    """The critic and the repair model, if they are named, and what runs the programs; says where they run.

    Raises: OperantError for one that cannot be loaded, or a jail that does not work here.
    """
    critic, verdicts = None if asked.critic is None else critic_of(asked.critic), Verdicts(asked.jail)
    print(f"jail: {verdicts.jail.describe()}", file=sys.stderr)
    repairer = None if asked.repairer is None else writer_of(asked.repairer, device, sampling)[0]
    return SearchParts(asked, critic, verdicts, repairer)


def with_examples(tasks: Sequence[Task]) -> tuple[list[Task], set[str]]:
    """The tasks, and the names of those that have hidden tests. Where there are examples alone, they are the tests.

    It says how many tasks have no example tests; of these, any program that runs is as good as another.
    Raises: OperantError if that is so of all tasks, or for one without any tests.
    """
    hidden = {task.id for task in tasks if isinstance(task.target, Mapping) and task.target.get("tests")}
    found = [
        replace(task, target={**task.target, "tests": task.target["examples"]})
        if task.id not in hidden and isinstance(task.target, Mapping) and task.target.get("examples")
        else task
        for task in tasks
    ]
    bare = [task.id for task in found if not problem_of(task).examples]
    if bare and len(bare) == len(tasks):
        raise OperantError(
            f"none of {len(tasks)} tasks, first {bare[0]!r}, has example tests, by which programs are chosen: give "
            "their target {'examples': ['assert f(0) == 0']}, or add --form.examples 2 to --form apps"
        )
    if bare:
        without = f"{len(bare)} of {len(tasks)} tasks, first {bare[0]!r}, have no example tests"
        print(f"{without}: of their programs any that runs may be chosen", file=sys.stderr)
    return found, hidden


def critic_of(name: str) -> Any:
    """A critic of beginnings: a run or folder of an outcome critic, or `module:object` of one's own.

    Raises: OperantError if there is none.
    """
    critic = CRITICS.find(name)() if names_object(name, CRITICS) else CriticScore(name)
    if not callable(getattr(critic, "prefixes", None)):
        raise OperantError(f"--critic {name}: {type(critic).__name__} has no method prefixes(problem, ids, tokenizer)")
    if callable(check := getattr(critic, "check", None)):
        check()
    return critic


def writer_of(name: str, device: str, sampling: Sampling) -> tuple[Writer, Any]:
    """A model that writes programs, and its policy. Raises: OperantError for a model without a tokenizer."""
    policy, engine = load(name)
    if policy.tokenizer is None:
        raise OperantError(f"{name} has no tokenizer, and programs are texts: save its tokenizer into its folder")
    policy, own = policy.to(find_device(device)), sampling.of(policy)
    return Writer(policy.tokenizer, engine, own, lambda size: policy.misfit(size, own.max_tokens) is None), policy


def searcher(shared: SearchParts, model: str, seed: int, device: str, sampling: Sampling) -> tuple[Search, Any]:
    """The search by a model, and its policy. Raises: OperantError as `writer_of`."""
    writer, policy = writer_of(model, device, sampling)
    how = {"seed": seed, "critic": shared.critic, "repairer": shared.repairer, "template": shared.asked.template}
    return Search(shared.asked.options, writer, shared.verdicts, **how), policy


def handed_in(
    search: Search, tasks: Sequence[Task], scorers: Sequence[Scorer], sampling: Sampling
) -> Iterator[list[JudgedReply]]:
    """Yield for each task the program that its search hands in, with its scores, as its only reply."""
    size, tokenizer = max(1, AT_ONCE // search.options.samples), search.writers[0].tokenizer
    for begin in range(0, len(tasks), size):
        some = tasks[begin : begin + size]
        best = [chosen(candidates, 1)[0] for candidates in search(some)]
        rollouts = []
        for task, c in zip(some, best, strict=True):
            prompt = encode_prompt(tokenizer, task.prompt)
            # A repair model may have another tokenizer.
            ids = tokenizer.encode(c.text, add_special_tokens=False) if c.writer else c.ids
            query = tokenizer.decode(prompt, skip_special_tokens=True)
            rollouts.append(Rollout(task, 0, [Turn(prompt, list(ids))], [c.text], query=query))
        scores = {one.name: one(rollouts, sampling, tokenizer) for one in scorers}
        for i, (c, rollout) in enumerate(zip(best, rollouts, strict=True)):
            yield [JudgedReply(c.text, rollout.count, {name: found[i] for name, found in scores.items()})]
    tell_unread(search)


def tell_unread(search: Search) -> None:
    """Say how many failures could not be repaired."""
    if search.unread:
        print(f"{search.unread} failures were too long for the repair model to read, and were passed over")


def search_on(
    asked: ProgramsAsked,
    tasks: TaskSet,
    hidden: set[str],
    shared: SearchParts,
    done: dict[str, list[dict[str, Any]]],
    kept: Kept | None,
) -> None:
    """Add the candidates of each task that is not in `done` as rows."""
    if all(task.id in done for task in tasks.tasks):
        return
    search, policy = searcher(shared, asked.model, asked.seed, asked.device, asked.sampling)
    rest = [task for task in tasks.of(policy, asked.sampling.max_tokens) if task.id not in done]
    texts = {task.id: tasks.text(task) for task in tasks.tasks}
    samples = asked.search.options.samples
    progress, size = ReplyProgress(len(rest) * samples), max(1, AT_ONCE // samples)
    for begin in range(0, len(rest), size):
        some = rest[begin : begin + size]
        found = search(some)
        asked_of = [(task, c) for task, of_task in zip(some, found, strict=True) if task.id in hidden for c in of_task]
        of_tests = iter(shared.verdicts([problem_of(task).program(c.text) for task, c in asked_of]))
        for task, candidates in zip(some, found, strict=True):
            rows = rows_of(texts[task.id], task, candidates,
                           [next(of_tests) if task.id in hidden else None for _ in candidates])  # fmt: skip
            done[task.id] = rows
            if kept is not None:
                kept.add(0, task, rows)
        progress.add(len(some) * samples, asked.model)
    tell_unread(search)


def rows_of(
    prompt: Any, task: Task, candidates: Sequence[Candidate], judged: Sequence[Verdict | None]
) -> list[dict[str, Any]]:
    """The candidates of a task as rows. judged: their verdicts on the hidden tests."""
    best = [id(c) for c in chosen(candidates, len(candidates))]
    pairs = zip(candidates, judged, strict=True)
    right = {c.text: None for c, v in pairs if c.passed and (v or c.verdict).outcome == "passed"}
    rows = []
    for c, verdict in zip(candidates, judged, strict=True):
        final = verdict or c.verdict
        row = {"task": task.id, "prompt": prompt, "completion": c.text, "outcome": final.outcome}
        row |= {"message": final.message, "share": final.share, "hidden": verdict is not None}
        row |= {"examples": c.verdict.outcome, "examples_message": c.verdict.message}
        row |= {"how": c.how, "round": c.round, "sample": c.sample, "parent": c.parent, "kept": c.kept}
        row |= {"critic": c.scores[-1]} if c.scores else {}
        row |= {"rank": best.index(id(c))} if id(c) in best else {}
        if not c.passed and (nearest := nearest_to(c.text, [*right] or task.references)):
            row["right"] = nearest
        rows.append(row)
    return rows


def nearest_to(text: str, others: Sequence[str]) -> str | None:
    """Of several texts the one that shares most with `text`; None without any."""
    return max(others, key=lambda other: difflib.SequenceMatcher(None, text, other).ratio(), default=None)


def finish(
    asked: ProgramsAsked, tasks: TaskSet, rows: Sequence[list[dict[str, Any]]], hidden: set[str], kept: Kept | None
) -> None:
    """Write the chosen programs, or all candidates, or print them; then say what they are."""
    ranked = [sorted((r for r in some if "rank" in r), key=lambda r: r["rank"])[: asked.submit] for some in rows]
    if asked.all:
        lines = [row for some in rows for row in some]
    else:
        about = ("outcome", "message", "share", "hidden", "examples", "examples_message", "how", "round", "critic")
        lines = [
            {"id": task.id, "prompt": tasks.text(task), "replies": [row["completion"] for row in best]}
            | {"programs": [{name: row[name] for name in about if name in row} for row in best]}
            for task, best in zip(tasks.tasks, ranked, strict=True)
        ]
    if asked.out is None:
        for line in lines:
            emit(json.dumps(line, ensure_ascii=False), sys.stdout)
    else:
        atomic_io.write(asked.out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        if kept is not None:
            kept.remove()
        what = f"{sum(map(len, rows)):,} candidates" if asked.all else "the chosen programs"
        print(f"{what} for {len(rows):,} tasks: {asked.out}")
    for line in summary(asked, rows, ranked, hidden):
        print(line, file=sys.stderr if asked.out is None else sys.stdout)


def summary(
    asked: ProgramsAsked, rows: Sequence[list[dict[str, Any]]], ranked: Sequence[list[dict[str, Any]]], hidden: set[str]
) -> list[str]:
    """Sentences on what became of the programs."""
    outcomes = Counter(row["examples"] for some in rows for row in some)
    shares = ", ".join(f"{name} {outcomes[name] / outcomes.total():.1%}" for name in OUTCOMES)
    lines = [f"on the example tests: {shares}"]
    judged = [some for some in rows if some[0]["task"] in hidden]
    if judged:
        drawn = [[row for row in some if row["round"] == 0] for some in judged]
        right = [[row["outcome"] == "passed" for row in some] for some in drawn]
        kept = [[row["examples"] == "passed" for row in some] for some in drawn]
        both = [sum(map(all, zip(*pair, strict=True))) for pair in zip(right, kept, strict=True)]
        k, n = asked.search.options.samples, asked.submit
        passes = {f"pass@{j}": fmean(pass_at_k(k, sum(r), j) for r in right) for j in dict.fromkeys((1, k))}
        passes[f"{n}@{k}"] = fmean(n_at_k(k, sum(m), c, n, k) for m, c in zip(kept, both, strict=True))
        numbers = ", ".join(f"{name} {x:.3f}" for name, x in passes.items())
        lines.append(f"on the hidden tests, {k} sample{'s' * (k > 1)} of each of {len(judged)} tasks: {numbers}")
        best = [some for some in ranked if some[0]["task"] in hidden]
        solved = sum(any(row["outcome"] == "passed" for row in some) for some in best)
        low, high = wilson(solved / len(best), len(best))
        ways = Counter(row["how"] for some in best for row in some)
        made = ", ".join(f"{ways[how]} {how}" for how in ("sampled", "refined", "repaired") if ways[how])
        share = f"{solved / len(best):.3f} [{low:.3f}, {high:.3f}]"
        lines.append(
            f"the chosen programs solve {solved} of {len(best)} tasks ({share}); of these programs {made}; "
            f"{sum(map(len, judged)) / len(judged):.1f} were made for a task"
        )
    return lines
