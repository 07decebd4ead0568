"""`operant generate MODEL ... --tasks FILE`: replies of models to the prompts of a file, as rows for people or rewards.

{"id": "prompts/0", "prompt": "2 + 2 =", "replies": [" 4", " five"], "sources": ["runs/sft", "runs/ppo"]}
"""

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any
from zlib import crc32

from operant import rewards
from operant.apps.code.unit_tests import UnitTests
from operant.data import DataOptions, load_tasks, read
from operant.data.demonstrations import Demonstrations
from operant.data.forms import Form
from operant.data.sources import split_off
from operant.data.tasks import EVERY, left_out
from operant.models.policy import Policy
from operant.options import compose, convert
from operant.options import read as read_option
from operant.rewards.text_scores import RewardBase
from operant.runs import named_parts
from operant.runs.judged_replies import Kept, Scorer, best_of, drawn, scorer
from operant.runs.named_models import divided, load, run_options, stated_return
from operant.runs.signals import terminated_as_interrupted
from operant.runs.trackers.console import emit_json
from operant.sampling import PlainTokenizer, Sampling
from operant.tools.cli.arguments import Options, as_spec, counted, new_file, refuse, taken
from operant.training.options import find_device
from operant.types import OperantError, RewardFn, Task, Tokenizer, require, shown, with_defaults

OF_FILES = ("samples", "temperatures", "out", "distinct", "device")
"""Options of `operant generate` that only apply to the replies to a file."""
OF_PROMPTS = ("prompt", "versus", "target")
"""Options that do not apply to them."""
OF_PROBLEMS = frozenset({"tests", "test_list", "entry_point", "input_output"})
"""Fields by which the form `code` knows problems."""


@dataclass(frozen=True)
class Source:
    """A model that replies, and how: `Source("runs/sft, temperature 0.7", "runs/sft", Sampling(temperature=0.7))`."""

    name: str
    model: str
    sampling: Sampling


@dataclass(frozen=True)
class OwnTasks:
    """The held-out tasks of a run: `OwnTasks("10% of data.jsonl", "data.jsonl", {}, DataOptions(), 0, {}, 0.1)`."""

    name: str
    """What they are, in sentences and files."""
    tasks: object
    """Its option `tasks`, with those of the task source and of `data`; None: no name stands for it."""
    options: Mapping[str, object]
    data: DataOptions
    seed: int
    rows: Mapping[str, bool]
    """How its algorithm reads rows, as arguments of `load_tasks`."""
    part: float | None
    """The share of the tasks that is held out; None: they have a source of their own."""

    def divided(self, tokenizer: Tokenizer | None, **how: object) -> tuple[list[Task], list[Task]]:
        """The tasks that the run trained on, and those of its share that is held out."""
        source = named_parts.source(self.tasks, self.options)
        tasks = load_tasks(source, tokenizer, self.data, self.seed, **{**self.rows, **how})
        return (tasks, []) if self.part is None else split_off(tasks, self.part, self.seed)


