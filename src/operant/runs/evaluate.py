"""Held-out tasks and probe prompts, with the same random numbers before, during and after training."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from operant import distributed
from operant.bounds import bounded, check_bounds
from operant.data.demonstrations import Demonstrations
from operant.engines.beam_search import BeamSearch
from operant.metrics import collect, games
from operant.metrics.evaluation import NOTHING, EvaluationMetric, Measured, measure, metric_names, prepared, resolve
from operant.metrics.passes import check_samples
from operant.models.base import ReadingPolicy
from operant.models.policy import PURE, Policy
from operant.rewards.evaluate import Remark
from operant.rollouts.collate import collate
from operant.rollouts.generation_kwargs import from_generation_kwargs
from operant.runs.scored_rollouts import Scorer
from operant.sampling import Sampling
from operant.tally import ROUNDING, Tally
from operant.training.learner import Learner
from operant.training.scoring import forward_batch
from operant.types import OperantError, RewardFn, Rollout, Task, said_of, totals

GAMES = 32
"""Most episodes of an evaluation whose transcripts are kept."""
MICRO_TOKENS = 8192
"""Tokens of a forward pass of an evaluation."""


@dataclass(frozen=True)
class EvaluationOptions:
    """How the policy answers held-out tasks."""

    samples: int = bounded(1, at_least=1)
    """Replies to each held-out task (k)."""
    seeds: tuple[int, ...] = ()
    """Seeds of the random numbers, each with `samples` replies per task; empty: the seed of the run."""
    sampling: Any = None
    """Sampling options that differ from training: {temperature: 0.7, top_p: 0.9}; {top_k: 1} is greedy."""
    beams: int = bounded(1, at_least=1, rule="at least 1, which draws the replies")
    """Above 1: replies are searched for by transformers' beam search with so many beams, and not drawn."""
    length_penalty: float = 1.0
    """Of beam search: the score of a reply of n tokens is their summed log-probs over n ** length_penalty."""
    metrics: Any = None
    """Further metrics of the replies: bleu,rouge, or with options {bleu: {max_n: 2}}. A name is one that
    docs/evaluation.md lists, module:function, or one that an installed package adds."""

    def __post_init__(self) -> None:
        check_bounds(self, "evaluation")
        if self.length_penalty != 1 and self.beams == 1:
            raise OperantError(f"evaluation.length_penalty={self.length_penalty:g}: it needs evaluation.beams")
        if self.sampling is not None and not isinstance(self.sampling, Mapping):
            raise OperantError(f"evaluation.sampling={self.sampling!r}: give a mapping such as {{temperature: 0.7}}")
        if "num_beams" in (self.sampling or {}):
            raise OperantError("evaluation.sampling has num_beams: give --evaluation.beams N instead")
        with said_of("evaluation.sampling"):
            from_generation_kwargs(Sampling(max_tokens=1 << 20), dict(self.sampling or {}))
        if self.beams > 1:
            drawing = {"temperature", "top_k", "top_p", "min_p", "do_sample"} & {*(self.sampling or {})}
            idle = ["samples"] * (self.samples > 1) + ["seeds"] * (len(self.seeds) > 1)
            if idle := [*idle, *(f"sampling.{name}" for name in sorted(drawing))]:
                raise OperantError(f"evaluation.beams={self.beams} draws nothing: leave it or evaluation.{idle[0]} out")
        names = [*metric_names(self.metrics).values()]
        check_samples(names, self.samples * max(1, len(self.seeds)), "--evaluation.samples ")


