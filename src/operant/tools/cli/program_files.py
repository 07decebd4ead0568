"""`operant generate MODEL --tasks FILE --tests`: programs chosen by their example tests, refined and repaired.

{"id": "p/0", "prompt": "Twice x.", "replies": ["def f(x): ..."], "programs": [{"outcome": "passed", ...}]}

With --all every candidate is a row: for a critic of outcomes, and with `--form repair` for a model that repairs.
`operant eval MODEL ... --tests` compares models by the programs that they hand in after such a search.
"""

import difflib
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from operant.apps.code.critic_score import CriticScore
from operant.apps.code.forms import TEMPLATE, check_template
from operant.apps.code.problems import problem_of
from operant.apps.code.search import CUTS, Candidate, PrefixCritic, Search, SearchOptions, Writer, chosen
from operant.apps.code.verdicts import Verdicts
from operant.import_by_name import Table, names_object
from operant.metrics.passes import of_samples
from operant.models.loading import Trained
from operant.options import compose
from operant.options import read as read_option
from operant.rewards.text_scores import RewardBase
from operant.runs.judged_replies import JudgedReply, Kept, Scorer, scored
from operant.runs.named_models import load
from operant.sampling import Sampling, encode_prompt
from operant.sandbox.jail import JailOptions, Verdict
from operant.tools.cli.arguments import Options, counted, new_file, refuse, taken
from operant.tools.cli.reply_files import OF_PROMPTS, ReplyProgress, TaskSet, going_on, hand_over, stamp, tasks_asked
from operant.tools.report.diagnosis.intervals import wilson
from operant.training.options import find_device
from operant.types import OUTCOMES, OperantError, Rollout, Task, Turn, require, shown, with_defaults

OF_SEARCH = ("refine", "cut", "repair", "repairs", "repair_template", "rounds", "budget", "critic", "jail")
"""Options of a search for programs."""
OF_TESTS = (*OF_SEARCH, "submit", "all")
"""Options of `operant generate` that only apply to programs with tests."""
OF_OTHERS = ("best_of", "temperatures", "distinct", "reward")
"""Options of replies to a file that do not apply to them."""
CRITICS = Table("critic", "operant.critics", {})
Searches = Callable[[str], tuple[Search, Trained]]
"""What makes the search by a model of that name, and its policy."""
Rows = Sequence[list[dict[str, Any]]]
"""The candidates of each task, as `rows_of` gives them."""


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

    def made_by(self, tasks: TaskSet) -> dict[str, object]:
        """What the candidates depend on."""
        known = {name: x for name, x in asdict(self).items() if name not in ("out", "all", "submit", "device")}
        stamps = [stamp(name) for name in (self.model, self.search.repairer, self.search.critic) if name is not None]
        return known | {"weights": stamps, "tasks": [[t.id, t.prompt, t.target] for t in tasks.tasks]}


def write_programs(words: Sequence[str], options: Options) -> int:
    """Search for programs that solve the tasks, and write the chosen ones to `--out`, or print them."""
    tasks_for, asked = tasks_asked(options, tests=True), what_is_asked(words, options)
    tasks = tasks_for(asked.seed, asked.model)
    tasks.tasks, hidden = with_examples(tasks.tasks)
    searches = searches_of(asked.search, asked.seed, asked.device, asked.sampling)
    kept = Kept(asked.out, asked.made_by(tasks), dict)
    with going_on(kept):
        search_on(asked, tasks, hidden, searches, kept)
    finish(asked, tasks, [kept.done[0, task.id] for task in tasks.tasks], hidden, kept)
    return 0


def what_is_asked(words: Sequence[str], options: Options) -> ProgramsAsked:
    """Read the options, of which those of sampling are left."""
    odd = " beside --tests: programs are chosen by their tests; leave one of the two out"
    refuse(options, (*OF_PROMPTS, *OF_OTHERS), odd)
    if len(words) > 1:
        raise OperantError(f"--tests takes one model, and {words[1]!r} is a second: `operant eval` compares models")
    search, submit = search_asked(options), counted(options, "submit", 1)
    drawn = search.options.samples
    require(submit <= drawn, f"--submit {submit} of --samples {drawn}: no more are submitted than are sampled")
    seed, device, every = taken(options, "seed", 0), options.pop("device", "auto"), bool(options.pop("all", False))
    find_device(device)
    out, sampling = new_file("out", options.pop("out", None), (".jsonl",)), compose({"": Sampling}, options)[""]
    return ProgramsAsked(words[0], sampling, search, submit, seed, device, out, every)


