"""The stages of a training step, in their order: select, mix, rows, score, look, credit, update; then `sync`.

Each adds to the `TrainingStep` what the next ones read. A replay buffer, hints of a teacher, wanted returns, importance
weights, a selection of the best: each is a stage that a learner has or not, which its first line says.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from operant import distributed
from operant.metrics import collect
from operant.rewards.shaping import check_token_scores
from operant.rollouts.collate import collate, nothing, played, spread_over
from operant.rollouts.play import Attempts
from operant.rollouts.prompts import returns_to_go, with_hints, with_prompts, with_returns
from operant.sampling import Sampling
from operant.tally import Tally
from operant.training import scoring, select, sharding
from operant.training.best import best, only, unscored_selection
from operant.training.nonfinite import find_in_batch, refuse
from operant.training.objective import critic_alone, frozen
from operant.training.parts import LastStep, LearnerParts
from operant.training.replay_buffer import check_drawn
from operant.training.select import TrainingBatch
from operant.types import Batch, OperantError, Outputs, Rollout, totals


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

    def generated(self, source: str) -> list[Rollout]:
        """The selected replies without demonstrations, unless the method learns from nothing else."""
        return [r for r in self.selected.rollouts if not r.demonstrated or source == "data"]


Stage = Callable[[LearnerParts, TrainingStep], None]
When = Callable[[LearnerParts], bool]
STAGES: dict[str, list[tuple[Stage, When]]] = {}
"""The stages of each phase of a step, in the order of this file, and which learners have them."""


def stage(phase: str, when: When = lambda learner: True) -> Callable[[Stage], Stage]:
    """Add a function to the stages of a phase, for learners of which `when` is true."""

    def add(function: Stage) -> Stage:
        STAGES.setdefault(phase, []).append((function, when))
        return function

    return add


class Stages:
    """The stages of one learner, chosen when it is first used."""

    def __init__(self, learner: LearnerParts):
        self.learner = learner
        self.of_phase = {phase: [one for one, when in some if when(learner)] for phase, some in STAGES.items()}

    def run(self, step: TrainingStep, *phases: str) -> None:
        """Run the stages of these phases, one after the other."""
        for phase in phases:
            for one in self.of_phase[phase]:
                one(self.learner, step)


def _given(learner: LearnerParts) -> bool:
    """Whether it learns from demonstrations alone."""
    return learner.algorithm.source == "data"


def _compares(learner: LearnerParts) -> bool:
    """Whether it needs log-probs of the rows: demonstrations only beside a reference, wanted returns never."""
    return not (_given(learner) and learner.reference is None) and "condition" not in learner.options


# --- select -----------------------------------------------------------------------------------------------------------


@stage("select", lambda learner: learner.algorithm.needs.token_scores and not learner.options["advantage"].get("gamma"))
def check_single_tokens(learner: LearnerParts, step: TrainingStep) -> None:
    """Refuse one number a reply, where it would reach one token."""
    distributed.together(lambda: check_token_scores(step.rollouts, step.scores, learner.named["algorithm"]))


@stage("select", _given)
def select_given(learner: LearnerParts, step: TrainingStep) -> None:
    """Select all demonstrations."""
    step.selected = step.learnt = select.select_all(step.rollouts)


@stage("select", lambda learner: not _given(learner))
def select_scored(learner: LearnerParts, step: TrainingStep) -> None:
    """Select the replies that have a score, and process their scores."""
    rollouts, scores, own = step.rollouts, step.scores, learner.own
    shaping = {
        "options": learner.options["score"],
        "moments": learner.moments,
        "tokenizer": learner.policy.tokenizer,
        "drop_lengths": own.on_length == "drop",
        "drop_equal": own.drop_equal,
        "version": learner.policy.version,
        "max_staleness": own.max_staleness,
    }
    scored = learner.algorithm.needs.reward or any(score is not None for score in scores or ())
    if own.select is not None and not learner.pays and not distributed.largest(int(scored)):
        raise OperantError(unscored_selection(own.select, learner.named["algorithm"]))
    if not scored:
        unjudged = select.select(rollouts, [0.0] * len(rollouts), judged=False, **shaping)
        step.selected = step.learnt = replace(unjudged, raw_scores=[None] * len(rollouts))
        return
    chosen = select.select_both if learner.algorithm.source == "both" else select.select
    step.selected = step.learnt = chosen(rollouts, [0.0] * len(rollouts) if scores is None else scores, **shaping)


@stage("mix", lambda learner: learner.buffer is not None)
def mix_in_earlier(learner: LearnerParts, step: TrainingStep) -> None:
    """Learn from some of the replies of this step, and from earlier ones."""
    assert learner.buffer is not None
    step.learnt = learner.buffer.mixed(step.selected, learner.policy.version)


# --- rows -------------------------------------------------------------------------------------------------------------


@stage("rows", lambda learner: "replay" in learner.options)
def refuse_undrawn(learner: LearnerParts, step: TrainingStep) -> None:
    """Refuse replies from elsewhere whose KL would be estimated as if the policy had drawn them."""
    check_drawn(step.learnt.rollouts, learner.options)


@stage("rows", lambda learner: learner.algorithm.needs.action_values)
def forget_guidance(learner: LearnerParts, step: TrainingStep) -> None:
    """Learn from what the language model itself says of guided replies, not from what they were drawn with."""
    step.sampling = replace(step.sampling, guidance=0.0)
    bare = [with_prompts(rollout, lambda index, turn: turn.prompt) for rollout in step.learnt.rollouts]
    step.learnt = replace(step.learnt, rollouts=bare)


@stage("rows", lambda learner: "condition" in learner.options)
def state_returns(learner: LearnerParts, step: TrainingStep) -> None:
    """Put the returns that the replies reached into their prompts."""
    returns, options = _reached(learner, step.learnt), learner.options["condition"]
    stated = with_returns(step.learnt.rollouts, returns, learner.policy.tokenizer, options)
    step.learnt = replace(step.learnt, rollouts=stated)


@stage("rows")
def make_rows(learner: LearnerParts, step: TrainingStep) -> None:
    """Collate the replies."""
    policy, numbers = learner.policy, learner.policy.numbers
    if not step.learnt.rollouts:  # another rank has some
        step.collated = nothing(numbers)
        return
    rows = _collated(learner, step, step.learnt.rollouts)
    if "condition" in learner.options:
        scoring.check_rows(rows, policy, " with its return")
    step.collated = select.with_staleness(rows, step.learnt.rollouts, policy.version)


@stage("rows", lambda learner: "teacher" in learner.options)
def add_hints(learner: LearnerParts, step: TrainingStep) -> None:
    """Add the rows as the teacher reads them."""
    hinted = step.collated
    if step.learnt.rollouts:
        assert learner.reference is not None  # `check_reference` has refused it
        scores = totals(step.learnt.raw_scores, step.rollouts)
        own = [scores[place] for place in step.learnt.places]
        rollouts = with_hints(step.learnt.rollouts, own, learner.policy.tokenizer, learner.options["teacher"])
        hinted = _collated(learner, step, rollouts)
        scoring.check_rows(hinted, learner.reference.policy, " with its hint")
    step.collated = step.collated.with_(hinted=hinted)


@stage("rows", lambda learner: learner.algorithm.collated is not None)
def mark_rows(learner: LearnerParts, step: TrainingStep) -> None:
    """Let the method add fields that it reads from the replies."""
    assert learner.algorithm.collated is not None
    step.collated = learner.algorithm.collated(step.collated, step.learnt.rollouts, learner.between_turns)


@stage("rows")
def move_rows(learner: LearnerParts, step: TrainingStep) -> None:
    """Move the rows to the device of the policy, and find the states whose value the critic has to add."""
    policy, cut_too = learner.policy, learner.own.on_length == "bootstrap"
    found = scoring.bootstrap_prompts(step.learnt.rollouts, lengths_too=cut_too) if policy.has_values else {}
    step.bootstraps, step.collated = found, step.collated.to(policy.device)
    step.batch = step.collated


def _collated(learner: LearnerParts, step: TrainingStep, rollouts: Sequence[Rollout]) -> Batch:
    policy, algorithm = learner.policy, learner.algorithm
    return collate(
        rollouts,
        step.learnt.scores,
        joined=not policy.encoder_decoder and algorithm.unit != "turn",
        numbers=policy.numbers,
        turn_discount=learner.between_turns,
        mixed=algorithm.source == "both",
    )


def _reached(learner: LearnerParts, selected: TrainingBatch) -> list[list[float]]:
    """The returns of each rollout from each turn on."""
    pairs = zip(selected.rollouts, selected.scores, strict=True)
    return [returns_to_go(*pair, learner.options["condition"].turn_gamma) for pair in pairs]


# --- score and look ---------------------------------------------------------------------------------------------------


@stage("score", lambda learner: not _compares(learner))
def cache_states(learner: LearnerParts, step: TrainingStep) -> None:
    """Add the states of a frozen trunk: demonstrations need no scores unless policy and reference are compared."""
    step.batch = scoring.with_trunk_states(step.batch, learner.policy, learner.budget.tokens)


@stage("score", _compares)
def add_scores(learner: LearnerParts, step: TrainingStep) -> None:
    """Add log-probs, values, reference log-probs and KL."""
    scored = scoring.score_batch(
        step.batch.with_(hinted=None),
        learner.policy,
        learner.reference.policy if learner.reference is not None else None,
        step.sampling,
        learner.kl,
        micro_tokens=learner.budget.tokens,
        rescore=learner.rescores,
    )
    step.batch = scored.with_(hinted=step.batch.hinted)


@stage("score", lambda learner: _compares(learner) and learner.own.importance != "none")
def weigh(learner: LearnerParts, step: TrainingStep) -> None:
    """Add importance weights."""
    own, sampled, unscored = learner.own, step.collated.logprobs, step.collated.unscored
    how = {"floor": own.importance_floor, "mask": own.importance_mask, "unscored": unscored}
    step.batch = select.with_importance(step.batch, sampled, own.importance, own.importance_cap, **how)


@stage("score", _compares)
def bootstrap(learner: LearnerParts, step: TrainingStep) -> None:
    """Add the values of the states at which episodes were cut."""
    step.batch = scoring.with_bootstraps(step.batch, step.bootstraps, learner.policy, learner.budget.tokens)


@stage("look", lambda learner: learner.algorithm.look is not None)
def look(learner: LearnerParts, step: TrainingStep) -> None:
    """Add the fields of the method's hook. Every rank must call: it may read all rows."""
    assert learner.algorithm.look is not None
    policy, batch = learner.policy, step.batch.with_(hinted=None)
    models = {name: copied.policy for name, copied in learner.copies.items()}
    models |= {"reference": learner.reference.policy} if learner.reference is not None else {}

    @torch.no_grad()
    def outputs(name: str, other: Batch | None = None) -> Outputs:
        seen = batch if other is None else scoring.within_context(other, policy)
        model = policy if name == "policy" else models[name]
        seen = seen if name == "policy" else model.drop_foreign_states(seen, policy)
        return scoring.forward_batch(seen, model, step.sampling, learner.budget.tokens)

    step.batch = step.batch.with_(extra={**step.batch.extra, **learner.algorithm.look(step.batch, outputs)})


