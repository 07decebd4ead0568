"""The stages of a training step: select, replay, observe, keep the best, credit, refuse, update, sync.

A learner has a list of them from the moment it is made, and each adds to the `TrainingStep` what the next ones read. A
replay buffer, a selection of the best, wanted returns: each is a stage that is in the list or not.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from operant import distributed
from operant.metrics import collect
from operant.rewards.shaping import check_token_scores
from operant.rollouts.collate import collate, nothing, played
from operant.rollouts.play import Attempts
from operant.rollouts.prompts import returns_to_go, with_hints, with_prompts, with_returns
from operant.sampling import Sampling
from operant.tally import Tally
from operant.training import sharding
from operant.training.anchors import with_anchors
from operant.training.best import best, only, unscored_selection
from operant.training.nonfinite import find_in_batch
from operant.training.refused_step import refuse
from operant.training.replay_buffer import check_drawn
from operant.training.scoring import Bootstraps, bootstrap_prompts, check_rows
from operant.training.select import TrainingBatch, measure, select, select_all, select_both, with_staleness
from operant.training.setup import LastStep
from operant.types import Batch, OperantError, Rollout


@dataclass
class TrainingStep:
    """A training step under way. A stage reads what the ones before it have set."""

    rollouts: list[Rollout]
    scores: Sequence[Any] | None
    """One for each rollout; None: demonstrations."""
    sampling: Sampling
    lr: float = 0.0
    coef: float = 0.0
    """The price of KL in the reward, a nat."""
    tally: Tally = field(default_factory=Tally)
    """The metrics so far."""
    selected: TrainingBatch = field(init=False)
    """The replies of this step that are trained on, with their scores."""
    learnt: TrainingBatch = field(init=False)
    """What is trained on: the selected replies, or some of them and earlier ones."""
    collated: Batch = field(init=False)
    bootstraps: Bootstraps = field(init=False)
    batch: Batch = field(init=False)
    """Scored, and from `credit` on with advantages."""
    trained: Batch = field(init=False)
    """The part of the batch that moves the weights."""
    seen: Batch = field(init=False)
    """The credited batch on the CPU, for metrics."""

    def generated(self, source: str) -> list[Rollout]:
        """The selected replies without demonstrations, unless the method learns from nothing else."""
        return [r for r in self.selected.rollouts if not r.demonstrated or source == "data"]


Stage = Callable[[Any, TrainingStep], None]
"""`stage(learner, step)`."""


def before_update(learner: Any) -> list[Stage]:
    """The stages that change nothing but the running moments of scores, so that an error leaves a step undone."""
    chosen = select_given if learner.algorithm.source == "data" else select_scored
    return [chosen, *([mix_in_earlier] if learner.buffer is not None else []), observe]


def update_and_after(learner: Any) -> list[Stage]:
    """The stages from the advantages on."""
    best_alone = learner.own.select is not None and learner.algorithm.source != "data"
    return [
        credit_best if best_alone else credit,
        measure_batch,
        *([measure_staleness] if learner.buffer is None else []),
        refuse_or_update,
        *([see_returns] if learner.wanted is not None else []),
        keep_last_step,
    ]


def select_given(learner: Any, step: TrainingStep) -> None:
    """Select all demonstrations."""
    step.selected = step.learnt = select_all(step.rollouts)


def select_scored(learner: Any, step: TrainingStep) -> None:
    """Select the replies that have a score, and process their scores."""
    rollouts, scores, own, algorithm = step.rollouts, step.scores, learner.own, learner.named["algorithm"]
    limits = {"version": learner.policy.version, "max_staleness": own.max_staleness}
    limits |= {"drop_lengths": own.on_length == "drop", "tokenizer": learner.policy.tokenizer}
    shaping = {"options": learner.options["score"], "moments": learner.moments, **limits}
    scored = learner.algorithm.needs.reward or any(score is not None for score in scores or ())
    if own.select is not None and not learner.pays and not distributed.largest(int(scored)):
        raise OperantError(unscored_selection(own.select, algorithm))
    if not scored:
        unjudged = select(rollouts, [0.0] * len(rollouts), judged=False, **shaping)
        step.selected = step.learnt = replace(unjudged, raw_scores=[None] * len(rollouts))
        return
    if learner.algorithm.needs.token_scores and not learner.options["advantage"].get("gamma"):
        distributed.together(lambda: check_token_scores(rollouts, scores, algorithm))
    scores = [0.0] * len(rollouts) if scores is None else scores
    chosen = select_both if learner.algorithm.source == "both" else select
    step.selected = step.learnt = chosen(rollouts, scores, **shaping)


def mix_in_earlier(learner: Any, step: TrainingStep) -> None:
    """Learn from some of the replies of this step, and from earlier ones."""
    step.learnt = learner.buffer.mixed(step.selected, learner.policy.version)


def observe(learner: Any, step: TrainingStep) -> None:
    """Collate the replies, score them, and let the method look at them."""
    with learner.timing("observe"), sharding.present(learner):
        distributed.together(lambda: score(learner, step))
        step.batch = distributed.together(lambda: learner.look(step.batch, step.sampling))


def score(learner: Any, step: TrainingStep) -> None:
    """Collate the replies that are learnt from, and add log-probs, values and KL."""
    selected, algorithm = step.learnt, learner.algorithm
    rows = collated(learner, selected) if selected.rollouts else nothing(learner.policy.numbers)
    if algorithm.teacher and not selected.rollouts:  # another rank has replies
        rows = rows.with_(hinted=rows)
    if algorithm.needs.keys:
        rows = with_anchors(rows, selected.rollouts, learner.named["algorithm"], between(learner))
    cut_too = learner.own.on_length == "bootstrap"
    step.bootstraps = bootstrap_prompts(selected.rollouts, lengths_too=cut_too) if learner.policy.has_values else {}
    step.collated = rows.to(learner.policy.device)
    step.batch = learner.score(step.collated, step.bootstraps, step.sampling)


def collated(learner: Any, selected: TrainingBatch) -> Batch:
    """The rows of at least one reply, with the prompts that the method trains behind."""
    algorithm, policy, rollouts, scores = learner.algorithm, learner.policy, selected.rollouts, selected.scores
    joined = not policy.encoder_decoder and algorithm.unit != "turn"
    form = {"joined": joined, "numbers": policy.numbers, "turn_discount": between(learner)}
    check_drawn(rollouts, learner.options)
    if algorithm.needs.action_values:  # log-probs of guided replies are not those of the language model
        rollouts = [with_prompts(rollout, lambda index, turn: turn.prompt) for rollout in rollouts]
    if learner.wanted is not None:
        rollouts = with_returns(rollouts, reached(learner, selected), policy.tokenizer, learner.wanted.options)
    batch = collate(rollouts, scores, **form, mixed=algorithm.source == "both")
    if learner.wanted is not None:
        check_rows(batch, policy, " with its return")
    if algorithm.teacher:
        hinted = collate(with_hints(rollouts, policy.tokenizer, learner.options["teacher"]), scores, **form)
        check_rows(hinted, cast(Any, learner.reference).policy, " with its hint")
        batch = batch.with_(hinted=hinted)
    return with_staleness(batch, rollouts, policy.version)


def between(learner: Any) -> float:
    """The discount from a turn to the next one."""
    return math.prod(learner.options.get("advantage", {}).get(rate, 1.0) for rate in ("gamma", "turn_gamma"))


def reached(learner: Any, selected: TrainingBatch) -> list[list[float]]:
    """The returns of each rollout from each turn on."""
    pairs = zip(selected.rollouts, selected.scores, strict=True)
    return [returns_to_go(*pair, learner.options["condition"].turn_gamma) for pair in pairs]


def credit(learner: Any, step: TrainingStep) -> None:
    """Charge KL, and add the advantages."""
    with learner.timing("advantage"):
        step.batch = step.trained = learner.credit(step.batch, step.coef)
    step.seen = step.batch.with_(states=None).to("cpu")


def credit_best(learner: Any, step: TrainingStep) -> None:
    """The same; the best replies alone move the weights (`learner.select`)."""
    with learner.timing("advantage"):
        places, own = [rollout.place for rollout in step.learnt.rollouts] or [None], learner.own
        charged = {"discount": between(learner), "kl_coef": step.coef}
        kept, tally = best(step.batch, own.select, own.select_unit, places, **charged)
        step.batch = learner.credit(step.batch, step.coef)
    step.trained = only(step.batch, kept)
    step.seen = step.batch.with_(states=None).to("cpu")
    step.tally.merge(tally)


def measure_batch(learner: Any, step: TrainingStep) -> None:
    """Measure the replies, their scores and advantages."""
    generated, texts = step.generated(learner.algorithm.source), learner.policy.tokenizer is not None
    tally = step.learnt.tally.merge(collect.of_rollouts(generated, texts=texts)).merge(step.tally)
    step.tally = tally.merge(collect.of_batch(played(step.seen)[1], step.coef)).merge(collect.of_given(step.seen))


def measure_staleness(learner: Any, step: TrainingStep) -> None:
    """Measure how far the sampler of the replies is from the policy."""
    own = played(step.collated)[1]  # a demonstration has no sampler, and hides nothing of the others
    sampled = own.logprobs if learner.rescores and (own.unscored is None or not own.unscored.any()) else None
    cap, mask = learner.own.importance_cap, learner.own.importance_mask
    generated, version = step.generated(learner.algorithm.source), learner.policy.version
    step.tally.merge(measure(generated, version, played(step.seen)[1], cap, sampled, mask=mask))


def refuse_or_update(learner: Any, step: TrainingStep) -> None:
    """Move the weights, unless the batch has NaN or infinity; both end in `learner.refused`."""
    about = {"tokenizer": learner.policy.tokenizer, "sampling": step.sampling, "coef": step.coef}
    fault = find_in_batch(step.seen)
    learner.refused = refuse("observe", fault, step.collated, step.bootstraps, **about, tokens=learner.budget.tokens)
    if learner.refused is not None:
        return
    own, number = learner.own, learner.progress.step
    with learner.timing("update"), sharding.updating(learner, step.trained):
        learner.updating = True
        tally, bad = learner.rule.update(
            step.trained,
            learner.objective(step.sampling),
            step.sampling,
            lr=step.lr,
            seed=own.seed,
            step=number,
            places=[rollout.place for rollout in step.learnt.rollouts],
            budget=learner.budget,
            detailed=bool(own.watch_every) and number % own.watch_every == 0,
            keep_gradients=own.keep_gradients,
        )
    learner.updating = False
    step.tally.merge(tally)
    if bad is not None:
        learner.refused = refuse("update", bad.fault, bad.batch, {}, **about, tokens=bad.tokens, whole=bad.first)


def see_returns(learner: Any, step: TrainingStep) -> None:
    """Keep the best returns, which the next step asks for."""
    if learner.refused is None or not learner.refused.whole:
        found = distributed.gathered(reached(learner, step.selected))
        learner.wanted.see([whole[0] for part in found for whole in part])


def keep_last_step(learner: Any, step: TrainingStep) -> None:
    """Keep what the diagnosis and the log of replies read."""
    learner.last_step = LastStep(step.rollouts, step.selected.raw_scores, step.seen, step.learnt.places, step.sampling)


def sync(learner: Any, metrics: dict[str, float]) -> None:
    """Update the counters, the engine, the copies of the policy and the KL controller."""
    learner.progress.step += 1
    learner.attempts = Attempts()
    learner.progress.refused = learner.progress.refused + 1 if learner.refused is not None else 0
    learner.policy.version = learner.progress.step
    learner.engine.sync(learner.policy, learner.policy.version)
    if learner.refused is not None and learner.refused.whole:
        return
    if learner.buffer is not None:
        learner.buffer.keep()
    learner.progress.episodes += int(metrics.get("rollout/count", 0))
    for copied in sharding.copies(learner):
        copied.update(learner.policy, learner.progress.step)
    if "kl/per_reply" in metrics:
        replies = int(metrics["rollout/count"])
        learner.controller.update(metrics["kl/per_reply"], metrics["kl/per_token"], replies)
