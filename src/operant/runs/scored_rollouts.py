"""Rollouts and their scores: of a step, chunk by chunk, and of the probe prompts; and both as rows of a table.

While one chunk is judged, the next one is generated. The chunks depend on the tasks alone, the samples of a prompt stay
in one chunk, and random numbers do not depend on chunks. So a reward that judges each rollout by itself returns the
same scores with and without chunks.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import pairwise
from typing import Any

from operant import distributed, rewards
from operant.data.demonstrations import Demonstrations
from operant.metrics import collect
from operant.metrics.games import transcript
from operant.rewards import Judged, judge
from operant.rewards.shaping import ScoreOptions, as_seen
from operant.rewards.wrapper import compared_with_greedy
from operant.rollouts.branches import branches
from operant.rollouts.play import Attempts
from operant.sampling import Sampling, token_pieces
from operant.tally import Tally
from operant.training.learner import Learner
from operant.training.select import unequal
from operant.types import Batch, Engine, EngineParts, RewardFn, Rollout, Task, Tokenizer, Total, totals

Row = dict[str, Any]
"""By the names of `registry.COLUMNS`."""
Played = tuple[list[Rollout], list[Rollout]]
"""Rollouts of some tasks, and the greedy replies that their reward compares them with."""


@dataclass(frozen=True)
class Scorer:
    """A reward that judges replies, those of a run's evaluation and of a command alike."""

    name: str
    """Its name in tables and files."""
    reward: RewardFn | None
    """None: only the world pays."""
    score: ScoreOptions = field(default_factory=ScoreOptions)
    """How much of a reply the reward sees."""
    paid: bool = True
    """Whether what the world has paid is added to a score."""

    def __call__(self, rollouts: list[Rollout], sampling: Sampling, tokenizer: Tokenizer | None) -> list[float | None]:
        """The score of each rollout; None where the reward abstains. Raises: OperantError of the reward."""
        rewards.read_with(self.reward, tokenizer)
        scores = self.judge(self.seen(rollouts, sampling, tokenizer), pays=self.reward is None).scores
        return totals(scores, rollouts) if self.paid else [sum(x) if isinstance(x, list) else x for x in scores]

    def seen(self, rollouts: list[Rollout], sampling: Sampling, tokenizer: Tokenizer | None) -> list[Rollout]:
        """The rollouts as the reward and the metrics see them."""
        return as_seen(rollouts, self.score, tokenizer, sampling)

    def judge(self, seen: list[Rollout], *, pays: bool = False) -> Judged:
        """What the reward says of rollouts that all ranks have: the first one asks, so that all have the same scores.

        Where the replies differ, as those of a server for each rank may, each asks about its own.
        pays: the world does, too. Raises: OperantError of the reward.
        """
        replies = str([(rollout.end, [turn.action for turn in rollout.turns]) for rollout in seen])
        same = len(set(distributed.gathered(sha256(replies.encode()).digest()))) == 1
        once = distributed.on_first if same else distributed.together
        return once(partial(rewards.judge, self.reward, seen, pays=pays))

    def close(self) -> None:
        """End the processes of the reward."""
        rewards.close(self.reward)