# --- credit, update, sync ---------------------------------------------------------------------------------------------


def credited(learner: LearnerParts, batch: Batch, coef: float) -> Batch:
    """The batch with KL charged at `coef` a nat, and with advantages."""
    batch = scoring.charge_kl(batch, coef, direct=learner.kl.direct)
    if learner.algorithm.advantage is None:
        return batch
    rows, part = played(batch)
    made = learner.algorithm.advantage(part, **learner.options["advantage"])
    return made if batch.demonstrated is None else spread_over(batch, rows, made)


@stage("credit", lambda learner: learner.own.select is None or _given(learner))
def credit(learner: LearnerParts, step: TrainingStep) -> None:
    """Charge KL, and add the advantages."""
    with learner.timing("advantage"):
        step.batch = step.trained = credited(learner, step.batch, step.coef)
    step.seen = step.batch.with_(states=None).to("cpu")


@stage("credit", lambda learner: learner.own.select is not None and not _given(learner))
def credit_best(learner: LearnerParts, step: TrainingStep) -> None:
    """The same; the best replies alone move the weights (`learner.select`)."""
    own, places = learner.own, [rollout.place for rollout in step.learnt.rollouts] or [None]
    assert own.select is not None
    with learner.timing("advantage"):
        charged = {"discount": learner.between_turns, "kl_coef": step.coef}
        kept, tally = best(step.batch, own.select, own.select_unit, places, **charged)
    credit(learner, step)
    step.trained = only(step.batch, kept)
    step.tally.merge(tally)