def search_asked(options: Options, limits: Mapping[str, object] | None = None) -> SearchAsked:
    """Take the options of a search, and the number of samples. limits: of programs, where `jail` names no others."""
    refine, cut = bool(options.pop("refine", False)), options.pop("cut", None)
    repairer, critic = options.pop("repair", None), options.pop("critic", None)
    require(cut is None or cut in CUTS, f"--cut {shown(cut)[1:-1]}: programs are cut by {', '.join(CUTS)}")
    require(cut is None or refine, f"--cut {cut} says where programs are cut to be refined: give --refine too")
    require(cut != "critic" or critic is not None, "--cut critic needs a critic: name it, as in --critic runs/critic")
    alone = " is about repairing: give --repair policy or --repair MODEL too"
    refuse(options if repairer is None else {}, ("repairs", "repair_template"), alone)
    if repairer is None and not refine:
        refuse(options, ("rounds", "budget"), " counts what is refined and repaired: give --refine or --repair too")
    own = SearchOptions(
        samples=counted(options, "samples", 1),
        refine=(cut or ("line" if critic is None else "critic")) if refine else None,
        repair=counted(options, "repairs", 1) if repairer is not None else 0,
        rounds=counted(options, "rounds", 1),
        budget=counted(options, "budget", 1) if "budget" in options else None,
    )
    jail = read_option(options.pop("jail", {}))
    require(isinstance(jail, Mapping), f"--jail {shown(jail)}: give options in braces, as in --jail '{{seconds: 2}}'")
    template = check_template(str(options.pop("repair_template", TEMPLATE)))
    limited = compose({"jail": JailOptions}, {"jail": {**(limits or {}), **jail}})["jail"]
    return SearchAsked(own, None if repairer in (None, "policy") else str(repairer), template, critic, limited)


def searches_of(asked: SearchAsked, seed: int, device: str, sampling: Sampling) -> Searches:
    """It says where programs run."""
    critic, verdicts = None if asked.critic is None else critic_of(asked.critic), Verdicts(asked.jail)
    print(f"jail: {verdicts.jail.describe()}", file=sys.stderr)
    repairer = None if asked.repairer is None else writer_of(asked.repairer, device, sampling)[0]
    how = {"seed": seed, "critic": critic, "repairer": repairer, "template": asked.template}

    def search_by(model: str) -> tuple[Search, Trained]:
        writer, policy = writer_of(model, device, sampling)
        return Search(asked.options, writer, verdicts, **how), policy

    return search_by


def with_examples(tasks: Sequence[Task]) -> tuple[list[Task], set[str]]:
    """The tasks, and the names of those that have hidden tests. Where there are examples alone, they are the tests.

    It says how many tasks have no example tests; of these, any program that runs is as good as another.
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
        none = f"none of {len(tasks)} tasks, first {bare[0]!r}, has example tests, by which programs are chosen"
        how = "give their target {'examples': ['assert f(0) == 0']}, or add --form.examples 2 to --form apps"
        raise OperantError(f"{none}: {how}")
    if bare:
        without = f"{len(bare)} of {len(tasks)} tasks, first {bare[0]!r}, have no example tests"
        print(f"{without}: of their programs any that runs may be chosen", file=sys.stderr)
    return found, hidden


def critic_of(name: str) -> PrefixCritic:
    """A critic of beginnings: a run or folder of an outcome critic, or `module:object` of one's own."""
    critic = CRITICS.find(name)() if names_object(name, CRITICS) else CriticScore(name)
    if not isinstance(critic, PrefixCritic):
        raise OperantError(f"--critic {name}: {type(critic).__name__} has no method prefixes(problem, ids, tokenizer)")
    with_defaults(critic, RewardBase).check()
    return critic


def writer_of(name: str, device: str, sampling: Sampling) -> tuple[Writer, Trained]:
    """A model that writes programs, and its policy."""
    policy, engine = load(name)
    if policy.tokenizer is None:
        raise OperantError(f"{name} has no tokenizer, and programs are texts: save its tokenizer into its folder")
    policy, own = policy.to(find_device(device)), sampling.of(policy)
    return Writer(policy.tokenizer, engine, own, lambda size: policy.misfit(size, own.max_tokens) is None), policy


