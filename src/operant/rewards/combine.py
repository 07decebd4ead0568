"""Rewards made of rewards: weighted sums that report their parts by name, what a reply adds to its query, and what
each of its tokens adds.

reward = weighted({"sentiment": (minus_query(sentiment), 1.0), "length": (length(20), 0.3)})
judge(reward, rollouts).parts["length"]    # as that part returned it, before the weight
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from operant.rewards.evaluate import Judged, Outcome, check_greedy, joined_remarks, judge, name_of
from operant.rewards.wrapper import Wrapper, every_part, held_out
from operant.sampling import Sampling, reply_text
from operant.sandbox.reward_call import waits
from operant.types import OperantError, RewardFn, Rollout, Total, require

FAILED: tuple[Outcome, ...] = ("error", "timeout")
NOT_READ = {"logprobs": None, "values": None, "allowed": None, "states": None}
"""Fields of a turn that no reward reads, and that are wrong once its tokens are cut."""


@dataclass(frozen=True)
class Weighted(Wrapper):
    """The weighted sum of named rewards. Each is a part of the result, with its numbers before the weight."""

    rewards: dict[str, tuple[RewardFn, float]]
    name: str = "weighted"
    __name__ = property(lambda self: self.name)

    def judged(self, rollouts: list[Rollout]) -> Judged:
        """A part that abstains adds nothing to its sample; a sample abstains if all parts do.

        If a part failed and its sample is dropped there, the sum is dropped too: without that part it would be another
        reward.
        """
        scores: list[Total] = [None] * len(rollouts)
        parts: dict[str, list[float | None]] = {}
        results = list(self.each(rollouts))
        for (name, (reward, weight)), judged in zip(self.rewards.items(), results):
            scores = [_add_weighted(sum_, score, weight) for sum_, score in zip(scores, judged.scores)]
            for part, values in judged.parts.items():
                parts[name if part in (name, name_of(reward)) else f"{name}/{part}"] = values
        for i in range(len(scores)):
            if any(judged.outcome(i) in FAILED and judged.scores[i] is None for judged in results):
                scores[i] = None
        named = list(zip(self.rewards, results))
        remarks = [joined_remarks([one.remark(i).under(name) for name, one in named]) for i in range(len(scores))]
        remarks = remarks if any(judged.remarks for judged in results) else []
        notes = [note for judged in results for note in judged.notes]
        passing = next((judged.passing for judged in results if judged.passing), [])
        return Judged(scores, parts, _worst(results, scores), notes, remarks, passing)

    def each(self, rollouts: list[Rollout]) -> Iterator[Judged]:
        """What each reward answers; those that wait, such as for a server, wait at the same time."""
        each = [(name, reward) for name, (reward, _) in self.rewards.items()]
        waiting = {name: r for name, r in each if all(isinstance(p, Wrapper) or waits(p) for p in every_part(r))}
        with ThreadPoolExecutor(max(1, len(waiting))) as threads:
            begun = {name: threads.submit(judge, reward, rollouts, name) for name, reward in waiting.items()}
            for name, reward in each:
                yield begun[name].result() if name in begun else judge(reward, rollouts, name)

    @property
    def parts(self) -> Sequence[RewardFn]:
        return [reward for reward, _ in self.rewards.values()]

    def rebuilt(self, change: Callable[[RewardFn], RewardFn]) -> RewardFn:
        return replace(self, rewards={name: (change(part), weight) for name, (part, weight) in self.rewards.items()})


def _worst(results: list[Judged], scores: list[Total]) -> list[Outcome]:
    """Per sample, the worst outcome of several rewards; empty if failures of all of them stop the run."""
    outcomes: list[Outcome] = []
    for i, score in enumerate(scores if any(judged.outcomes for judged in results) else []):
        each = [judged.outcome(i) for judged in results]
        failure = next((outcome for outcome in FAILED if outcome in each), None)
        # A reward that abstains may still give a score (`on_abstain`).
        abstained = score is None or all(outcome == "abstain" for outcome in each)
        outcomes.append(failure or ("abstain" if abstained else "ok"))
    return outcomes


def weighted(rewards: Mapping[str, tuple[RewardFn, float]], name: str = "weighted") -> Weighted:
    """The weighted sum of named rewards: `weighted({"sentiment": (fn, 1.0), "length": (other, 0.3)})`.

    Each is a part of the result, with its numbers before the weight.
    """
    require(rewards, "a weighted reward without parts: give {name: (reward, weight)}")
    for part, (_, weight) in rewards.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise OperantError(f"the weight {weight!r} of reward {part!r} is not a finite number")
    return Weighted(dict(rewards), name)


def _add_weighted(total: Total, score: Total, weight: float) -> Total:
    """`total + weight * score`. A number is added to the last token of a list, as a reward of the whole reply is."""
    if score is None:
        return total
    term = [weight * x for x in score] if isinstance(score, list) else weight * score
    if total is None:
        return term
    if isinstance(total, list) and isinstance(term, list):
        return [x + y for x, y in zip(total, term)]
    each, one = (total, term) if isinstance(total, list) else (term, total)
    return [*each[:-1], each[-1] + one] if isinstance(each, list) else each + one  # type: ignore[operator]


@dataclass(frozen=True)
class MinusQuery(Wrapper):
    """score(query and reply) - score(query alone), which is what the reply added."""

    reward: RewardFn

    def judged(self, rollouts: list[Rollout]) -> Judged:
        """Each other text of a call is scored once. A sample abstains if either side does."""
        others, where = self.compared(rollouts)
        alone = judge(self.reward, others)
        query, whole = alone.at(where), judge(self.reward, rollouts)
        single = not any(isinstance(score, list) for score in whole.scores)
        require(single, f"reward {name_of(self.reward)!r} scores each token: there are no such scores to subtract")
        none = [None] * len(rollouts)
        parts = {part: _minus(values, query.parts.get(part, none)) for part, values in whole.parts.items()}
        scores = _minus(whole.scores, query.scores)
        for i in range(len(scores)):  # a score that replaces a failure stays as it is: nothing is subtracted
            replaced = [j.scores[i] for j in (whole, query) if j.outcomes and j.outcome(i) != "ok"]
            scores[i] = replaced[0] if replaced else scores[i]
        return Judged(scores, parts, _worst([whole, query], scores), [*alone.notes, *whole.notes], whole.remarks)

    def compared(self, rollouts: list[Rollout]) -> tuple[list[Rollout], list[int]]:
        """The rollouts whose scores are subtracted, and for each rollout the index of its own."""
        first: dict[tuple[str, str], int] = {}
        where = [first.setdefault((r.task.id, r.query), len(first)) for r in rollouts]
        asked = [rollouts[where.index(i)] for i in range(len(first))]
        return [replace(r, turns=[replace(r.turns[0], action=[], **NOT_READ)], texts=[""]) for r in asked], where


@dataclass(frozen=True)
class MinusGreedy(MinusQuery):
    """score(reply) - score(the policy's greedy reply to the same prompt): ReMax (arXiv:2310.10505).

    The greedy reply is no sample that is trained on. Once it is the best reply, all differences are at most 0.
    """

    greedy: list[Rollout] = field(default_factory=list)
    wants_greedy = True

    def see_greedy(self, rollouts: list[Rollout]) -> None:
        self.greedy[:] = rollouts

    def compared(self, rollouts: list[Rollout]) -> tuple[list[Rollout], list[int]]:
        """Raises: OperantError if a prompt has no greedy reply."""
        places = {rollout.task.id: i for i, rollout in enumerate(self.greedy)}
        check_greedy(self, rollouts, places)
        return list(self.greedy), [places[rollout.task.id] for rollout in rollouts]

    def for_held_out(self) -> RewardFn:
        return held_out(self.reward)


minus_query = MinusQuery
"""Subtracts from each score the reward of the query alone."""


def _minus(scores: list[float | None], others: list[float | None]) -> list[object]:
    return [None if x is None or y is None else x - y for x, y in zip(scores, others)]


@dataclass
class PrefixGain(Wrapper):
    """What each token of the last reply adds: token t is paid score(prefix to t) - score(prefix to t - 1).

    The score before the first token counts as 0, so the payments sum to the score of the whole reply. The reward is
    called once at the end of an episode, for all prefixes of each reply; one from which it abstains is paid as the
    prefix before it. A choice among given replies is one action, and is paid as a whole.
    """

    reward: RewardFn
    """What scores each prefix."""
    tokenizer: Any = None
    """The policy's, which a run sets before training (`read_with`)."""
    reads_tokens = True

    def judged(self, rollouts: list[Rollout]) -> Judged:
        """Judge all prefixes in one call."""
        if self.tokenizer is None:
            needs = "needs the policy's tokenizer, to read the beginning of a reply"
            how = "a run passes it; elsewhere call operant.rewards.read_with(reward, policy.tokenizer)"
            raise OperantError(f"reward 'per_token:{name_of(self.reward)}' {needs}: {how}")
        grown = [self.prefixes(rollout) for rollout in rollouts]
        whole = judge(self.reward, [some for prefixes in grown for some in prefixes])
        if any(isinstance(score, list) for score in whole.scores):
            raise OperantError(f"reward {name_of(self.reward)!r} scores each token already: name it without per_token:")
        ends, scores = list(accumulate(map(len, grown))), list[Total]()
        for rollout, prefixes, end in zip(rollouts, grown, ends):
            of_prefixes = whole.scores[end - len(prefixes) : end]
            if of_prefixes[-1] is None or not rollout.count:
                scores.append(of_prefixes[-1])
                continue
            known = list(accumulate([0.0, *of_prefixes], lambda before, score: before if score is None else score))
            turns_before = [0.0] * (rollout.count - len(prefixes))
            scores.append(turns_before + [after - before for before, after in pairwise(known)])
        return replace(whole.at([end - 1 for end in ends]), scores=scores, passing=[])

    def prefixes(self, rollout: Rollout) -> list[Rollout]:
        """The rollout with its last reply cut after each of its tokens; the last one is the rollout itself."""
        turn = rollout.turns[-1]
        if turn.options is not None or not turn.trained:
            return [rollout]
        found, bare = [], replace(turn, **NOT_READ)
        for t in range(1, len(turn.action)):
            text = reply_text(self.tokenizer, turn.prompt, turn.action[:t], rollout.sampling or Sampling())
            # A reply may end before its last token, at a stop string, say: nothing after that adds to it.
            text = text if len(text) < len(rollout.reply) else rollout.reply
            cut = replace(bare, action=turn.action[:t])
            found.append(replace(rollout, turns=[*rollout.turns[:-1], cut], texts=[*rollout.texts[:-1], text]))
        return [*found, rollout]
