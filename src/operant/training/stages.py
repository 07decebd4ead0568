"""The stages of a training step, in their order: select, mix, rows, score, look, credit, update; then `sync`.

Each adds to the `TrainingStep` what the next ones read. A replay buffer, hints of a teacher, wanted returns, importance
weights, a selection of the best: each is a stage of `rare_stages.py`, which a learner has or not. `STAGES` says it.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from operant import distributed
from operant.import_by_name import Lazy
from operant.metrics import collect
from operant.models.policy import Policy
from operant.rollouts.collate import collate, nothing, played, spread_over
from operant.rollouts.play import Attempts
from operant.sampling import Sampling
from operant.tally import Tally
from operant.training import scoring, select
from operant.training.nonfinite import find_in_batch, refuse
from operant.training.objective import critic_and_rest, frozen
from operant.training.parts import SOMETIMES, LastStep, LearnerParts
from operant.training.select import TrainingBatch
from operant.types import Batch, EnvBase, OperantError, Rollout, Total, with_defaults


@dataclass
class TrainingStep:
    """A training step under way. A stage reads what the ones before it have set."""

    rollouts: list[Rollout]
    scores: Sequence[object] | None
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
    """What is trained on: the selected replies, or some of them and earlier ones, behind the prompts of the method."""
    collated: Batch = field(init=False)
    bootstraps: scoring.Bootstraps = field(init=False)
    batch: Batch = field(init=False)
    """Scored, and from `credit` on with advantages."""
    trained: Batch = field(init=False)
    """The part of the batch that moves the weights."""
    seen: Batch = field(init=False)
    """The credited batch on the CPU, for metrics."""
    whole: "tuple[list[Rollout], Sequence[Total], list[int]] | None" = None
    """The rollouts and scores before branches were split, and of each part the index of its episode, -1 unless its
    turns have the same numbers there."""

    def logged(self) -> "tuple[list[Rollout], Sequence[Total], list[int]]":
        """The rollouts and scores that the step was given, and the index among them of each that was trained on."""
        if self.whole is None:
            return self.rollouts, self.selected.raw_scores, self.learnt.places
        rollouts, scores, of = self.whole
        return rollouts, scores, [of[place] if place >= 0 else -1 for place in self.learnt.places]

    def generated(self, source: str) -> list[Rollout]:
        """The selected replies without demonstrations, unless the method learns from nothing else."""
        return [r for r in self.selected.rollouts if not r.demonstrated or source == "data"]


# --- select -----------------------------------------------------------------------------------------------------------


def select_given(learner: LearnerParts, step: TrainingStep) -> None:
    """Select all demonstrations."""
    step.selected = step.learnt = select.select_all(step.rollouts)


def select_scored(learner: LearnerParts, step: TrainingStep) -> None:
    """Select the replies that have a score, and process their scores."""
    rollouts, scores, own = step.rollouts, step.scores, learner.own
    shaping = {"options": learner.options["score"], "moments": learner.moments, "tokenizer": learner.policy.tokenizer}
    shaping |= {"drop_lengths": own.on_length == "drop", "drop_equal": own.drop_equal}
    shaping |= {"version": learner.progress.step, "max_staleness": own.max_staleness}
    own_scored = learner.algorithm.needs.reward or any(score is not None for score in scores or ())
    scored = distributed.largest(int(own_scored))
    if own.select is not None and not learner.pays and not scored:
        raise OperantError(select.unscored_selection(own.select, learner.named["algorithm"]))
    if not scored:
        unjudged = select.select(rollouts, [0.0] * len(rollouts), judged=False, **shaping)
        step.selected = step.learnt = replace(unjudged, raw_scores=[None] * len(rollouts))
        return
    chosen = select.select_both if learner.algorithm.source == "both" else select.select
    step.selected = step.learnt = chosen(rollouts, [0.0] * len(rollouts) if scores is None else scores, **shaping)


# --- rows -------------------------------------------------------------------------------------------------------------


def make_rows(learner: LearnerParts, step: TrainingStep) -> None:
    """Collate the replies."""
    if not step.learnt.rollouts:  # another rank has some
        step.collated = nothing(learner.policy.numbers)
        return
    rows = collated(learner, step, step.learnt.rollouts)
    step.collated = select.with_staleness(rows, step.learnt.rollouts, learner.progress.step)


def move_rows(learner: LearnerParts, step: TrainingStep) -> None:
    """Move the rows to the device of the policy, and find the states whose value the critic has to add."""
    policy, cut_too = learner.policy, learner.own.on_length == "bootstrap"
    found = scoring.bootstrap_prompts(step.learnt.rollouts, lengths_too=cut_too) if policy.has_values else {}
    step.bootstraps, step.collated = found, step.collated.to(policy.device)
    step.batch = step.collated


def collated(learner: LearnerParts, step: TrainingStep, rollouts: Sequence[Rollout]) -> Batch:
    """The rows of replies with the scores of the step's."""
    policy, algorithm = learner.policy, learner.algorithm
    joined, mixed = not policy.encoder_decoder and algorithm.unit != "turn", algorithm.source == "both"
    scores, discount = step.learnt.scores, learner.between_turns
    return collate(rollouts, scores, joined=joined, numbers=policy.numbers, turn_discount=discount, mixed=mixed)