class TaskSet:
    """The tasks of a file or name, for models with tokenizers of their own."""

    def __init__(
        self,
        source: object,
        options: DataOptions,
        seed: int,
        *,
        chat: bool = False,
        policy: Policy | None = None,
        form: Form | None = None,
        of_run: OwnTasks | None = None,
    ):
        """chat: texts become messages of a user. policy: its tokenizer cuts prompts, where the options ask for that,
        and it decides whether a form's cue is read. form: makes tasks of published rows. of_run: the tasks are those
        that this run holds out, which are read as it reads them."""
        source, row = named_parts.source(source, {}), first_row(source)
        talks = form is None and options.text_field not in row and answered(row)
        self.of_run, self.tokenizer, passed = of_run, policy and policy.tokenizer, Counter[str]()
        self.made = {"form": form, "cue": not (policy and policy.encoder_decoder)}
        rows = {"with_replies": talks} if of_run is None else of_run.rows
        self.cutting, seed = self.tokenizer if cuts(options) else None, seed if of_run is None else of_run.seed
        share = of_run is not None and of_run.part is not None
        filters = [(one.shuffle, one.min_chars, one.max_chars) for one in (options, of_run.data)] if share else []
        read = replace(options, limit=of_run.data.limit if filters[0] == filters[1] else None) if share else options
        self.tasks = load_tasks(source, self.cutting, read, seed, passed=passed, **rows, **self.made)
        for sentence in left_out(passed, source):
            print(sentence, file=sys.stderr)
        if share:
            held_out = {task.id for task in of_run.divided(self.cutting, **self.made)[1]}
            self.tasks = [task for task in self.tasks if task.id in held_out][: options.limit]
        if rows["with_replies"]:  # a conversation's prompt is what comes before the first answer
            given = Demonstrations(self.tokenizer, None)
            self.tasks = [replace(given.opening(task), replies=(), scores=()) for task in self.tasks]
        for i, task in enumerate(self.tasks if chat else ()):
            if isinstance(text := self.text(task), str):  # a user begins a conversation with it
                self.tasks[i] = replace(task, prompt=[{"role": "user", "content": text}])

    def show_to(self, reward: RewardFn | None) -> None:
        """Let a reward read the tasks: of a run first those that it trained on, so that scores are the run's."""
        own, parts = self.of_run, [part for part in rewards.every_part(reward) if hasattr(part, "read_tasks")]
        own_way = [p for p in parts if not isinstance(p, RewardBase) or type(p).read_tasks is not RewardBase.read_tasks]
        known = own is not None and own.tasks is not None and own_way and not rewards.parts_of(reward, UnitTests)
        if known:
            rewards.prepare(reward, own.divided(self.cutting, **self.made)[0])
            rewards.read_held_out(reward, self.tasks)
        rewards.prepare(reward, self.tasks, alone=bool(known))

    def text(self, task: Task) -> object:
        """The prompt as text or messages; ids are decoded."""
        ids = isinstance(task.prompt, list) and all(isinstance(token, int) for token in task.prompt)
        return self.tokenizer.decode(task.prompt, skip_special_tokens=True) if ids and self.tokenizer else task.prompt

    def of(self, policy: Policy, most: int) -> list[Task]:
        """The tasks for a policy, whose replies have at most so many tokens. Ids are kept where they are its own."""
        theirs, ours = (with_defaults(t, PlainTokenizer).get_vocab() for t in (policy.tokenizer, self.tokenizer))
        tasks = self.tasks if theirs == ours else [replace(task, prompt=self.text(task)) for task in self.tasks]
        bounds = {"context": policy.context, "vocabulary": policy.vocabulary}
        return load_tasks(tasks, policy.tokenizer, max_new=0 if policy.encoder_decoder else most, **bounds)


def cuts(options: DataOptions) -> bool:
    """Whether prompts are cut by their tokens."""
    return options.query_range() is not None or options.prompt_tokens is not None


def best_of_bound(n: int) -> float:
    """An upper bound on the KL, in nats a reply, of the best of `n` replies to the model that draws them. It is close
    where no reply is likely and scores seldom tie (arXiv:2401.01879)."""
    return math.log(n) - (n - 1) / n


def bound_of(n: int) -> str:
    """A sentence on how far the best of n replies are from the model that they are drawn from."""
    bound = f"at most {best_of_bound(n):.3f} nats a reply (upper bound log n - (n - 1)/n)"
    return f"best of {n}: KL to the model that the replies are drawn from is {bound}"