@dataclass(frozen=True)
class ReplyLoss:
    """The loss of a demonstrated reply, summed over its tokens: `ReplyLoss(nats=52.1, tokens=17, bytes=61)`."""

    nats: float
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Evaluation:
    """The results of held-out tasks."""

    rollouts: list[Rollout]
    """Ordered by seed, then task, then sample."""
    scores: list[float | None]
    kl: float | None
    """Mean over replies of the summed k1 estimate of KL to the reference, in nats."""
    samples: int = 1
    losses: tuple[ReplyLoss, ...] = ()
    """Of held-out demonstrations, one per reply, in the order of the tasks."""
    remarks: list[Remark] = field(default_factory=list)
    """What the reward said about each reply beside its score; empty if it said nothing."""
    measured: Measured = NOTHING
    """The numbers of the metrics of the option `evaluation.metrics`, and of held-out labelled replies those of the
    method's own loss."""
    labelled: int = 0
    """The number of these held-out rows with labels."""
    pairs: int = 0
    """Of these, those that are evidence of `preference/accuracy`: see `evidence`."""

    def is_of(self, other: "Evaluation") -> bool:
        """Whether the other one is of the same tasks; of given replies alone, one of them may have been without own."""
        mine, theirs = ([rollout.task.id for rollout in one.rollouts] for one in (self, other))
        given = (len(self.losses), self.labelled) == (len(other.losses), other.labelled)
        return given and (mine == theirs or not (mine and theirs))

    @property
    def loss(self) -> float | None:
        """Nats per token of the demonstrated replies; None without any."""
        tokens = sum(reply.tokens for reply in self.losses)
        return sum(reply.nats for reply in self.losses) / tokens if tokens else None

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of the demonstrated replies' text, which is comparable between tokenizers; None without any."""
        count = sum(reply.bytes for reply in self.losses)
        return sum(reply.nats for reply in self.losses) / math.log(2) / count if count else None

    @property
    def mean(self) -> float:
        """Mean score of the replies that have one; NaN if none has."""
        known = [s for s in self.scores if s is not None]
        return sum(known) / len(known) if known else float("nan")

    def metrics(self) -> dict[str, float]:
        """The metrics `evaluate/...` of the registry."""
        tally, known = Tally(), [s for s in self.scores if s is not None]
        tally.mean("evaluate/reward", known)
        tally.spread("evaluate/reward_std", known)
        if len(known) < len(self.scores) and not self.losses:
            tally.add("evaluate/unjudged", len(self.scores) - len(known), len(self.scores))
        if self.samples > 1:
            of_tasks = [self.scores[i : i + self.samples] for i in range(0, len(self.scores), self.samples)]
            judged = [[s for s in scores if s is not None] for scores in of_tasks]
            tally.mean("evaluate/best_of_k", [max(scores) for scores in judged if scores])
        single = {"kl_per_reply": self.kl, "loss": self.loss, "bits_per_byte": self.bits_per_byte}
        for name, value in {**single, **self.measured.of_all}.items():
            if value is not None:
                tally.add(f"evaluate/{name}", value)
        for name, values in self.measured.of_replies.items():
            numbers = [x for x in values if x is not None]
            tally.mean(f"evaluate/{name}", numbers)
            tally.spread(f"evaluate/{name}_std", numbers)
        shares = collect.outcome_shares(Counter(c for remark in self.remarks for c in remark.classes), len(self.scores))
        return tally.result() | {f"evaluate/outcome/{name}": share for name, share in shares.items()}

    def chosen(self) -> dict[str, float]:
        """The metrics of `measured` by name; a mean where there is a number for each reply."""
        known = {name.removeprefix("evaluate/"): x for name, x in self.metrics().items()}
        return {name: known[name] for name in (*self.measured.of_all, *self.measured.of_replies) if name in known}

    def as_before(self) -> dict[str, float]:
        """The metrics of an evaluation before training, under the names that end in `_before`."""
        known = self.metrics()
        names = ["evaluate/reward", "evaluate/loss", *(f"evaluate/{name}" for name in self.chosen())]
        return {f"{name}_before": known[name] for name in names if name in known}

    def as_plain(self) -> dict[str, object]:
        """The results as plain data: the mean, the KL, and every reply as text with its score."""
        pairs = zip(self.rollouts, self.scores, strict=True)
        replies = [{"task": r.task.id, "query": r.query, "reply": r.reply, "score": s} for r, s in pairs]
        for reply, remark in zip(replies, self.remarks):
            reply |= {"outcomes": list(remark.classes), "message": remark.message}
        for name, values in self.measured.of_replies.items():
            for reply, value in zip(replies, values, strict=True):
                reply.setdefault("metrics", {})[name] = value
        for reply, rollout in list(zip(replies, self.rollouts))[:GAMES]:
            if (game := games.recorded(rollout)) is not None:
                reply["game"] = game
        mean = self.mean if any(s is not None for s in self.scores) else None
        plain = {"mean": mean, "kl": self.kl, "samples": self.samples, "replies": replies}
        plain |= {"metrics": self.chosen()} if self.chosen() else {}
        plain |= {"labelled": self.labelled, "pairs": self.pairs} if self.labelled else {}
        given = {"loss": self.loss, "bits_per_byte": self.bits_per_byte, "given": [asdict(one) for one in self.losses]}
        return plain | given if self.losses else plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Evaluation":
        """The inverse of `as_plain`; the rollouts have texts but no token ids."""
        rollouts = []
        for r in plain["replies"]:
            info = {"game": r["game"]} if "game" in r else {}
            rollouts.append(Rollout(Task(r["task"], r["query"]), 0, [], [r["reply"]], info=info, query=r["query"]))
        losses = tuple(ReplyLoss(**loss) for loss in plain.get("given", ()))
        rows = plain.get("labelled", 0), plain.get("pairs", 0)
        remarks = [Remark(tuple(r["outcomes"]), r["message"]) for r in plain["replies"] if "outcomes" in r]
        each = [r.get("metrics", {}) for r in plain["replies"]]
        of_replies = {name: [values[name] for values in each] for name in (each[0] if each else ())}
        of_all = {name: x for name, x in plain.get("metrics", {}).items() if name not in of_replies}
        scores, measured = [r["score"] for r in plain["replies"]], Measured(of_replies, of_all)
        return cls(rollouts, scores, plain["kl"], plain.get("samples", 1), losses, remarks, measured, *rows)


