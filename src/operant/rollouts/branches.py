"""Episodes whose turns are a tree, as rollouts that can be credited one by one.

A world that asks for several replies to one prompt (`Step.at`) makes branches. What follows one branch says nothing
about the others, so each is an attempt of its own; what led to them is one more, which ends where they begin.
"""

from dataclasses import replace
from itertools import accumulate
from typing import Any

from operant.types import MAX_TURNS, Rollout, Total, Turn


def branches(rollout: Rollout, score: Total, discount: float = 1.0) -> list[tuple[Rollout, Total]]:
    """The chains of turns of an episode, in order, each as a rollout with its score.

    A chain ends where several turns go on from its last one, and each of these begins another: every turn is in
    exactly one. The last reply before branches is also paid `discount` times the mean of their returns, so that a
    sum of rewards from it on is the expected one. `score`: of the whole episode, a number, which goes to the chain of
    its last turn, one for each action, or None. The state at which an episode was cut belongs to the chain that leads
    there. A chain without a trained turn is left out.
    """
    turns, before = rollout.turns, rollout.parents
    if rollout.failed or before is None:
        return [(rollout, score)]
    following: dict[int, list[int]] = {number: [] for number in range(-1, len(turns))}
    for number, parent in enumerate(before):
        following[parent].append(number)
    if score is None or isinstance(score, (int, float)):
        scores = [*([0.0] for _ in turns[1:]), [float(score or 0.0)]]
    else:
        ends = accumulate(turn.count for turn in turns)
        scores = [[float(x) for x in score[end - turn.count : end]] for turn, end in zip(turns, ends)]
    returns, paid = [0.0] * len(turns), [turn.reward for turn in turns]
    for number in reversed(range(len(turns))):
        ahead = [returns[other] for other in following[number]]
        mean = discount * sum(ahead) / len(ahead) if ahead else 0.0
        returns[number] = paid[number] + sum(scores[number]) + mean
        paid[number] += mean if len(ahead) > 1 else 0.0
    begins = [other for number, some in following.items() if len(some) > 1 or number < 0 for other in some]
    chains = []
    for number in sorted(begins):
        chain = [number]
        while len(after := following[chain[-1]]) == 1:
            chain += after
        chains.append(chain)
    made, cut = [], max(chains, key=lambda chain: (_led_to(turns[chain[-1]], rollout.following), chain[-1]))
    for chain in chains:
        begun, ends = before[chain[0]], chain is cut
        some = [replace(turns[i], reward=paid[i], parent=None) for i in chain]
        if begun >= 0 and not some[0].key:  # only the branches beside it begin here; no key: where the attempt begins
            some[0] = replace(some[0], key=f"{rollout.place}/{begun}")
        part = replace(
            rollout,
            turns=some,
            texts=[rollout.texts[i] for i in chain],
            end=rollout.end if ends else "world",
            # Each has a number of its own, so that minibatches are the same on any number of ranks.
            place=-rollout.place * MAX_TURNS - len(made) if made and rollout.place is not None else rollout.place,
            following=rollout.following if ends else None,
        )
        own: Any = [x for i in chain for x in scores[i]]
        if score is None or isinstance(score, (int, float)):
            own = None if score is None else sum(own)
        made += [(part, own)] if part.count else []
    return made


def _led_to(turn: Turn, following: list[int] | None) -> int:
    """How many tokens of a prompt are those that stand at the end of a turn; 0 where it goes on from another one."""
    if following is None:
        return 0
    ids = (turn.prompt + turn.action)[: len(following)]
    return len(ids) if following[: len(ids)] == ids else 0