def reading(
    source: object, given: Mapping[str, object], form: Form | None, *, tests: bool
) -> tuple[DataOptions, Form | None]:
    """How rows become tasks, as the first of them says. Without the option `text_field`, rows that have no `text` have
    their prompts in `prompt`, or in `messages`.

    tests: tasks have tests, in the `target` of a row unless another field is named; without one, rows that hold them
    are published problems.
    """
    row = {} if form is not None else first_row(source)
    if tests and "target" in row:
        given = {"target_field": "target", **given}
    elif tests and not OF_PROBLEMS.isdisjoint(row) and not (given.get("target_field") or given.get("text_field")):
        form = named_parts.form("code", {})
    options = compose({"": DataOptions}, given)[""]
    fields = [name for name in ("prompt", "messages") if name in row and not (name == "messages" and answered(row))]
    if form is not None or "text_field" in given or "text" in row or not fields:
        return options, form
    return replace(options, text_field=fields[0]), None


def answered(row: Mapping[str, object]) -> bool:
    """Whether a row is a conversation with answers, as for supervised training."""
    messages = row.get("messages")
    return isinstance(messages, list) and any(isinstance(m, dict) and m.get("role") == "assistant" for m in messages)


def first_row(source: object) -> Mapping[str, object]:
    """The first row of a source, whose form stands for all; empty if there is none, or it has no fields."""
    return next((row for _, row in islice(read(named_parts.source(source, {}))[1], 1) if isinstance(row, Mapping)), {})


def tasks_asked(options: Options, *, tests: bool = False) -> Callable[..., TaskSet]:
    """Take the tasks out of the options. What is returned loads them for a seed and the model that cuts prompts."""
    source, chat = options.pop("tasks"), convert(options.pop("chat", False), bool, "chat")
    given, named = take(options)

    def load_them(seed: int, model: str, reward: RewardFn | None = None) -> TaskSet:
        rows, own = as_in(run_options(model), source, named)
        data, form = reading(rows, with_all_fields(given, [reward]), named_parts.stored_form(own), tests=tests)
        policy = load(model)[0] if cuts(data) or form is not None else None
        return TaskSet(rows, data, seed, chat=chat, policy=policy, form=form)

    return load_them


def as_in(run: Mapping[str, object], source: object, form: dict[str, object]) -> tuple[object, dict[str, object]]:
    """A task source and a form: of a source that the run names, such as `countdown/held-out`, as they are there."""
    bases = [str(run.get(option)).removesuffix("/held-out") for option in ("tasks", "evaluate")]
    if str(source).removesuffix("/held-out") not in bases or not named_parts.is_object("tasks", source):
        return source, form
    options = named_parts.stored_options("tasks", {"tasks": None, **run})
    return named_parts.held_out_source(run.get("tasks"), source, options), form or named_parts.only(run, "form")


def with_all_fields(given: Mapping[str, object], judges: Sequence[RewardFn | None]) -> Mapping[str, object]:
    """The data options; where a reward of TRL's form reads columns by name, all of a row's fields are its target."""
    by_name = any(map(rewards.as_in_trl, (part for judge in judges for part in rewards.every_part(judge))))
    return {**given, "target_field": EVERY} if by_name and not given.get("target_field") else given


def take(options: Options) -> tuple[dict[str, object], dict[str, object]]:
    """Take the options of data out of the options, and the row form with its own."""
    form = {name: read_option(options.pop(name)) for name in named_parts.only(options, "form")}
    data = {name: options.pop(name) for name in [*options] if name in DataOptions.__dataclass_fields__}
    return data, named_parts.flattened(form)


class ReplyProgress:
    """Shows on standard error how far a long command is: on a terminal on one line, elsewhere every ten seconds."""

    def __init__(self, total: int, every: float = 10.0):
        self.total, self.every, self.done = total, every, 0
        self.line, self.shown_at = sys.stderr.isatty(), time.monotonic()

    def add(self, count: int, name: str) -> None:
        self.done += count
        now, last = time.monotonic(), self.done >= self.total
        if self.line or last or now - self.shown_at >= self.every:
            self.shown_at = now
            text = f"{self.done:,} of {self.total:,} replies ({name})"
            print(f"\r{text}\x1b[K" if self.line else text, end="\n" if last or not self.line else "", file=sys.stderr)


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    sources: list[Source]
    samples: int
    best_of: int
    distinct: bool
    seed: int
    out: Path | None
    scorer: Scorer | None
    judged_by: object
    """The reward as it was named, of a run with the options that it has there, and what its files contain."""
    device: str

    @property
    def drawn(self) -> int:
        """Replies that a source draws for each prompt."""
        return self.samples * self.best_of


