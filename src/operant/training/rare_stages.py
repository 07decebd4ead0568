"""The stages that some learners have: `stages.STAGES` says which, and where they stand between the others."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from operant import distributed
from operant.models.policy import Policy
from operant.objectives.advantages import gather, scatter
from operant.objectives.kl import EXACT
from operant.objectives.turn_returns import turn_returns
from operant.rewards.shaping import check_token_scores
from operant.rollouts.branches import branches
from operant.rollouts.prompts import returns_to_go, with_hints, with_prompts, with_returns
from operant.tally import Tally
from operant.training import scoring, select
from operant.training.options import LearnerOptions
from operant.training.parts import LearnerParts
from operant.training.select import TrainingBatch, parse
from operant.training.stages import TrainingStep, collated, credit
from operant.types import Batch, OperantError, Outputs, Rollout, totals


def check_single_tokens(learner: LearnerParts, step: TrainingStep) -> None:
    """Refuse one number a reply, where it would reach one token: a discount spreads it."""
    if not learner.options["advantage"].get("gamma"):
        distributed.together(lambda: check_token_scores(step.rollouts, step.scores, learner.named["algorithm"]))


def mix_in_earlier(learner: LearnerParts, step: TrainingStep) -> None:
    """Learn from some of the replies of this step, and from earlier ones."""
    step.learnt = learner.buffer.mixed(step.selected, learner.progress.step)


def split_branches(learner: LearnerParts, step: TrainingStep) -> None:
    """Make an attempt of each branch of an episode, before scores are centred, chosen or compared."""
    scores: Any = [None] * len(step.rollouts)
    if step.scores is not None:
        scores = distributed.together(lambda: select.finite_scores(step.rollouts, step.scores))
    discount, parts, of = learner.between_turns, list[tuple[Rollout, Any]](), list[int]()
    for place, (rollout, score) in enumerate(zip(step.rollouts, scores, strict=True)):
        for number, part in enumerate(branches(rollout, score, discount)):
            ids, there = ([(turn.prompt, turn.action) for turn in one.turns] for one in (part[0], rollout))
            of.append(place if number == 0 and ids == there[: len(ids)] else -1)
            parts.append(part)
    step.whole = (step.rollouts, scores, of)
    step.rollouts = [part for part, _ in parts]
    step.scores = None if step.scores is None else [score for _, score in parts]


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
        seen = batch if other is None else within_context(other, policy)
        model = policy if name == "policy" else models[name]
        seen = seen if name == "policy" else model.drop_foreign_states(seen, policy)
        return scoring.forward_batch(seen, model, step.sampling, learner.budget.tokens)

    step.batch = step.batch.with_(extra={**step.batch.extra, **learner.algorithm.look(step.batch, outputs)})


def within_context(batch: Batch, policy: Policy) -> Batch:
    """A batch of `Batch.given` with the rows cut at their end to the policy's context."""
    if policy.encoder_decoder or policy.context is None or batch.tokens.shape[1] <= policy.context:
        return batch
    names = ("tokens", "mask", "actions", "rewards", "turns")
    return batch.with_(**{name: getattr(batch, name)[:, : policy.context] for name in names})


def weigh(learner: LearnerParts, step: TrainingStep) -> None:
    """Add importance weights."""
    step.batch = with_importance(step.batch, step.collated.logprobs, learner.own, step.collated.unscored)


def with_importance(
    batch: Batch, sampled: Tensor | None, options: LearnerOptions, unscored: Tensor | None = None
) -> Batch:
    """Add importance weights to a batch whose `logprobs` are those of the policy before the update.

    sampled: [B, T] log-probs under the sampler, but for the actions `unscored` [B, T]. A sequence's weight is the
    product over all actions of an episode, at each of them. A demonstration has no sampler, and the weight 1.
    """
    own = batch.actions if batch.demonstrated is None else batch.actions & ~batch.demonstrated[:, None]
    unknown = own if sampled is None else own & unscored if unscored is not None else torch.zeros_like(own)
    if bool(unknown.any()):
        raise OperantError(
            f"learner.importance={options.importance!r} needs the log-probs under the sampler, and a reply of this "
            "step has none: train on replies of `generate`, give every Turn its logprobs, or set "
            "learner.importance=none"
        )
    log_ratio = batch.logprobs.new_zeros(own.shape) if sampled is None else batch.logprobs - sampled
    log_ratio = torch.where(own, log_ratio, 0.0)
    if options.importance == "sequence":
        sums = log_ratio.new_zeros(len(batch.bootstrap)).index_add(0, batch.episodes, log_ratio.sum(1))
        log_ratio = torch.where(batch.actions, sums[batch.episodes][:, None], 0.0)
    cap, floor, weights = options.importance_cap, options.importance_floor, log_ratio.exp()
    most = float("inf") if cap is None else cap
    tiny = torch.finfo(weights.dtype).tiny  # so that 0 is what was masked, and not what is too small for the type
    masked = torch.where((weights > most) | (weights < floor), 0.0, weights.clamp(min=tiny))
    kept = masked if options.importance_mask else weights.clamp(floor, most)
    return batch.with_(importance=torch.where(own, kept, 1.0))


