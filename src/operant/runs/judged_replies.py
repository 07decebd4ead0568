"""Replies to many tasks: where they come from, what scores them, and the file that keeps them.

A run's evaluation (`runs/evaluate.py`), `operant eval` and `generate` score replies by it.

make = partial(drawn, policy=policy, engine=engine, sampling=sampling, scorers=[scorer("letters:e", {})], samples=4)
kept = Kept(Path("replies.jsonl"), {"model": "runs/sft"})
kept.fill(0, tasks, make, 4, print)
kept.of(0)["tasks/0"][0].scores["letters:e"]

What makes replies is a function of some tasks: `drawn` here, a search for programs in `tools/cli/program_files.py`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from operant import rewards
from operant.envs import SingleTurn, for_evaluation
from operant.models.policy import Policy
from operant.options import compose
from operant.rewards.failure_policy import IsolationOptions
from operant.rewards.isolated import under
from operant.rewards.shaping import ScoreOptions
from operant.rollouts.play import Attempts, Opening, play
from operant.runs import named_parts
from operant.runs.folder import as_parquet
from operant.runs.scored_rollouts import Scorer
from operant.sampling import Sampling
from operant.storage import atomic_io
from operant.types import Engine, Env, OperantError, RewardFn, Rollout, Task, Tokenizer, require, shown

AT_ONCE = 256
"""Replies that are made together, and judged by one call of each reward."""


@dataclass(frozen=True)
class JudgedReply:
    """A reply and its scores: `JudgedReply(" so good", 3, {"letters:e": 0.2})`."""

    text: str
    tokens: int
    scores: Mapping[str, float | None]
    """By the name of the reward; None if it abstained."""


def scorer(spec: object, run: Mapping[str, object]) -> Scorer:
    """The reward that `spec` names. True: that of a run, whose flat options are `run`, with its own options.

    Of a reward that pays relative to the policy's greedy replies, it is what the run judges held-out replies by.
    """
    if spec is not True:
        reward = under(rewards.held_out(rewards.resolve(spec)), IsolationOptions())
        return Scorer(name_of(spec, reward), reward, paid=False)
    name = run.get("reward")
    obstacle = "" if run else "the first model is no run"
    if run and name is None:
        world = run.get("env")
        obstacle = "the run has none" if world is None else f"its world {world} paid the run"
    elif str(name).startswith("<"):
        obstacle = f"that of the run is {name} of a Python program"
    require(not obstacle, f"the reward of the run is asked for, and {obstacle}: name one, as in --reward letters:e")
    given = {group: part(run, group) for group in ("isolation", "score")}
    options = compose({"isolation": IsolationOptions, "score": ScoreOptions}, given)
    resolved = rewards.resolve(name, named_parts.stored_options("reward", run))
    made = under(rewards.held_out(resolved), options["isolation"])
    return Scorer(name_of(name, made), made, options["score"])


def name_of(spec: object, reward: RewardFn) -> str:
    """The name of a reward in tables: what the user typed, or of several the names of all."""
    return spec if isinstance(spec, str) else " + ".join(spec) if isinstance(spec, Mapping) else rewards.name_of(reward)


def part(run: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    return run.get(group) or {}


def drawn(
    tasks: Sequence[Task],
    *,
    policy: Policy,
    engine: Engine,
    sampling: Sampling,
    scorers: Sequence[Scorer],
    samples: int = 1,
    first: int = 0,
    seed: int = 0,
    stream: str = "probe",
    env: Env | None = None,
    opening: Opening | None = None,
) -> list[list[JudgedReply]]:
    """`samples` replies to each task. Random numbers depend on the seed, the task's id and the sample's number.

    first: the number of the first sample. stream: which random numbers are used (`operant.sampling.STREAMS`). env: the
    world in which the tasks are played; the reply is its last one. opening: as that of `play`.
    """
    if policy.tokenizer is None:
        raise OperantError("the model has no tokenizer, and replies are texts: save its tokenizer into its folder")
    sampling, attempts = sampling.of(policy), Attempts()
    attempts.first = first
    world = SingleTurn() if env is None else for_evaluation(env)
    how = {"env": world, "engine": engine, "sampling": sampling, "seed": seed, "stream": stream, "opening": opening}
    how |= {"fits": lambda prompt, reply: policy.misfit(prompt, reply) is None, "attempts": attempts}
    rollouts = play([task for task in tasks for _ in range(samples)], tokenizer=policy.tokenizer, **how)
    replies = scored(rollouts, scorers, sampling, policy.tokenizer)
    return [replies[i : i + samples] for i in range(0, len(replies), samples)]


def scored(
    rollouts: list[Rollout], scorers: Sequence[Scorer], sampling: Sampling, tokenizer: Tokenizer | None
) -> list[JudgedReply]:
    """The reply of each rollout with its scores. Raises: OperantError of a reward."""
    scores = {one.name: one(rollouts, sampling, tokenizer) for one in scorers}
    each = ({name: found[i] for name, found in scores.items()} for i in range(len(rollouts)))
    return [JudgedReply(r.reply, len(r.ids), own) for r, own in zip(rollouts, each, strict=True)]


def best_of(replies: Sequence[JudgedReply], n: int, name: str) -> list[JudgedReply]:
    """The best of each `n` replies by the reward `name`; the first of equal ones, and one without a score is the worst.

    best_of([JudgedReply("a", 1, {"r": 0.5}), JudgedReply("b", 1, {"r": 2.0})], 2, "r")[0].text == "b"
    """

    def value(reply: JudgedReply) -> float:
        return float("-inf") if (score := reply.scores[name]) is None else score

    return [max(replies[i : i + n], key=value) for i in range(0, len(replies), n)]


class Kept:
    """The replies of sources to tasks. Until the file that a command writes is complete, they are kept beside it."""

    def __init__(
        self, out: Path | None = None, asked: Mapping[str, object] | None = None, made: Callable[..., Any] = JudgedReply
    ):
        """out: None keeps them in memory alone. asked: what they depend on. made: what a reply becomes of its fields.

        Raises: OperantError for an unfinished file that was begun for something else.
        """
        self.out, self.path = out, None if out is None else out.with_name(f".{out.name}.unfinished")
        self.done: dict[tuple[int, str], list[Any]] = {}
        """By the place of the source, and the task's id."""
        if self.path is None:
            return
        wanted: dict[str, Any] = json.loads(json.dumps(asked, default=str))  # as a file gives it back
        begun, *lines = atomic_io.records(self.path) or [wanted]
        if lines and begun != wanted:  # without a line, nothing is lost
            changed = next(name for name in begun | wanted if begun.get(name) != wanted.get(name))
            changed += f" ({shown(was)})" if isinstance(was := begun.get(changed), (int, str)) else ""
            what = f"the replies of an interrupted command that differs in its {changed}"
            raise OperantError(f"{self.path} keeps {what}: give that command again, or delete this file")
        for line in lines:
            self.done[line["source"], line["task"]] = [made(**reply) for reply in line["replies"]]
        # Written anew, so that a line that was cut off by a kill is not continued.
        atomic_io.write(self.path, "".join(json.dumps(line) + "\n" for line in (wanted, *lines)))

    def of(self, source: int) -> dict[str, list[Any]]:
        """The replies of a source by the task's id, in the order in which they were made."""
        return {task: replies for (place, task), replies in self.done.items() if place == source}

    def fill(
        self,
        source: int,
        tasks: Sequence[Task],
        make: Callable[[Sequence[Task]], Sequence[Sequence[Any]]],
        samples: int,
        tell: Callable[[int], None],
    ) -> None:
        """Make the replies of a source to the tasks that have none, `samples` to each. tell: is told how many.

        Raises: OperantError of `make`, or if the disk refuses.
        """
        rest, size = [task for task in tasks if (source, task.id) not in self.done], max(1, AT_ONCE // samples)
        for begin in range(0, len(rest), size):
            some = rest[begin : begin + size]
            for task, replies in zip(some, make(some), strict=True):
                self.done[source, task.id] = list(replies)
                if self.path is not None:
                    plain = [reply if isinstance(reply, dict) else asdict(reply) for reply in replies]
                    line = {"source": source, "task": task.id, "replies": plain}
                    atomic_io.append_text(self.path, json.dumps(line) + "\n")
                tell(samples)

    def write(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write the rows to the file, as its name ends, and delete the unfinished one."""
        assert self.out is not None and self.path is not None
        if self.out.suffix != ".parquet":
            atomic_io.write_rows(self.out, rows)
        elif len({type(row["prompt"]) for row in rows}) > 1:
            why = "some prompts are texts and some messages, which one column of Parquet cannot hold"
            raise OperantError(f"--out {self.out}: {why}: write .jsonl, or give --chat true")
        else:
            atomic_io.write(self.out, as_parquet(rows))
        with atomic_io.explained(self.path):
            atomic_io.remove(self.path)