class Evaluator:
    """Evaluates held-out tasks. It changes neither the random numbers nor the state of the training.

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
        metrics: Sequence[EvaluationMetric] | None = None,
    ):
        """demonstrations: the tasks have replies, whose loss is measured; a reward or metric judges the policy's own.
        metrics: those of the options, if they are made already.

        Raises: OperantError for metrics that do not exist, refuse their options, or need references that tasks lack.
        """
        self.options = options = options or EvaluationOptions()
        self.learner, self.tasks, self.demonstrations = learner, tasks, demonstrations
        self.scorer = Scorer("reward", reward, learner.options["score"])
        self.sampling = from_generation_kwargs(learner.sampling, dict(options.sampling or {})).of(learner.policy)
        self.engine = beam_search(learner.policy, options)
        self.metrics = resolve(options.metrics) if metrics is None else metrics
        prepared(self.metrics, tasks)

    def __call__(self) -> Evaluation:
        """Generate and score replies, and measure KL to the reference; with demonstrations, measure their loss.

        Of labelled demonstrations, it is the loss of the method, with its metrics.
        """
        learner, losses, of_loss, rows = self.learner, tuple[ReplyLoss, ...](), dict[str, float](), (0, 0)
        if self.demonstrations is not None:
            with learner.clock.timing("evaluate"):
                given = self.demonstrations.rollouts(self.tasks)
                if not learner.algorithm.needs.labels:
                    losses = reply_losses(given, learner.policy)
                else:
                    single = learner.algorithm.unit == "episode" or learner.options["loss"].get("kind") == "good"
                    of_loss, rows = learner.measure(given), (len(self.tasks), evidence(self.tasks, single))
                    of_loss |= learner.policy.measure(given) if isinstance(learner.policy, ReadingPolicy) else {}
        rollouts = self._replies()
        with learner.clock.timing("evaluate"):
            seen = self.scorer.seen(rollouts, learner.sampling, learner.policy.tokenizer)
            judged = self.scorer.judge(seen, pays=learner.pays)
            measured = distributed.together(lambda: measure(self.metrics if rollouts else [], seen))
            measured = Measured({**measured.of_replies, **games.of_replies(rollouts)}, {**of_loss, **measured.of_all})
            kl = self._divergence([rollout for rollout in rollouts if rollout.count and not rollout.failed])
        tokenizer = learner.policy.tokenizer
        decode = None if tokenizer is None else lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
        for rollout in rollouts[:GAMES]:
            if (game := games.transcript(rollout, decode)) is not None:
                rollout.info["game"] = game
        scores = totals(judged.scores, rollouts)
        return Evaluation(rollouts, scores, kl, self.options.samples, losses, judged.remarks, measured, *rows)

    def _replies(self) -> list[Rollout]:
        """The policy's own replies to each task, with each seed; none to demonstrations if nothing judges them."""
        learner, tasks, seeds = self.learner, self.tasks, self.options.seeds or (self.learner.own.seed,)
        if self.demonstrations is not None:
            generates = self.scorer.reward is not None or bool(self.metrics)
            tasks = [self.demonstrations.opening(task) for task in tasks] if generates else []
        sampled = [task for task in tasks for _ in range(self.options.samples)]
        play = partial(learner.play, sampled, sampling=self.sampling, stream="evaluate", engine=self.engine)
        return [rollout for seed in seeds for rollout in distributed.together(partial(play, seed=seed))]

    def _divergence(self, played: list[Rollout]) -> float | None:
        """KL to the reference. It is a mean over drawn replies, so there is none of those that were searched for."""
        reference, policy, rescore = self.learner.reference, self.learner.policy, self.learner.rescores
        if reference is None or self.engine is not None:
            return None
        if reference.is_copy_of(policy):
            return 0.0 if played else None
        with reference.present():
            return divergence(played, policy, reference.policy, self.sampling, rescore=rescore) if played else None

    def judged_labels(self) -> dict[str, object] | None:
        """How a policy that reads replies judges the held-out labels; None of any other policy."""
        learner = self.learner
        if self.demonstrations is None or not isinstance(learner.policy, ReadingPolicy):
            return None
        single = learner.options["loss"].get("kind") == "good"
        return learner.policy.judged_labels(self.demonstrations.rollouts(self.tasks), single=single)


