"""The arguments of `Learner.step`, checked and turned into rollouts with scores."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from operant import distributed
from operant.algorithms import Algorithm
from operant.rewards import Judged, judge
from operant.rollouts.generation_kwargs import declared, drawn_with
from operant.sampling import Sampling
from operant.training.parts import SOMETIMES, LearnerParts
from operant.types import Judgement, OperantError, Rollout, shown


class ScoredRollouts(NamedTuple):
    """The rollouts of a step, and how to score them."""

    rollouts: list[Rollout]
    scores: list[Any] | None
    """One for each rollout; None for demonstrations."""
    sampling: Sampling


def parsed(
    learner: LearnerParts, first: Sequence[object], second: Sequence[object], named: Mapping[str, Any]
) -> ScoredRollouts:
    """The arguments of `Learner.step` as rollouts with scores. Every rank must call.

    named: `scores`, `episodes`, `groups`, `next_values` and `generation`; None: not given.
    """
    for given in (first, second, named["scores"]):
        if isinstance(given, (str, int, float)):
            raise OperantError(f"step takes lists with one entry a reply, and got {shown(given)}: put it into [...]")
    algorithm = learner.algorithm
    if algorithm.source == "data":
        found = _from_demonstrations(learner, first, second, named)
    elif named["scores"] is None:
        if others := _not_none(named):
            raise OperantError(f"{others}: they go with step(queries, responses, scores)")
        grouped = distributed.together(lambda: _group_by_task(first))
        sampling = distributed.together(lambda: drawn_with(grouped, learner.sampling))
        own = sampling.max_tokens if grouped else max(1, sampling.min_tokens)
        longest = distributed.largest(own)  # the horizon of all ranks' replies
        found = ScoredRollouts(grouped, list(second), replace(sampling, max_tokens=longest))
    else:
        found = _from_triplets(learner, first, second, named)
    _check_comparable(found.rollouts, algorithm, learner.named["algorithm"], groups_named=named["groups"] is not None)
    if algorithm.source == "data" and algorithm.needs.labels and algorithm.usable is not None:  # of all ranks' labels
        labels: dict[int, list[float]] = {}
        for rollout in found.rollouts:
            labels.setdefault(rollout.group, []).append(rollout.paid)
        parts = distributed.gathered(list(labels.values()))
        useful = algorithm.usable([group for part in parts for group in part], learner.options["loss"], whole=False)
        teaches = dict(zip(labels, useful[sum(map(len, parts[: distributed.rank()])) :]))
        found = found._replace(rollouts=[rollout for rollout in found.rollouts if teaches[rollout.group]])  # as a run
    return found


def _from_demonstrations(
    learner: LearnerParts, queries: Sequence[object], responses: Sequence[object], named: Mapping[str, Any]
) -> ScoredRollouts:
    """Demonstrations for a method without rewards; a response that is a text is followed by the stop token."""
    algorithm, sampling, labels = learner.named["algorithm"], learner.sampling, learner.algorithm.needs.labels
    if labels and named["scores"] is None:
        raise OperantError(f"algorithm {algorithm} learns from labels: use step(queries, responses, scores)")
    taken = ("scores", "groups") if labels else ()
    if others := _not_none({name: x for name, x in named.items() if name not in taken}):
        raise OperantError(
            f"{others}: algorithm {algorithm} learns from demonstrations, which have none of these; use "
            "step(queries, responses)"
        )
    if any(isinstance(query, Rollout) for query in queries):
        raise OperantError(
            f"algorithm {algorithm} learns from demonstrations, and these are the policy's own replies with scores: "
            "use step(queries, responses), or another algorithm"
        )
    labelled = {"rewards": named["scores"], "groups": named["groups"]} if labels else {}
    made = _external(learner, queries, responses, sampling, ends=True, **labelled)
    counts = distributed.gathered(len({r.group for r in made}))  # groups in the order of the ranks, as in one process
    before = sum(counts[: distributed.rank()])
    return ScoredRollouts([replace(r, group=before + r.group) for r in made], None, sampling.plain)


def _from_triplets(
    learner: LearnerParts, queries: Sequence[object], responses: Sequence[object], named: Mapping[str, Any]
) -> ScoredRollouts:
    """Queries, responses and scores from elsewhere.

    With `episodes`, the scores are stored as rewards of the turns, and every episode gets a score of 0 on top.
    """
    next_values, generation = named["next_values"], dict(named["generation"] or {})
    ahead = distributed.largest(int(next_values is not None and any(next_values)))
    if ahead and not learner.algorithm.needs.critic:
        raise OperantError(f"next_values: algorithm {learner.named['algorithm']} has no critic to use them; drop them")
    sampling = declared(learner.sampling, generation)
    plain = [score.tolist() if isinstance(score, torch.Tensor) else score for score in named["scores"]]
    alone = named["episodes"] is None
    given = {name: named[name] for name in ("episodes", "groups", "next_values")} | {"declared": generation}
    rollouts = _external(learner, queries, responses, sampling, rewards=None if alone else plain, **given)
    return ScoredRollouts(rollouts, plain if alone else [0.0] * len(rollouts), sampling)


def _external(
    learner: LearnerParts, queries: Sequence[object], responses: Sequence[object], sampling: Sampling, **more: object
) -> list[Rollout]:
    """The rollouts of queries and responses from elsewhere. Every rank must call."""
    known = {"tokenizer": learner.policy.tokenizer, "vocabulary": learner.policy.vocabulary, "sampling": sampling}
    return distributed.together(lambda: SOMETIMES["external"](queries, responses, **known, **more))


def judged(scored: ScoredRollouts) -> Judged | None:
    """The checked scores, if one of them is a `Judgement` on any rank; else None. Every rank must call."""
    scores, rollouts = scored.scores or [], scored.rollouts
    if not distributed.largest(int(any(isinstance(score, Judgement) for score in scores))):
        return None
    if len(scores) == len(rollouts):  # a failed episode is shown to no reward
        scores = [score for score, rollout in zip(scores, rollouts, strict=True) if not rollout.failed]
    return distributed.together(lambda: judge(lambda _: scores, rollouts, "given"))


def _check_comparable(rollouts: Sequence[Rollout], algorithm: Algorithm, name: str, *, groups_named: bool) -> None:
    """Refuse rollouts that the method of this name cannot compare with each other. Every rank must call.

    groups_named: the caller passed `groups`, which are numbers of this rank.
    """
    samples = algorithm.needs.samples
    if samples < 2:
        return
    if not groups_named:
        # Rollouts of the same query share its prompt if they are from elsewhere, and otherwise its task.
        own = {tuple(r.turns[0].prompt) if r.task.id.startswith("given/") else r.task.id for r in rollouts}
        ranks = Counter(query for part in distributed.gathered(own) for query in part)
        if spread := sum(count > 1 for count in ranks.values()):
            raise OperantError(
                f"{spread} of the {len(ranks)} queries stand on several ranks, and replies are compared on one: "
                "give all replies to a query to one rank, or say with groups= that they are not to be compared"
            )
    sizes = Counter(r.group for r in rollouts)
    if not distributed.largest(int(max(sizes.values(), default=0) >= samples)):
        raise OperantError(
            f"algorithm {name} compares at least {samples} replies to one query, and each of the "
            f"{len(sizes)} groups has fewer, so every advantage would be 0: give queries several times, or groups="
        )


def _not_none(arguments: Mapping[str, object]) -> str:
    return ", ".join(name for name, value in arguments.items() if value is not None)


def _group_by_task(rollouts: Sequence[object]) -> list[Rollout]:
    """The rollouts with groups numbered by task; rollouts of earlier steps come with numbers of those steps."""
    kept = [r for r in rollouts if isinstance(r, Rollout)]
    if len(kept) < len(rollouts):
        wrong = next(r for r in rollouts if not isinstance(r, Rollout))
        raise OperantError(f"step(replies, scores) takes the rollouts that generate returned, and not {shown(wrong)}")
    numbers: dict[str, int] = {}
    return [replace(r, group=numbers.setdefault(r.task.id, len(numbers))) for r in kept]