def write_replies(words: Sequence[str], options: Options) -> int:
    """Let each model answer each prompt of `--tasks`, and write the replies to `--out`, or print them."""
    refuse(options, OF_PROMPTS, " is about single prompts, and --tasks gives many: leave one of the two out")
    tasks_for, asked = tasks_asked(options), what_is_asked(words, options)
    judge = asked.scorer and asked.scorer.reward
    tasks = tasks_for(asked.seed, words[0], judge)
    tasks.show_to(judge)
    if asked.best_of > 1:
        print(bound_of(asked.best_of), file=sys.stderr)
    made_by = {"sources": [[one.model, stamp(one.model), asdict(one.sampling)] for one in asked.sources],
               "samples": asked.drawn, "seed": asked.seed, "reward": asked.judged_by,
               "tasks": [[task.id, task.prompt, task.target if judge else None] for task in tasks.tasks]}  # fmt: skip
    kept = Kept(asked.out, made_by)
    try:
        with going_on(kept):
            answer(asked, tasks, kept)
    finally:
        if asked.scorer is not None:
            asked.scorer.close()
    finish(as_rows(tasks, kept, asked), asked, kept)
    return 0


@contextmanager
def going_on(kept: Kept) -> Iterator[None]:
    """Say what was made before, and of an interruption how the command goes on."""
    if kept.done:
        print(f"{len(kept.done)} answers were made before, and are kept", file=sys.stderr)
    try:
        with terminated_as_interrupted():
            yield
    except KeyboardInterrupt:
        if kept.path is not None:
            text = f"the same command goes on from {len(kept.done)} answers, which {kept.path} keeps"
            print(f"\noperant: interrupted; {text}", file=sys.stderr)
        raise


def hand_over(rows: Sequence[Mapping[str, object]], kept: Kept) -> None:
    """Write the rows, or print them without a file."""
    if kept.out is not None:
        kept.write(rows)
        return
    for row in rows:
        emit_json(row)


def what_is_asked(words: Sequence[str], options: Options) -> Asked:
    """Read the options, of which those of sampling are left."""
    samples, best = counted(options, "samples", 1), counted(options, "best_of", 1)
    out = new_file("out", options.pop("out", None), (".jsonl", ".parquet"))
    seed, device = taken(options, "seed", 0), options.pop("device", "auto")
    find_device(device)
    distinct, temperatures = bool(options.pop("distinct", False)), options.pop("temperatures", None)
    spec = as_spec(options.pop("reward", best > 1))
    refuse(options, () if temperatures is None else ["temperature"], " beside --temperatures: give one of the two")
    require(best == 1 or spec is not False, f"--best-of {best} needs a score: name a reward, as in --reward letters:e")
    named = convert(temperatures, tuple[float, ...], "temperatures") if temperatures is not None else (None,)
    if len(set(words)) < len(words) or len(set(named)) < len(named):
        raise OperantError("a model or temperature is named twice: --samples draws several replies of one")
    sources, best_text = [], f", best of {best}" if best > 1 else ""
    for model, temperature in product(words, named):
        given = options if temperature is None else {**options, "temperature": temperature}
        own = compose({"": Sampling}, given)[""]
        heat = f", temperature {own.temperature:g}" if "temperature" in given else ""
        sources.append(Source(model + heat + best_text, model, own))
    run = run_options(words[0]) if spec is True else {}
    made = None if spec is False else scorer(spec, run)
    if made is not None:
        rewards.check(made.reward)
    judged_by = [spec, named_parts.only(run, "reward")]
    modules = re.findall(r"([^'\"{}\[\],:]+):", str(judged_by))  # as in `{"mine.py:f": 1}` and `isolated:mine:f`
    paths = [Path(name if name.endswith(".py") else f"{name.replace('.', '/')}.py") for name in modules]
    judged_by += [crc32(path.read_bytes()) for path in paths if path.is_file()]
    return Asked(sources, samples, best, distinct, seed, out, made, judged_by, device)