def evidence(tasks: Sequence[Task], single: bool) -> int:
    """The number of rows with a pair, `single`: of all rows, that show no reply of an earlier one to their prompt."""
    seen, count = set[str](), 0
    for task in tasks:
        if single or max(task.scores) - min(task.scores) > ROUNDING * max(map(abs, task.scores)):
            shown = {repr((task.prompt, reply)) for reply in ([task.replies] if single else task.replies)}
            count, seen = count + (not seen & shown), seen | shown
    return count


def beam_search(policy: Policy, options: EvaluationOptions) -> BeamSearch | None:
    """The engine that searches for replies, if the options ask for it. Raises: OperantError as `BeamSearch`."""
    return BeamSearch(policy, beams=options.beams, length_penalty=options.length_penalty) if options.beams > 1 else None


@torch.no_grad()
def reply_losses(rollouts: list[Rollout], policy: Policy) -> tuple[ReplyLoss, ...]:
    """The policy's loss on each demonstrated reply, without temperature or masks."""
    batch = collate(rollouts, [0.0] * len(rollouts), joined=not policy.encoder_decoder, numbers=policy.numbers)
    out = forward_batch(batch, policy, PURE, MICRO_TOKENS)
    nats = torch.zeros(len(rollouts), dtype=torch.float64)
    nats.index_add_(0, batch.episodes, -(out.logprobs.cpu() * batch.actions).double().sum(1))
    tokens = [sum(turn.count for turn in r.turns) for r in rollouts]
    return tuple(map(ReplyLoss, nats.tolist(), tokens, map(collect.trained_bytes, rollouts)))


@torch.no_grad()
def divergence(
    rollouts: list[Rollout], policy: Policy, reference: Policy, sampling: Sampling, *, rescore: bool = False
) -> float:
    """The mean over replies of the summed log-ratio of policy to reference, in nats. rescore: compute the policy's
    log-probs, even if the engine has given them."""
    batch = collate(rollouts, [0.0] * len(rollouts), joined=not policy.encoder_decoder, numbers=policy.numbers)
    raw = batch.logprobs
    if raw is None or rescore or sampling.truncates:  # then those of the engine may be of what it could draw alone
        raw = forward_batch(batch, policy, sampling, MICRO_TOKENS).raw_logprobs
    bare = reference.drop_foreign_states(batch.with_(allowed=None), policy)
    theirs = forward_batch(bare, reference, sampling, MICRO_TOKENS).raw_logprobs
    return float(((raw - theirs) * batch.actions).sum()) / len(rollouts)