class Probes:
    """Fixed prompts that policy and reference answer with the same random numbers, to show the effect of training.

    The answers are rows as `as_rows` returns them. Answering does not change the training.
    probes = Probes(learner, tasks[:32], reward)
    rows, metrics = probes.ask()
    """

    def __init__(self, learner: Learner, tasks: list[Task], reward: RewardFn | None):
        self.learner, self.scorer = learner, Scorer("reward", reward, learner.options["score"])
        # Each has an id of its own, so that the same text twice does not count as two samples of one task.
        self.tasks = [replace(task, id=f"probe/{i}/{task.id}") for i, task in enumerate(tasks)]
        self._answers: list[Row] | None = None
        """The policy's newest answers."""

    def ask(self) -> tuple[list[Row], dict[str, float]]:
        """The answers of the current policy, and their metrics."""
        self._answers, kl = rows, _ = self._judged()
        tally, scores = Tally(), _scores(rows)
        tally.mean("probe/reward", scores)
        tally.add("probe/count", len(scores), 0.0)
        if kl is not None:
            tally.add("probe/kl_per_reply", kl)
        return rows, tally.result()

    def ask_reference(self) -> tuple[list[Row], dict[str, float]] | None:
        """The same of the reference; None without a reference."""
        learner, rows = self.learner, self._answers
        if (reference := learner.reference) is None:
            return None
        if rows is None or EngineParts.of(learner.engine).own_weights or not reference.is_copy_of(learner.policy):
            with learner.engine_of(reference.policy) as engine:
                rows, _ = self._judged(engine=engine)
        tally = Tally()
        tally.mean("probe/reference_reward", _scores(rows))
        return rows, tally.result()

    def query_share(self) -> dict[str, float]:
        """The share of the score's variance that the prompt explains, from two answers to each prompt."""
        rows, _ = self._judged(samples=2)
        share = collect.query_share(_scores(rows), [row["group"] for row in rows if row["reward"] is not None])
        return {} if share is None else {"probe/query_share": share}

    def _judged(self, samples: int = 1, engine: Engine | None = None) -> tuple[list[Row], float | None]:
        """Replies to the prompts as rows, and `kl/per_reply` of those that a step would train on."""
        learner, tokenizer = self.learner, self.learner.policy.tokenizer
        tasks = [task for task in self.tasks for _ in range(samples)]
        rollouts = distributed.together(lambda: learner.play(tasks, stream="probe", engine=engine))
        with learner.clock.timing("probe"):
            seen = self.scorer.seen(rollouts, learner.sampling, tokenizer)
            judged = self.scorer.judge(seen, pays=learner.pays)
            batch, places, kl = None, None, None
            # People judge no probes, and where ranks have other replies, all of them look at these or none.
            if not distributed.largest(int(all(score is None for score in judged.scores))):
                batch, places = learner.preview(rollouts, judged.scores)
                kl = collect.of_batch(batch, 0.0).result().get("kl/per_reply")
            pieces = partial(token_pieces, tokenizer)
            return as_rows(rollouts, judged.scores, judged.parts, batch, places, pieces, judged.remarks), kl


def _scores(rows: list[Row]) -> list[float]:
    return [row["reward"] for row in rows if row["reward"] is not None]


def play_and_score(
    learner: Learner,
    tasks: Sequence[Task],
    reward: RewardFn | None,
    *,
    chunks: int = 1,
    samples: int = 1,
    attempts: Attempts | None = None,
) -> tuple[list[Rollout], Judged]:
    """Play this rank's part of the tasks and score the rollouts. The phases `generate` and `reward` are timed.

    chunks: number of calls of the reward, each with a part of the prompts. Above 1, the reward is called in a thread,
    one call after the other, and the phase `reward` is the time spent waiting for it.
    samples: number of consecutive tasks that stay in one chunk. attempts: those that were made before in this step,
    which are not changed; None: none.
    Raises: OperantError of the reward; generation then stops after the current chunk.
    """
    if chunks == 1:
        return score(learner, reward, play_part(learner, tasks, reward, attempts))
    mine, pays = distributed.deal([task.id for task in tasks]), learner.pays
    rollouts, pending = list[Rollout](), list[Future[Judged]]()
    reward_thread = ThreadPoolExecutor(1, thread_name_prefix="reward")
    try:
        for chunk in chunk_slices(len(mine), chunks, samples):
            for future in pending:
                if future.done():
                    future.result()  # raises the error of a reward before more is generated
            played = learner.play(tasks, part=mine[chunk], attempts=deepcopy(attempts))
            rollouts += played
            greedy = greedy_replies(learner, tasks, reward, mine[chunk])
            pending.append(reward_thread.submit(judge_beside, reward, learner.as_seen(played), greedy, pays=pays))
        with learner.clock.timing("reward"):
            return rollouts, join_judgements([future.result() for future in pending])
    finally:
        reward_thread.shutdown(cancel_futures=True)


def play_part(
    learner: Learner, tasks: Sequence[Task], reward: RewardFn | None, attempts: Attempts | None = None
) -> Played:
    """Play this rank's part of the tasks, after `attempts` in the same step."""
    mine = distributed.deal([task.id for task in tasks])
    return learner.play(tasks, part=mine, attempts=deepcopy(attempts)), greedy_replies(learner, tasks, reward, mine)


