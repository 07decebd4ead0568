"""The stages that some learners have: `stages.STAGES` says which, and where they stand between the others."""

from dataclasses import replace

import torch

from operant import distributed
from operant.objectives.kl import EXACT
from operant.rewards.shaping import check_token_scores
from operant.rollouts.prompts import returns_to_go, with_hints, with_prompts, with_returns
from operant.training import scoring, select
from operant.training.best import best, only
from operant.training.parts import LearnerParts
from operant.training.select import TrainingBatch
from operant.training.stages import TrainingStep, collated, credit
from operant.types import Batch, OperantError, Outputs, totals


def check_single_tokens(learner: LearnerParts, step: TrainingStep) -> None:
    """Refuse one number a reply, where it would reach one token."""
    distributed.together(lambda: check_token_scores(step.rollouts, step.scores, learner.named["algorithm"]))


def mix_in_earlier(learner: LearnerParts, step: TrainingStep) -> None:
    """Learn from some of the replies of this step, and from earlier ones."""
    assert learner.buffer is not None
    step.learnt = learner.buffer.mixed(step.selected, learner.policy.version)


def refuse_undrawn(learner: LearnerParts, step: TrainingStep) -> None:
    """Refuse replies from elsewhere whose KL would be estimated as if the policy had drawn them.

    A method that has a buffer takes replies from any source, without log-probs.
    """
    kl = learner.kl
    if not kl.loss_coef or kl.loss_kind in EXACT:
        return
    if any(turn.trained and turn.logprobs is None for rollout in step.learnt.rollouts for turn in rollout.turns):
        raise OperantError(
            f"kl.loss_kind={kl.loss_kind} is estimated from tokens that the policy has drawn, and a reply of this step "
            "has no log-probs of its sampler, as one from elsewhere: use kl.loss_kind=reverse, or kl.loss_coef=0"
        )


def forget_guidance(learner: LearnerParts, step: TrainingStep) -> None:
    """Learn from what the language model itself says of guided replies, not from what they were drawn with."""
    step.sampling = replace(step.sampling, guidance=0.0)
    bare = [with_prompts(rollout, lambda index, turn: turn.prompt) for rollout in step.learnt.rollouts]
    step.learnt = replace(step.learnt, rollouts=bare)


def state_returns(learner: LearnerParts, step: TrainingStep) -> None:
    """Put the returns that the replies reached into their prompts."""
    returns, options = _reached(learner, step.learnt), learner.options["condition"]
    stated = with_returns(step.learnt.rollouts, returns, learner.policy.tokenizer, options)
    step.learnt = replace(step.learnt, rollouts=stated)


def check_stated(learner: LearnerParts, step: TrainingStep) -> None:
    """Refuse rows that the returns in their prompts have made too long."""
    if step.learnt.rollouts:  # else another rank has some
        scoring.check_rows(step.collated, learner.policy, " with its return")


def add_hints(learner: LearnerParts, step: TrainingStep) -> None:
    """Add the rows as the teacher reads them."""
    hinted = step.collated
    if step.learnt.rollouts:
        assert learner.reference is not None  # `check_reference` has refused it
        scores = totals(step.learnt.raw_scores, step.rollouts)
        own = [scores[place] for place in step.learnt.places]
        rollouts = with_hints(step.learnt.rollouts, own, learner.policy.tokenizer, learner.options["teacher"])
        hinted = collated(learner, step, rollouts)
        scoring.check_rows(hinted, learner.reference.policy, " with its hint")
    step.collated = step.collated.with_(hinted=hinted)


def mark_rows(learner: LearnerParts, step: TrainingStep) -> None:
    """Let the method add fields that it reads from the replies."""
    assert learner.algorithm.collated is not None
    step.collated = learner.algorithm.collated(step.collated, step.learnt.rollouts, learner.between_turns)


def cache_states(learner: LearnerParts, step: TrainingStep) -> None:
    """Add the states of a frozen trunk: demonstrations need no scores unless policy and reference are compared."""
    step.batch = scoring.with_trunk_states(step.batch, learner.policy, learner.budget.tokens)


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


def weigh(learner: LearnerParts, step: TrainingStep) -> None:
    """Add importance weights."""
    own, sampled, unscored = learner.own, step.collated.logprobs, step.collated.unscored
    how = {"floor": own.importance_floor, "mask": own.importance_mask, "unscored": unscored}
    step.batch = select.with_importance(step.batch, sampled, own.importance, own.importance_cap, **how)


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


def see_returns(learner: LearnerParts, step: TrainingStep) -> None:
    """Keep the best returns, which the next step asks for."""
    assert learner.wanted is not None
    if learner.refused is None or not learner.refused.whole:
        found = distributed.gathered(_reached(learner, step.selected))
        learner.wanted.see([whole[0] for part in found for whole in part])


def _reached(learner: LearnerParts, selected: TrainingBatch) -> list[list[float]]:
    """The returns of each rollout from each turn on."""
    pairs = zip(selected.rollouts, selected.scores, strict=True)
    return [returns_to_go(*pair, learner.options["condition"].turn_gamma) for pair in pairs]