def handed_in(
    tasks: Sequence[Task], *, search: Search, scorers: Sequence[Scorer], sampling: Sampling
) -> list[list[JudgedReply]]:
    """For each task the program that its search hands in, with its scores, as its only reply."""
    tokenizer, rollouts = search.writers[0].tokenizer, []
    for task, candidates in zip(tasks, search(tasks), strict=True):
        [best] = chosen(candidates, 1)
        prompt = encode_prompt(tokenizer, task.prompt)
        # A repair model may have another tokenizer.
        ids = tokenizer.encode(best.text, add_special_tokens=False) if best.writer else best.ids
        query = tokenizer.decode(prompt, skip_special_tokens=True)
        rollouts.append(Rollout(task, 0, [Turn(prompt, list(ids))], [best.text], query=query))
    return [[reply] for reply in scored(rollouts, scorers, sampling, tokenizer)]


def tell_unread(search: Search) -> None:
    """Say how many failures could not be repaired."""
    if search.unread:
        print(f"{search.unread} failures were too long for the repair model, and were passed over", file=sys.stderr)


def search_on(asked: ProgramsAsked, tasks: TaskSet, hidden: set[str], searches: Searches, kept: Kept) -> None:
    """Keep the candidates of each task that has none as rows."""
    if len(kept.done) == len(tasks.tasks):
        return
    search, policy = searches(asked.model)
    texts, samples = {task.id: tasks.text(task) for task in tasks.tasks}, asked.search.options.samples
    progress = ReplyProgress((len(tasks.tasks) - len(kept.done)) * samples)

    def candidates(some: Sequence[Task]) -> list[list[dict[str, object]]]:
        found = [*zip(some, search(some), strict=True)]
        programs = [problem_of(t).program(c.text) for t, of_task in found if t.id in hidden for c in of_task]
        judged = iter(search.verdicts(programs))
        return [
            rows_of(texts[task.id], task, of_task, [next(judged) if task.id in hidden else None for _ in of_task])
            for task, of_task in found
        ]

    mine = tasks.of(policy, asked.sampling.max_tokens)
    kept.fill(0, mine, candidates, samples, partial(progress.add, name=asked.model))
    tell_unread(search)


def rows_of(
    prompt: object, task: Task, candidates: Sequence[Candidate], judged: Sequence[Verdict | None]
) -> list[dict[str, object]]:
    """The candidates of a task as rows. judged: their verdicts on the hidden tests."""
    best, pairs = [id(c) for c in chosen(candidates, len(candidates))], zip(candidates, judged, strict=True)
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
        others = [] if c.passed else [*right] or task.references
        if nearest := max(others, key=lambda other: difflib.SequenceMatcher(None, c.text, other).ratio(), default=None):
            row["right"] = nearest
        rows.append(row)
    return rows


def finish(asked: ProgramsAsked, tasks: TaskSet, rows: Rows, hidden: set[str], kept: Kept) -> None:
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
    hand_over(lines, kept)
    if asked.out is not None:
        what = f"{sum(map(len, rows)):,} candidates" if asked.all else "the chosen programs"
        print(f"{what} for {len(rows):,} tasks: {asked.out}")
    for line in summary(asked, rows, ranked, hidden):
        print(line, file=sys.stderr if asked.out is None else sys.stdout)


def summary(asked: ProgramsAsked, rows: Rows, ranked: Rows, hidden: set[str]) -> list[str]:
    """Sentences on what became of the programs."""
    outcomes = Counter(row["examples"] for some in rows for row in some)
    shares = ", ".join(f"{name} {outcomes[name] / outcomes.total():.1%}" for name in OUTCOMES)
    lines, judged = [f"on the example tests: {shares}"], [some for some in rows if some[0]["task"] in hidden]
    if judged:
        drawn = [[(row["outcome"] == "passed", row["examples"] == "passed") for row in some if row["round"] == 0]
                 for some in judged]  # fmt: skip
        k, n = asked.search.options.samples, asked.submit
        names = dict.fromkeys(("pass@1", f"pass@{k}", f"{n}@{k}"))
        numbers = ", ".join(f"{name} {fmean(of_samples(name, pairs) for pairs in drawn):.3f}" for name in names)
        lines.append(f"on the hidden tests, {k} sample{'s' * (k > 1)} of each of {len(judged)} tasks: {numbers}")
        best = [some for some in ranked if some[0]["task"] in hidden]
        solved = sum(any(row["outcome"] == "passed" for row in some) for some in best)
        low, high = wilson(solved / len(best), len(best))
        ways = Counter(row["how"] for some in best for row in some)
        made = ", ".join(f"{ways[how]} {how}" for how in ("sampled", "refined", "repaired") if ways[how])
        made += f"; {sum(map(len, judged)) / len(judged):.1f} were made for a task"
        share = f"{solved / len(best):.3f} [{low:.3f}, {high:.3f}]"
        lines.append(f"the chosen programs solve {solved} of {len(best)} tasks ({share}); of these programs {made}")
    return lines