def score(
    learner: Learner, reward: RewardFn | None, played: Played, *, pays: bool | None = None
) -> tuple[list[Rollout], Judged]:
    """Score rollouts, in the phase `reward`. pays: whether their turns are paid; None: as the world does.

    Raises: OperantError of the reward.
    """
    rollouts, greedy = played
    with learner.clock.timing("reward"):
        pays = learner.pays if pays is None else pays
        return rollouts, judge_beside(reward, learner.as_seen(rollouts), greedy, pays=pays)


def greedy_replies(
    learner: Learner, tasks: Sequence[Task], reward: RewardFn | None, part: Sequence[int]
) -> list[Rollout]:
    """The policy's greedy reply to each different task of `part`, as the reward sees it, if the reward compares with
    it; else none."""
    if not compared_with_greedy(reward):
        return []
    firsts = {tasks[i].id: i for i in reversed(part)}
    greedy = replace(learner.sampling, top_k=1, top_p=1.0, min_p=0.0)
    return learner.as_seen(learner.play(tasks, part=sorted(firsts.values()), sampling=greedy))


def judge_beside(reward: RewardFn | None, rollouts: list[Rollout], greedy: list[Rollout], *, pays: bool) -> Judged:
    """Judge rollouts with a reward whose parts may compare them with greedy replies."""
    for one in compared_with_greedy(reward):
        one.see_greedy(greedy)
    return judge(reward, rollouts, pays=pays)


def without_variance(rollouts: Sequence[Rollout], judged: Judged, discount: float = 1.0) -> dict[str, None]:
    """The ids of the tasks, over all ranks, whose replies teach a method that compares them nothing: their raw rewards
    are equal, or fewer than two have one. Branches are compared one by one, as they are learnt from; discount: between
    their turns. Every rank must call."""
    parts = [part for pair in zip(rollouts, judged.scores, strict=True) for part in branches(*pair, discount)]
    different = unequal([part for part, _ in parts], [score for _, score in parts])
    found = dict.fromkeys(r.task.id for r in rollouts if r.group not in different)
    return dict.fromkeys(task for part in distributed.gathered(list(found)) for task in part)


def solved_often(rollouts: Sequence[Rollout], judged: Judged, rate: float) -> set[str]:
    """The ids of the tasks, over all ranks, whose mean raw reward is `rate` or more. Every rank must call."""
    by_task: dict[str, list[float]] = {}
    for rollout, total in zip(rollouts, totals(judged.scores, rollouts), strict=True):
        if total is not None:
            by_task.setdefault(rollout.task.id, []).append(total)
    solved = [task for task, found in by_task.items() if sum(found) / len(found) >= rate]
    return {task for part in distributed.gathered(solved) for task in part}


def demonstration_rollouts(demonstrations: Demonstrations, tasks: Sequence[Task]) -> list[Rollout]:
    """The demonstrated replies to this rank's part of the tasks."""
    mine = distributed.deal([task.id for task in tasks])
    return demonstrations.rollouts([tasks[i] for i in mine], mine)


