"""Held-out tasks, judged with random numbers that depend on nothing but the task: the same before, during and after."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from operant import distributed
from operant.models.policy import PURE, Policy
from operant.objectives.kl import estimate
from operant.rewards import judge, totals
from operant.rollouts.collate import collate
from operant.rollouts.demonstrations import Demonstrations
from operant.rollouts.generation_kwargs import from_generation_kwargs
from operant.sampling import Sampling
from operant.tally import Tally
from operant.training.learner import Learner
from operant.training.scoring import forward_batch
from operant.types import OperantError, RewardFn, Rollout, Task


@dataclass(frozen=True)
class EvaluationOptions:
    """How held-out tasks are put to the policy."""

    samples: int = 1
    """Replies to each held-out task (k)."""
    seeds: tuple[int, ...] = ()
    """Seeds of its random numbers, each with `samples` replies a task; empty: the run's own seed."""
    sampling: Any = None
    """Sampling of its own, laid over the training's: {temperature: 0.7, top_p: 0.9}; {top_k: 1} is greedy."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise OperantError(f"evaluation.samples={self.samples}: it must be at least 1")
        if self.sampling is not None and not isinstance(self.sampling, Mapping):
            raise OperantError(f"evaluation.sampling={self.sampling!r}: give a mapping such as {{temperature: 0.7}}")
        from_generation_kwargs(Sampling(max_tokens=1 << 20), dict(self.sampling or {}))


@dataclass(frozen=True)
class GivenLoss:
    """What a given reply costs: `GivenLoss(nats=52.1, tokens=17, bytes=61)`."""

    nats: float
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Evaluation:
    """What held-out tasks came to."""

    rollouts: list[Rollout]
    """By seed, by task, by sample."""
    scores: list[float | None]
    kl: float | None
    """Mean k1 sum a reply against the reference, in nats."""
    samples: int = 1
    given: tuple[GivenLoss, ...] = ()
    """Of held-out given replies, one each, in the order of the tasks."""

    @property
    def loss(self) -> float | None:
        """Nats a token of the given replies."""
        tokens = sum(reply.tokens for reply in self.given)
        return sum(reply.nats for reply in self.given) / tokens if tokens else None

    @property
    def bits_per_byte(self) -> float | None:
        """Of the given replies' text: comparable between tokenizers."""
        count = sum(reply.bytes for reply in self.given)
        return sum(reply.nats for reply in self.given) / math.log(2) / count if count else None

    @property
    def mean(self) -> float:
        """Mean score of the replies that were judged."""
        known = [s for s in self.scores if s is not None]
        return sum(known) / len(known) if known else float("nan")

    def metrics(self) -> dict[str, float]:
        """As the registry names them."""
        tally = Tally()
        known = [s for s in self.scores if s is not None]
        tally.mean("evaluate/reward", known)
        tally.spread("evaluate/reward_std", known)
        if len(known) < len(self.scores) and not self.given:
            tally.add("evaluate/unjudged", len(self.scores) - len(known), len(self.scores))
        if self.samples > 1:
            attempts = [self.scores[i : i + self.samples] for i in range(0, len(self.scores), self.samples)]
            best = [[s for s in attempt if s is not None] for attempt in attempts]
            tally.mean("evaluate/best_of_k", [max(scores) for scores in best if scores])
        measured = {"kl_per_reply": self.kl, "loss": self.loss, "bits_per_byte": self.bits_per_byte}
        for name, value in measured.items():
            if value is not None:
                tally.add(f"evaluate/{name}", value)
        return tally.result()

    def as_before(self) -> dict[str, float]:
        """The metrics that later ones are compared with, of an evaluation before training."""
        known = self.metrics()
        return {f"{name}_before": known[name] for name in ("evaluate/reward", "evaluate/loss") if name in known}

    def as_plain(self) -> dict[str, Any]:
        """For a file or a checkpoint: the mean, the KL, and every reply as text with its score."""
        pairs = zip(self.rollouts, self.scores, strict=True)
        replies = [{"task": r.task.id, "query": r.query, "reply": r.reply, "score": s} for r, s in pairs]
        mean = self.mean if any(s is not None for s in self.scores) else None
        told = {"mean": mean, "kl": self.kl, "samples": self.samples, "replies": replies}
        losses = {"loss": self.loss, "bits_per_byte": self.bits_per_byte, "given": [asdict(g) for g in self.given]}
        return told | (losses if self.given else {})

    @classmethod
    def from_plain(cls, kept: Mapping[str, Any]) -> "Evaluation":
        """What `as_plain` kept: texts and scores, without ids."""
        rollouts = [
            Rollout(Task(r["task"], r["query"]), 0, [], [r["reply"]], query=r["query"]) for r in kept["replies"]
        ]
        given = tuple(GivenLoss(**held) for held in kept.get("given", ()))
        return cls(rollouts, [r["score"] for r in kept["replies"]], kept["kl"], kept.get("samples", 1), given)