def stamp(model: str) -> int:
    """When the newest weights of a model in a folder were written, in nanoseconds; 0 for any other model."""
    folder, step = divided(model)
    inside = "export/" if (folder / "export").is_dir() else ""
    pattern = f"{inside}*.safetensors" if step is None else f"checkpoints/*-{step:05d}/*.safetensors"
    return max((path.stat().st_mtime_ns for path in folder.glob(pattern)), default=0)


def answer(asked: Asked, tasks: TaskSet, kept: Kept) -> None:
    """Let each source answer the tasks that it has not answered."""
    progress = ReplyProgress(len(asked.sources) * len(tasks.tasks) * asked.drawn)
    name, policy, engine = "", None, None
    for place, source in enumerate(asked.sources):
        done = len(kept.of(place))
        progress.done += done * asked.drawn
        if done == len(tasks.tasks):
            continue
        if policy is None or engine is None or name != source.model:
            name, (policy, engine) = source.model, load(source.model)
            policy = policy.to(find_device(asked.device))
        how = {"scorers": [asked.scorer] if asked.scorer else [], "samples": asked.drawn, "seed": asked.seed}
        # So that two temperatures of one model do not say the same words.
        how |= {"first": place * asked.drawn, "opening": stated_return(source.model, policy.tokenizer)}
        make = partial(drawn, policy=policy, engine=engine, sampling=source.sampling, **how)
        mine = tasks.of(policy, source.sampling.max_tokens)
        kept.fill(place, mine, make, asked.drawn, partial(progress.add, name=source.name))


def as_rows(tasks: TaskSet, kept: Kept, asked: Asked) -> list[dict[str, object]]:
    """One row for each prompt: its replies, which source each is from, and their scores if there is a reward."""
    rows, name = [], asked.scorer.name if asked.scorer is not None else ""
    for task in tasks.tasks:
        replies = []
        for place, source in enumerate(asked.sources):
            made = kept.done[place, task.id]
            chosen = best_of(made, asked.best_of, name) if asked.best_of > 1 else made
            replies += [(source.name, reply) for reply in chosen]
        if asked.distinct:
            replies = list({reply.text: (source, reply) for source, reply in reversed(replies)}.values())[::-1]
        row = {"id": task.id, "prompt": tasks.text(task), "replies": [reply.text for _, reply in replies]}
        row["sources"] = [source for source, _ in replies]
        rows.append(row | ({"rewards": [reply.scores[name] for _, reply in replies]} if name else {}))
    return rows


def finish(rows: Sequence[Mapping[str, Any]], asked: Asked, kept: Kept) -> None:
    """Write the rows, or print them; then say what they are."""
    hand_over(rows, kept)
    if asked.out is None:
        return
    count, prompts = sum(len(row["replies"]) for row in rows), f"{len(rows):,} prompt{'s' * (len(rows) != 1)}"
    print(f"{count:,} repl{'y' if count == 1 else 'ies'} to {prompts}: {asked.out}")
    known = [score for row in rows for score in row.get("rewards", ()) if score is not None]
    if known and asked.scorer is not None:
        print(f"mean {shown(asked.scorer.name)[1:-1]} of them: {sum(known) / len(known):.4g}")
    if asked.distinct and (single := sum(len(row["replies"]) == 1 for row in rows)):
        print(f"prompts with one reply only, since the others were equal to it: {single:,}")