def chunk_slices(count: int, chunks: int, samples: int) -> Iterator[slice]:
    """Slices of `count` tasks, of nearly equal length, with borders at multiples of `samples`."""
    prompts = -(-count // samples)
    edges = [round(i * prompts / chunks) * samples for i in range(chunks + 1)]
    yield from (slice(a, min(b, count)) for a, b in pairwise(edges) if a < b)


def join_judgements(judged: Sequence[Judged]) -> Judged:
    """Join the judgements of chunks into the judgement that one call for all rollouts would have returned."""
    # A chunk without any score has one part, named after the reward; other chunks may have the reward's named parts.
    told = [j for j in judged if any(value is not None for part in j.parts.values() for value in part)]
    names = dict.fromkeys(name for chunk in told or judged for name in chunk.parts)
    parts = {n: [v for j in judged for v in j.parts.get(n, [None] * len(j.scores))] for n in names}
    outcomes = [j.outcome(i) for j in judged for i in range(len(j.scores))] if any(j.outcomes for j in judged) else []
    notes = [note for j in judged for note in j.notes]
    remarks = [j.remark(i) for j in judged for i in range(len(j.scores))] if any(j.remarks for j in judged) else []
    passing = [p for j in judged for p in j.passing or [None] * len(j.scores)] if any(j.passing for j in judged) else []
    return Judged([score for j in judged for score in j.scores], parts, outcomes, notes, remarks, passing)


_PER_TOKEN = ("raw_logprobs", "ref_logprobs", "kl", "values", "advantages", "returns")


def as_rows(
    rollouts: Sequence[Rollout],
    scores: Sequence[Total],
    parts: Mapping[str, Sequence[float | None]] | None = None,
    batch: Batch | None = None,
    learned: Sequence[int] | None = None,
    pieces: Callable[[list[int]], list[str]] | None = None,
    remarks: Sequence[tuple[tuple[str, ...], str]] = (),
    passing: Sequence[Sequence[float] | None] = (),
) -> list[Row]:
    """Return one row per turn. The score of an attempt is in the row of its last turn; it is None if not judged.

    scores: one per rollout, as the reward returned it (a list: one number per token); what the environment paid is
    added here. parts: the named parts of the reward, one value per rollout.
    batch: the collated rollouts, for the columns with one value per token. learned: the indices of the rollouts that
    the batch was made of, in order; None: all that have a score. pieces: returns the text of each token id.
    remarks: the outcome classes and the message of each rollout; empty if the reward named none. An episode of several
    turns has its transcript as JSON in its last row. passing: of each rollout what a critic says after each action;
    empty without a critic.
    """
    if learned is None:
        learned = [i for i, score in enumerate(scores) if score is not None]
    whole = totals(scores, rollouts)
    episodes = {rollout: episode for episode, rollout in enumerate(learned)}
    table = []
    for number, rollout in enumerate(rollouts):
        begun, before = 0, rollout.parents
        for index, turn in enumerate(rollout.turns):
            row: Row = {
                "task": str(rollout.task.id),
                "group": rollout.group,
                "turn": index,
                "query": _without_surrogates(rollout.query),
                "reply": _without_surrogates(rollout.texts[index]),
                "prompt": list(turn.prompt),
                "ids": list(turn.action),
                "query_tokens": len(turn.prompt),
                "reply_tokens": len(turn.action),
                "logprobs": None if turn.logprobs is None else _finite(turn.logprobs),
                "paid": float(turn.reward),
                "end": turn.end,
                "version": turn.version,
                "rollout": number,
                "reward": None,
                "outcome": None,
                "message": None,
            }
            if index == len(rollout.turns) - 1:
                row["reward"] = whole[number]
                row |= {f"reward/{name}": values[number] for name, values in (parts or {}).items()}
                classes, message = remarks[number] if remarks else ((), "")
                row["outcome"] = ", ".join(classes) or None
                row["message"] = _without_surrogates(message) or None
                decode = None if pieces is None else lambda ids: "".join(pieces(ids))
                several = len(rollout.turns) > 1 or "game" in rollout.info
                if several and (game := transcript(rollout, decode)) is not None:
                    row["game"] = _without_surrogates(json.dumps(game, ensure_ascii=False))
            if before is not None:
                row["parent"] = before[index]
            if pieces is not None:  # choosing a whole reply is one action, with one number of each kind
                texts = pieces(turn.action) if turn.options is None else [rollout.texts[index]]
                row["tokens"] = [_without_surrogates(text) for text in texts]
            if passing:
                of_actions = passing[number]
                row["passing"] = None if of_actions is None else list(of_actions[begun : begun + turn.count])
                begun += turn.count
            if batch is not None:
                row |= _per_token(batch, episodes.get(number), index)
            table.append(row)
    return table


def _per_token(batch: Batch, episode: int | None, turn: int) -> Row:
    """Return the batch's values for the tokens of one turn, None for an episode that is not in the batch."""
    names = _PER_TOKEN if batch.allowed is not None else _PER_TOKEN[1:]  # else the first are the sampled ones
    known = [name for name in names if getattr(batch, name) is not None]
    if episode is None:
        return dict.fromkeys(known)
    of_episode = (batch.episodes == episode).nonzero().flatten()
    place = batch.turns[of_episode] == turn
    return {name: _finite(getattr(batch, name)[of_episode][place].tolist()) for name in known}


def _finite(numbers: Sequence[float]) -> list[float | None]:
    """Return the numbers with None for NaN and infinity, which a refused step may have."""
    return [x if math.isfinite(x) else None for x in numbers]


def _without_surrogates(text: str) -> str:
    """Return the text with lone surrogates replaced, which UTF-8 files cannot store."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
