"""Programs at test time: sampled, filtered by the example tests, refined and repaired (CodeRL, arXiv:2207.01780, 3.4).

search = Search(SearchOptions(samples=32, refine="critic"), writer, verdicts, critic=critic)
[candidates] = search([task])
chosen(candidates, 1)[0].text

Of every task N programs are sampled. In each further round, programs that pass the example tests are cut and their rest
is sampled again; if none passes, the best failures are rewritten by a model that reads what became of them. All random
numbers come from the seed, the task, the round and the number of the sample.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from operant.apps.code.forms import TEMPLATE, repair_prompt
from operant.apps.code.problems import problem_of, program_in
from operant.bounds import bounded, check_bounds
from operant.sampling import Sampling, counter, encode_prompt, reply_text, task_key, token_pieces
from operant.sandbox.jail import Program, Verdict
from operant.types import OUTCOMES, Engine, EngineParts, OperantError, Task, Tokenizer, require, shown

CUTS = ("critic", "line", "random")


@runtime_checkable
class PrefixCritic(Protocol):
    """What scores the beginnings of programs."""

    def prefixes(self, problem: object, reply: Sequence[int], tokenizer: Tokenizer | None) -> Sequence[float]:
        """How good a reply is until each of its tokens; the last number is that of the whole reply."""
        ...


@dataclass(frozen=True)
class SearchOptions:
    """How programs are searched for."""

    samples: int = bounded(1, at_least=1)
    """Programs that a round writes for a task (N)."""
    refine: str | None = None
    """Where a program that passes the examples is cut: `critic`, behind the beginning that the critic scores best;
    `line`, at the end of some line; `random`, anywhere. None: programs are not refined."""
    repair: int = bounded(0, at_least=0)
    """Failures that are repaired if no program passes the examples (M); 0: none."""
    rounds: int = bounded(1, at_least=1)
    """Rounds of refining and repairing."""
    budget: int | None = None
    """Most programs of a task over all rounds; None: no limit but the rounds."""

    def __post_init__(self) -> None:
        require(self.refine in (None, *CUTS), f"refine={self.refine!r}: programs are cut by {', '.join(CUTS)}")
        check_bounds(self)
        enough = self.budget is None or self.budget >= self.samples
        require(enough, f"budget={self.budget} is below samples={self.samples}: it counts the programs of all rounds")


@dataclass(frozen=True)
class Writer:
    tokenizer: Any
    engine: Engine
    sampling: Sampling
    fits: Callable[[int], bool] = lambda prompt: True
    """Whether a prompt of so many tokens leaves room for a reply."""


@dataclass(frozen=True)
class Candidate:
    """A program for a task: `Candidate("return 2 * x", (5, 7, 2), Verdict("passed", ("passed",)), "refined", 1)`."""

    text: str
    ids: tuple[int, ...]
    verdict: Verdict
    how: str = "sampled"
    """sampled, refined or repaired."""
    round: int = 0
    sample: int = 0
    scores: tuple[float, ...] = ()
    """The critic's score of its beginning until each token; empty without a critic."""
    parent: int | None = None
    """The place of the candidate that it was made from, in the list of the task."""
    kept: int = 0
    prompt: tuple[int, ...] = field(default=(), repr=False)
    writer: int = 0
    """0: the policy; 1: the repair model."""

    @property
    def passed(self) -> bool:
        return self.verdict.outcome == "passed"

    @property
    def rank(self) -> tuple[float, ...]:
        """Greater for a better candidate, as far as the examples and the critic tell."""
        score = self.scores[-1] if self.scores else 0.0
        return self.passed, score, self.verdict.share, OUTCOMES.index(self.verdict.outcome)


@dataclass(frozen=True)
class _Draft:
    """A program to be written. `begun`: the tokens that it begins with."""

    place: int
    sample: int
    prompt: list[int]
    how: str = "sampled"
    begun: tuple[int, ...] = ()
    parent: int | None = None
    writer: int = 0