# --- score and look ---------------------------------------------------------------------------------------------------


def add_scores(learner: LearnerParts, step: TrainingStep) -> None:
    """Add log-probs, values, reference log-probs and KL, and the values of the states at which episodes were cut."""
    models = (learner.policy, learner.reference.policy if learner.reference is not None else None)
    how = {"micro_tokens": learner.budget.tokens, "rescore": learner.rescores}
    scored = scoring.score_batch(step.batch.with_(hinted=None), *models, step.sampling, learner.kl, **how)
    step.batch = scored.with_(hinted=step.batch.hinted)
    step.batch = scoring.with_bootstraps(step.batch, step.bootstraps, learner.policy, learner.budget.tokens)


def credited(learner: LearnerParts, batch: Batch, coef: float) -> Batch:
    """The batch with KL charged at `coef` a nat, and with advantages."""
    batch = scoring.charge_kl(batch, coef, direct=learner.kl.direct)
    if learner.algorithm.advantage is None:
        return batch
    rows, part = played(batch)
    made = learner.algorithm.advantage(part, **learner.options["advantage"])
    return made if batch.demonstrated is None else spread_over(batch, rows, made)


def credit(learner: LearnerParts, step: TrainingStep) -> None:
    """Charge KL, and add the advantages."""
    with learner.clock.timing("advantage"):
        step.batch = step.trained = credited(learner, step.batch, step.coef)
    step.seen = step.batch.with_(states=None).to("cpu")


def measure_batch(learner: LearnerParts, step: TrainingStep) -> None:
    """Measure the replies, their scores and advantages."""
    generated, texts = step.generated(learner.algorithm.source), learner.policy.tokenizer is not None
    tally = step.learnt.tally.merge(collect.of_rollouts(generated, texts=texts)).merge(step.tally)
    step.tally = tally.merge(collect.of_batch(played(step.seen)[1], step.coef)).merge(collect.of_given(step.seen))


def measure_staleness(learner: LearnerParts, step: TrainingStep) -> None:
    """Measure how far the sampler of the replies is from the policy."""
    own, batch, tally = played(step.collated)[1], played(step.seen)[1], step.tally  # a demonstration has no sampler
    if own.logprobs is not None and learner.rescores and (own.unscored is None or not own.unscored.any()):
        current = batch.actions if batch.staleness is None else batch.actions & (batch.staleness == 0)
        if batch.logprobs is not None:
            gap = (batch.logprobs - own.logprobs.to(batch.logprobs)).abs()
            tally.mean("rollout/engine_gap", gap, current)
            if current.any():
                tally.extreme("rollout/engine_gap_max", float(gap[current].max()))
    turns = [turn for rollout in step.generated(learner.algorithm.source) for turn in rollout.turns]
    ages = [select.age(turn, learner.progress.step) for turn in turns if turn.logprobs is not None]
    tally.mean("rollout/staleness", ages)
    if ages:
        tally.extreme("rollout/staleness_max", max(ages))
    if batch.importance is not None:
        tally.mean("rollout/importance_mean", batch.importance, batch.actions)
        cap, floor = learner.own.importance_cap, learner.own.importance_floor
        if cap is not None or floor:
            at_bounds = (batch.importance <= floor) | (batch.importance >= (cap or float("inf")))
            over = batch.importance == 0 if learner.own.importance_mask else at_bounds
            tally.mean("rollout/importance_clipped", over, batch.actions)