class Evaluator:
    """Held-out tasks and how they are judged. Nothing of the training changes: not its random numbers, not its state.

    evaluator = Evaluator(learner, tasks, reward, EvaluationOptions(samples=4))
    evaluator().mean
    """

    def __init__(
        self,
        learner: Learner,
        tasks: list[Task],
        reward: RewardFn | None,
        options: EvaluationOptions | None = None,
        demonstrations: Demonstrations | None = None,
    ):
        """`demonstrations`: the tasks hold replies, whose loss is measured; a reward then judges the policy's own."""
        options = options or EvaluationOptions()
        self.demonstrations = demonstrations
        self.learner, self.tasks, self.reward, self.samples = learner, tasks, reward, options.samples
        self.sampling = from_generation_kwargs(learner.sampling, dict(options.sampling or {}))
        self.seeds = options.seeds or (learner.own.seed,)

    def __call__(self) -> Evaluation:
        """Ask, judge, and measure the distance from the reference, or the loss of given replies."""
        learner, tasks, given = self.learner, self.tasks, tuple[GivenLoss, ...]()
        if self.demonstrations is not None:
            with learner.timing("evaluate"):
                given = given_losses(self.demonstrations.rollouts(tasks), learner.policy)
            tasks = [self.demonstrations.opening(task) for task in tasks] if self.reward is not None else []
        asked = [task for task in tasks for _ in range(self.samples)]
        rollouts = [
            rollout
            for seed in self.seeds
            for rollout in learner.play(asked, sampling=self.sampling, stream="evaluate", seed=seed)
        ]
        with learner.timing("evaluate"):
            judged = distributed.together(lambda: judge(self.reward, learner.as_seen(rollouts), pays=learner.pays))
            scores = totals(judged.scores, rollouts)
            kl = None
            if learner.reference is not None and rollouts:
                kl = divergence(rollouts, learner.policy, learner.reference.policy, self.sampling)
        return Evaluation(rollouts, scores, kl, self.samples, given)


@torch.no_grad()
def given_losses(rollouts: list[Rollout], policy: Policy, micro_tokens: int = 8192) -> tuple[GivenLoss, ...]:
    """What each of some given replies costs the policy, without temperature or masks."""
    batch = collate(rollouts, [0.0] * len(rollouts), joined=not policy.encoder_decoder, numbers=policy.numbers)
    out = forward_batch(batch, policy, PURE, micro_tokens)
    nats = torch.zeros(len(rollouts), dtype=torch.float64)
    nats.index_add_(0, batch.episodes, -(out.logprobs.cpu() * batch.actions).double().sum(1))
    tokens = [sum(len(turn.action) for turn in r.turns) for r in rollouts]
    sizes = [sum(len(text.encode(errors="replace")) for text in r.texts) for r in rollouts]
    return tuple(map(GivenLoss, nats.tolist(), tokens, sizes))


@torch.no_grad()
def divergence(
    rollouts: list[Rollout], policy: Policy, reference: Policy, sampling: Sampling, micro_tokens: int = 8192
) -> float:
    """Mean over replies of the summed log-ratio to the reference, in nats."""
    batch = collate(rollouts, [0.0] * len(rollouts), joined=not policy.encoder_decoder, numbers=policy.numbers)
    raw = batch.logprobs
    if raw is None or batch.allowed is not None:
        raw = forward_batch(batch, policy, sampling, micro_tokens).raw_logprobs
    bare = reference.drop_foreign_states(batch.with_(allowed=None), policy)
    theirs = forward_batch(bare, reference, sampling, micro_tokens).raw_logprobs
    return float((estimate("k1", raw, theirs) * batch.actions).sum()) / len(rollouts)