def credit_best(learner: LearnerParts, step: TrainingStep) -> None:
    """The same; the best replies alone move the weights (`learner.select`).

    RAFT (arXiv:2304.06767), ReST (arXiv:2308.08998). Whatever a method computes from the replies of a step, such as the
    mean of a group, it computes from all of them; the others are then left out of the update.
    """
    own, places = learner.own, [rollout.place for rollout in step.learnt.rollouts] or [None]
    with learner.clock.timing("advantage"):
        charged = {"discount": learner.between_turns, "kl_coef": step.coef}
        kept, tally = best(step.batch, own.select, own.select_unit, places, **charged)
    credit(learner, step)
    step.trained = only(step.batch, kept)
    step.tally.merge(tally)


def best(
    batch: Batch, select: str, unit: str, places: Sequence[int | None], *, discount: float, kl_coef: float
) -> tuple[Tensor, Tally]:
    """The actions [B, T] bool of the best episodes or turns over all ranks, and the metrics. Every rank must call.

    An episode scores the sum of its rewards; a turn its return R_k = r_k + discount * R_{k+1}. KL is charged at
    `kl_coef` a nat to the unit in which it arose. Of equal scores the first stays: by `places` [E], the index of each
    episode over all ranks, then by turn. Demonstrations always stay, and are not counted.
    """
    index, turns, returns = turn_returns(batch, discount)
    own = turns.count > 0
    if batch.demonstrated is not None:
        given = torch.zeros(len(own), dtype=torch.bool, device=own.device)
        given[batch.episodes[batch.demonstrated]] = True
        own = own & ~given[:, None]
    charge = kl_coef * turns.summed(gather(batch.kl, index)) if batch.kl is not None else torch.zeros_like(returns)
    if unit == "episode":
        total = turns.summed(gather(batch.rewards, index)).sum(1) - charge.sum(1)
        scores = [(score, episode, 0) for episode, score in enumerate(total.tolist()) if bool(own[episode].any())]
    else:
        net = (returns - charge).tolist()
        scores = [(net[episode][turn], episode, turn) for episode, turn in own.nonzero().tolist()]
    rank = distributed.rank()
    group_of = dict(zip(batch.episodes.tolist(), batch.groups.tolist(), strict=True))
    mine = [(-score, -1 if (at := places[e]) is None else at, turn, rank, e, group_of[e]) for score, e, turn in scores]
    ranked = sorted(unit for part in distributed.gathered(mine) for unit in part)
    kind, number = parse(select)
    if kind == "above":
        kept = [unit for unit in ranked if -unit[0] > number]
    elif kind == "group":  # all replies of a group are on one rank, and ranks number their groups for themselves
        better, kept = Counter[tuple[int, int]](), []
        for one in ranked:
            better[one[3], one[5]] += 1
            if better[one[3], one[5]] <= number:
                kept.append(one)
    else:
        kept = ranked[: int(number) if kind == "count" else max(1, int(len(ranked) * number / 100 + 1e-9))]
    chosen = ~own & (turns.count > 0)  # demonstrations
    for _, _, turn, where, episode, _ in kept:
        if where == rank:
            chosen[episode, turn if unit == "turn" else slice(None)] = True
    tally = Tally()
    tally.add("select/share", len(kept), len(ranked))
    if kept:
        tally.add("select/threshold", -kept[-1][0])
        tally.add("select/score", -sum(unit[0] for unit in kept), len(kept))
    return scatter(turns.spread(chosen.long()), index, batch.tokens.shape) > 0, tally


def only(batch: Batch, kept: Tensor) -> Batch:
    """The batch with no other actions than `kept` [B, T], without rows that have none; one row stays if all have."""
    rows = kept.any(1).nonzero()[:, 0].cpu()
    if batch.allowed is not None:  # the pieces of other tokens are empty
        ids, stays, counts = batch.allowed[0], kept.flatten().cpu(), batch.allowed[1].diff()
        ends = torch.tensor([0]), (counts * stays).cumsum(0)
        batch = batch.with_(allowed=(ids[stays.repeat_interleave(counts)], torch.cat(ends)))
    return batch.with_(actions=batch.actions & kept).rows(rows if len(rows) else torch.tensor([0]))


def see_returns(learner: LearnerParts, step: TrainingStep) -> None:
    """Keep the best returns, which the next step asks for."""
    if learner.refused is None or not learner.refused.whole:
        found = distributed.gathered(_reached(learner, step.selected))
        learner.wanted.see([whole[0] for part in found for whole in part])


def _reached(learner: LearnerParts, selected: TrainingBatch) -> list[list[float]]:
    """The returns of each rollout from each turn on."""
    pairs = zip(selected.rollouts, selected.scores, strict=True)
    return [returns_to_go(*pair, learner.options["condition"].turn_gamma) for pair in pairs]