def refuse_or_update(learner: LearnerParts, step: TrainingStep) -> None:
    """Move the weights, unless the batch has NaN or infinity; both end in `learner.refused`."""
    about = {"tokenizer": learner.policy.tokenizer, "sampling": step.sampling, "coef": step.coef}
    fault = find_in_batch(step.seen)
    learner.refused = refuse("observe", fault, step.collated, step.bootstraps, **about, tokens=learner.budget.tokens)
    if learner.refused is not None:
        return
    own, number, divided = learner.own, learner.progress.step, learner.policy.shards is not None
    ranks = (learner.policy, learner.present, learner.kl, step.trained)
    parts = SOMETIMES["updating"](*ranks) if divided else nullcontext()
    objective, held = learner.objective(step.sampling), list[torch.nn.Parameter]()
    if number < own.critic_steps:
        objective = objective.of_critic
        _, held = critic_and_rest(learner.policy, f"learner.critic_steps={own.critic_steps}")
    if isinstance(learner.policy, Policy) and learner.policy.has_values and distributed.world() > 1:
        critic, needs = critic_and_rest(learner.policy, "a critic")[0].named_parameters(), learner.algorithm.needs
        of_q = () if needs.action_values else ("one.", "two.")
        held += [p for name, p in critic if not needs.critic or name.startswith(of_q)]  # ranks would wait for gradients
    with learner.clock.timing("update"), parts, frozen(held):
        learner.updating = True
        tally, bad = learner.rule.update(
            step.trained,
            objective,
            step.sampling,
            lr=step.lr,
            seed=own.seed,
            step=number,
            places=[rollout.place for rollout in step.learnt.rollouts],
            budget=learner.budget,
            detailed=bool(own.watch_every) and number % own.watch_every == 0,
            keep_gradients=own.keep_gradients,
        )
    step.tally.merge(tally)
    if bad is not None:
        about |= {"tokens": learner.budget.tokens, "whole": bad.first}
        learner.refused = refuse("update", bad.fault, bad.batch, {}, **about)


def keep_last_step(learner: LearnerParts, step: TrainingStep) -> None:
    """Keep what the diagnosis and the log of replies read."""
    rollouts, scores, places = step.logged()
    learner.last_step = LastStep(rollouts, scores, step.seen, places)


def sync(learner: LearnerParts, metrics: dict[str, float]) -> None:
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
    for copied in learner.all_copies:
        copied.update(learner.policy, learner.progress.step)
    if "kl/per_reply" in metrics and learner.progress.step > learner.own.critic_steps:  # else no policy answers to it
        learner.controller.update(metrics["kl/per_reply"], metrics["kl/per_token"], int(metrics["rollout/count"]))


def _always(learner: LearnerParts) -> bool:
    return True


def _given(learner: LearnerParts) -> bool:
    """Whether it learns from demonstrations alone."""
    return learner.algorithm.source == "data"


def _compares(learner: LearnerParts) -> bool:
    """Whether it needs log-probs of the rows: demonstrations only beside a reference, wanted returns never."""
    return not (_given(learner) and learner.reference is None) and "condition" not in learner.options


Stage = Callable[[LearnerParts, TrainingStep], None]
When = Callable[[LearnerParts], bool]
STAGES: dict[str, list[tuple[Stage | str, When]]] = {
    "select": [
        ("split_branches", lambda it: with_defaults(it.env, EnvBase).branches),
        ("check_single_tokens", lambda it: it.algorithm.needs.token_scores),
        (select_given, _given),
        (select_scored, lambda it: not _given(it)),
    ],
    "mix": [("mix_in_earlier", lambda it: it.buffer is not None)],
    "rows": [
        ("refuse_undrawn", lambda it: "replay" in it.options),
        ("forget_guidance", lambda it: it.algorithm.needs.action_values),
        ("state_returns", lambda it: "condition" in it.options),
        (make_rows, _always),
        ("check_stated", lambda it: "condition" in it.options),
        ("add_hints", lambda it: "teacher" in it.options),
        ("mark_rows", lambda it: it.algorithm.collated is not None),
        (move_rows, _always),
    ],
    "score": [
        ("cache_states", lambda it: not _compares(it)),
        (add_scores, _compares),
        ("weigh", lambda it: _compares(it) and it.own.importance != "none"),
    ],
    "look": [("look", lambda it: it.algorithm.look is not None)],
    "credit": [
        (credit, lambda it: it.own.select is None or _given(it)),
        ("credit_best", lambda it: it.own.select is not None and not _given(it)),
    ],
    "update": [
        (measure_batch, _always),
        (measure_staleness, lambda it: it.buffer is None),
        (refuse_or_update, _always),
        ("see_returns", lambda it: it.wanted is not None),
        (keep_last_step, _always),
    ],
}
"""The stages of each phase of a step, in their order, and which learners have them. Those that are only named here
stand in `rare_stages.py`, which is imported for the learners that have one of them."""


class Stages:
    """The stages of one learner, chosen when it is first used."""

    def __init__(self, learner: LearnerParts):
        self.learner = learner
        named = [one for some in STAGES.values() for one, _ in some if isinstance(one, str)]
        rare = Lazy({name: f"operant.training.rare_stages:{name}" for name in named})
        self.of_phase: dict[str, list[Stage]] = {
            phase: [rare[one] if isinstance(one, str) else one for one, when in some if when(learner)]
            for phase, some in STAGES.items()
        }

    def run(self, step: TrainingStep, *phases: str) -> None:
        """Run the stages of these phases, one after the other."""
        for phase in phases:
            for one in self.of_phase[phase]:
                one(self.learner, step)
