"""`operant eval samples.jsonl --tasks problems.jsonl`: pass@k of programs that exist already, from any model.

{"task_id": "HumanEval/0", "completion": "    return 2 * x"}

It does what HumanEval's `evaluate_functional_correctness` does: each row is written again with its `result` and whether
it `passed`, and pass@k is estimated without bias (Chen et al. 2021).
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from operant.apps.code.problems import problem_of
from operant.apps.code.verdicts import Verdicts
from operant.data import read
from operant.metrics.evaluation import chosen
from operant.metrics.passes import check_samples, numbers_in, of_samples
from operant.runs import named_parts
from operant.runs.judged_replies import AT_ONCE
from operant.sandbox.jail import Verdict
from operant.storage import atomic_io
from operant.tools.cli.arguments import Options, new_file, refuse
from operant.tools.cli.program_files import search_asked
from operant.tools.cli.reply_files import ReplyProgress, TaskSet, reading, take
from operant.types import OUTCOMES, OperantError, Task, shown

Row = dict[str, Any]
Samples = Sequence[tuple[Row, Task]]
ENDINGS = (".jsonl", ".jsonl.gz")
USUAL = ("pass@1", "pass@10", "pass@100")
"""The numbers that are printed unless others are asked for, as far as there are so many samples of each task."""


def score_samples(words: Sequence[str], options: Options) -> int:
    """Judge the samples of a file by the tests of their tasks, print pass@k, and write the verdicts beside it."""
    (name, *others), source = words, options.pop("tasks", None)
    options.pop("tests", None)  # there is nothing else to score them by
    if others or source is None:
        raise OperantError(f"{name} is a file of samples: score it alone, and name its tasks: --tasks problems.jsonl")
    out = new_file("out", options.pop("out", None), (".jsonl",)) or Path(f"{name}_results.jsonl")
    asked, limits = options.pop("metrics", None), options.pop("jail", {})
    given, named = take(options)
    data, form = reading(source, given, named_parts.stored_form(named), tests=True)
    tasks = TaskSet(source, data, 0, form=form).tasks
    for task in tasks:
        problem_of(task)
    refuse(options, options, f" is about models that write, and {name} is a file of samples: leave it out")
    samples = samples_of(name, tasks)
    least = min(Counter(task.id for _, task in samples).values())
    metrics = [*chosen(asked)] or [one for one in USUAL if int(one.partition("@")[2]) <= least]
    if odd := next((one for one in metrics if numbers_in(one) is None), None):
        raise OperantError(f"--metrics {shown(odd)[1:-1]}: samples are scored by pass@k and n@k, as in pass@1,pass@10")
    check_samples(metrics, least, "add samples, or ask for less than k = ")
    verdicts = Verdicts(search_asked({"jail": limits}).jail)
    print(f"jail: {verdicts.jail.describe()}", file=sys.stderr)
    right = judged(samples, verdicts)
    kept = judged(samples, verdicts, examples=True) if any(numbers_in(one)[0] for one in metrics) else right
    rows = [row | {"result": one.outcome, "message": one.message, "passed": one.outcome == "passed"}
            for (row, _), one in zip(samples, right, strict=True)]  # fmt: skip
    atomic_io.write_rows(out, rows)
    for line in summary(samples, right, kept, metrics):
        print(line)
    print(f"results: {out}")
    return 0


def samples_of(name: str, tasks: Sequence[Task]) -> list[tuple[Row, Task]]:
    """The samples, one a row, each with its task."""
    known = {key: task for task in tasks for key in (task.id, task.id.partition("/")[2])}
    samples = list[tuple[Row, Task]]()
    for number, row in read(name)[1]:
        row = row if isinstance(row, dict) else {}
        of = str(next((row[field] for field in ("task_id", "task", "id") if field in row), ""))
        texts = row.get("replies") if "replies" in row else [row.get("completion")]
        if not of or not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise OperantError(f"{name}, row {number}: {shown(row)} is no sample; give {{task_id, completion}}")
        if of not in known:
            some = ", ".join(task.id for task in tasks[:3])
            raise OperantError(f"{name}, row {number}: there is no task {shown(of)}, but {some}, ...")
        several = "replies" in row  # as `operant generate` writes them
        samples += [({"task_id": of, "completion": text} if several else row, known[of]) for text in texts]
    if missing := [task.id for task in tasks if task.id not in {task.id for _, task in samples}]:
        how = "add some, or leave these tasks out of the file of tasks"
        raise OperantError(f"{name}: {len(missing)} of {len(tasks)} tasks, first {missing[0]!r}, have no sample: {how}")
    return samples


def judged(samples: Samples, verdicts: Verdicts, *, examples: bool = False) -> list[Verdict]:
    """The verdict of each sample, on all tests or on the examples alone."""
    programs = [problem_of(task).program(row["completion"], examples=examples) for row, task in samples]
    progress, found = ReplyProgress(len(programs)), list[Verdict]()
    for begin in range(0, len(programs), AT_ONCE):
        some = verdicts(programs[begin : begin + AT_ONCE])
        found += some
        progress.add(len(some), "samples")
    return found


def summary(samples: Samples, right: Sequence[Verdict], kept: Sequence[Verdict], metrics: Sequence[str]) -> list[str]:
    """Sentences on what became of the samples."""
    of_tasks: dict[str, list[tuple[bool, bool]]] = {}
    for (_, task), *pair in zip(samples, right, kept, strict=True):
        of_tasks.setdefault(task.id, []).append(tuple(one.outcome == "passed" for one in pair))
    outcomes = Counter(verdict.outcome for verdict in right)
    shares = ", ".join(f"{name} {outcomes[name] / len(right):.1%}" for name in OUTCOMES)
    numbers = [f"{name} {fmean(of_samples(name, pairs) for pairs in of_tasks.values()):.4f}" for name in metrics]
    return [f"{len(right):,} samples of {len(of_tasks):,} tasks: {shares}", ", ".join(numbers)]