class Search:
    def __init__(
        self,
        options: SearchOptions,
        policy: Writer,
        verdicts: Callable[[Sequence[Program]], list[Verdict]],
        *,
        seed: int = 0,
        critic: PrefixCritic | None = None,
        repairer: Writer | None = None,
        template: str = TEMPLATE,
    ):
        """repairer: the model that repairs, if it is not the policy."""
        if options.refine == "critic" and critic is None:
            raise OperantError("programs are cut where a critic says, and none is given")
        self.writers = [policy, repairer or policy]
        for writer in self.writers if options.refine else ():
            if EngineParts.of(writer.engine).generate_more is None:
                raise OperantError(
                    f"engine {type(writer.engine).__name__} cannot continue a program that was begun (it has no method "
                    "`generate_more`), so nothing can be refined: use the native engine"
                )
        self.options, self.verdicts, self.critic = options, verdicts, critic
        self.seed, self.template = seed, template
        self.unread = 0
        """Failures that were too long for the repair model's context, and were passed over."""

    def __call__(self, tasks: Sequence[Task]) -> list[list[Candidate]]:
        """The candidates of each task, in the order in which they were made."""
        options, found = self.options, [list[Candidate]() for _ in tasks]
        prompts = [encode_prompt(self.writers[0].tokenizer, task.prompt) for task in tasks]
        drafts = [_Draft(place, i, prompt) for place, prompt in enumerate(prompts) for i in range(options.samples)]
        self._write(tasks, found, drafts, 0)
        for number in range(1, options.rounds + 1):
            drafts = [draft for place in range(len(tasks)) for draft in self.plan(tasks, found, place, number)]
            self._write(tasks, found, drafts, number)
        return found

    def plan(self, tasks: Sequence[Task], found: Sequence[list[Candidate]], place: int, number: int) -> list[_Draft]:
        """What is written for a task in a round: each parent has as many of the N drafts, or one more."""
        options, known = self.options, list(enumerate(found[place]))
        count = options.samples if options.budget is None else min(options.samples, options.budget - len(known))
        passing = [(i, c) for i, c in known if c.passed]
        if passing:
            lengths = {i: self.length(c) for i, c in passing} if options.refine else {}
            parents = _different([(i, c) for i, c in passing if lengths.get(i, 0) > 1])
            ranges = range(count if parents else 0)
            shares = [(sample, *parents[sample % len(parents)]) for sample in ranges]
            return [
                _Draft(place, s, list(c.prompt), "refined",
                       c.ids[: self.cut(tasks[place], c, lengths[i], number, s)], i, c.writer)
                for s, i, c in shares
            ]  # fmt: skip
        newest = max((c.round for _, c in known), default=0)
        parents, prompts = [], []
        for i, c in _different([(i, c) for i, c in known if c.round == newest]) if options.repair else ():
            given = (self._problem(tasks[place]), c.text, c.verdict.outcome, c.verdict.message)
            ids = encode_prompt(self.writers[1].tokenizer, repair_prompt(*given, self.template))
            if not self.writers[1].fits(len(ids)):
                self.unread += 1
                continue
            parents.append(i)
            prompts.append(ids)
            if len(parents) == options.repair:
                break
        return [
            _Draft(place, s, prompts[s % len(parents)], "repaired", (), parents[s % len(parents)], 1)
            for s in range(count if parents else 0)
        ]

    def _problem(self, task: Task) -> object:
        ids = [token for token in task.prompt if isinstance(token, int)]
        return self.writers[0].tokenizer.decode(ids, skip_special_tokens=True) if ids else task.prompt

    def _scores(self, task: Task, reply: Sequence[int], tokenizer: Tokenizer | None) -> tuple[float, ...]:
        """The critic's score after each token."""
        if self.critic is None:
            return ()
        about = f"critic {type(self.critic).__name__}, about a program for task {task.id!r}"
        try:
            scores = tuple(map(float, self.critic.prefixes(self._problem(task), reply, tokenizer)))
        except OperantError:
            raise
        except Exception as error:
            raise OperantError(f"{about}: raised {type(error).__name__}: {error}") from error
        if len(scores) != len(reply) or not all(map(math.isfinite, scores)):
            raise OperantError(
                f"{about}: returned {shown(scores)}; {len(reply)} tokens have {len(reply)} scores, finite numbers"
            )
        return scores

    def length(self, candidate: Candidate) -> int:
        """The number of tokens after which the text of a candidate is complete."""
        writer, count = self.writers[candidate.writer], len(candidate.ids)
        while count and _text(writer, candidate.prompt, candidate.ids[: count - 1]) == candidate.text:
            count -= 1
        return count

    def cut(self, task: Task, candidate: Candidate, length: int, number: int, sample: int) -> int:
        """How many tokens of a candidate are kept: at least one, and at most all but the last of `length`."""
        if self.options.refine == "critic":
            scores = candidate.scores[: length - 1]
            return scores.index(max(scores)) + 1
        places = range(1, length)
        if self.options.refine == "line":
            pieces = token_pieces(self.writers[candidate.writer].tokenizer, candidate.ids[: length - 1])
            places = [i + 1 for i, piece in enumerate(pieces) if "\n" in piece] or places
        return places[counter(self.seed, "cut", task.id, sample, number) % len(places)]

    def _write(self, tasks: Sequence[Task], found: list[list[Candidate]], drafts: list[_Draft], number: int) -> None:
        written: dict[int, tuple[int, ...]] = {}
        for w, writer in enumerate(self.writers):
            own = [i for i, draft in enumerate(drafts) if draft.writer == w]
            prompts, begun = [drafts[i].prompt for i in own], [drafts[i].begun for i in own]
            named = [(tasks[drafts[i].place].id, drafts[i].sample) for i in own]
            keys = [task_key(self.seed, "probe", 0, task, sample, number) for task, sample in named]
            if any(begun):
                most = [writer.sampling.max_tokens] * len(own)
                made = writer.engine.generate_more(prompts, begun, most, writer.sampling, keys)  # type: ignore[attr-defined]
            else:
                made = writer.engine.generate(prompts, writer.sampling, keys) if own else []
            written |= {i: (*drafts[i].begun, *completion.action) for i, completion in zip(own, made, strict=True)}
        texts = [_text(self.writers[d.writer], d.prompt, written[i]) for i, d in enumerate(drafts)]
        programs = [problem_of(tasks[d.place]).program(text, examples=True) for d, text in zip(drafts, texts)]
        for i, (draft, verdict) in enumerate(zip(drafts, self.verdicts(programs), strict=True)):
            task, writer = tasks[draft.place], self.writers[draft.writer]
            scores = self._scores(task, written[i], writer.tokenizer)
            made = (draft.how, number, draft.sample, scores, draft.parent, len(draft.begun))
            candidate = Candidate(texts[i], written[i], verdict, *made, tuple(draft.prompt), draft.writer)
            found[draft.place].append(candidate)


def chosen(candidates: Sequence[Candidate], n: int) -> list[Candidate]:
    """The n different programs to submit, the best first, or fewer if there are no more.

    Those that pass the examples come first; among these the critic's score decides, without a critic how often a
    program was written, and at last which was written first. Of failures, the critic's score, then the share of the
    examples.
    """
    count = Counter(program_in(c.text) for c in candidates)
    first: dict[str, Candidate] = {}
    for c in candidates:
        first.setdefault(program_in(c.text), c)
    return sorted(first.values(), key=lambda c: (*c.rank, count[program_in(c.text)]), reverse=True)[:n]


def _different(candidates: Sequence[tuple[int, Candidate]]) -> list[tuple[int, Candidate]]:
    """The candidates with different texts, the best first."""
    found: dict[str, tuple[int, Candidate]] = {}
    for i, c in sorted(candidates, key=lambda one: one[1].rank, reverse=True):
        found.setdefault(c.text, (i, c))
    return [*found.values()]


def _text(writer: Writer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    return reply_text(writer.tokenizer, prompt, ids, writer.sampling)