@stage("update")
def measure_batch(learner: LearnerParts, step: TrainingStep) -> None:
    """Measure the replies, their scores and advantages."""
    generated, texts = step.generated(learner.algorithm.source), learner.policy.tokenizer is not None
    tally = step.learnt.tally.merge(collect.of_rollouts(generated, texts=texts)).merge(step.tally)
    step.tally = tally.merge(collect.of_batch(played(step.seen)[1], step.coef)).merge(collect.of_given(step.seen))


@stage("update", lambda learner: learner.buffer is None)
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
    ages = [select.age(turn, learner.policy.version) for turn in turns if turn.logprobs is not None]
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


@stage("update")
def refuse_or_update(learner: LearnerParts, step: TrainingStep) -> None:
    """Move the weights, unless the batch has NaN or infinity; both end in `learner.refused`."""
    about = {"tokenizer": learner.policy.tokenizer, "sampling": step.sampling, "coef": step.coef}
    fault = find_in_batch(step.seen)
    learner.refused = refuse("observe", fault, step.collated, step.bootstraps, **about, tokens=learner.budget.tokens)
    if learner.refused is not None:
        return
    own, number, divided = learner.own, learner.progress.step, learner.policy.shards is not None
    parts = sharding.updating(learner.policy, learner.present, learner.kl, step.trained) if divided else nullcontext()
    objective, held = learner.objective(step.sampling), list[torch.nn.Parameter]()
    if number < own.critic_steps:
        objective, held = critic_alone(objective, learner.policy)
    with learner.timing("update"), parts, frozen(held):
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
        learner.refused = refuse("update", bad.fault, bad.batch, {}, **about, tokens=bad.tokens, whole=bad.first)


@stage("update", lambda learner: learner.wanted is not None)
def see_returns(learner: LearnerParts, step: TrainingStep) -> None:
    """Keep the best returns, which the next step asks for."""
    assert learner.wanted is not None
    if learner.refused is None or not learner.refused.whole:
        found = distributed.gathered(_reached(learner, step.selected))
        learner.wanted.see([whole[0] for part in found for whole in part])


@stage("update")
def keep_last_step(learner: LearnerParts, step: TrainingStep) -> None:
    """Keep what the diagnosis and the log of replies read."""
    learner.last_step = LastStep(step.rollouts, step.selected.raw_scores, step.seen, step.learnt.places, step.sampling)


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
    if "kl/per_reply" in metrics:
        replies = int(metrics["rollout/count"])
        learner.controller.update(metrics["kl/per_reply"], metrics["kl/per_token"], replies)
