"""Partial rollouts: a step draws so many tokens of each reply, and the next one continues it with its own weights.

So one long reply does not hold up a step (Kimi k1.5, arXiv:2501.12599, section 2.6.2). A reply keeps
the log-probs of the weights that drew each of its tokens, and the version of the oldest.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from operant.rollouts.play import Episode
from operant.sampling import Sampling, reply_text, task_key
from operant.types import Completion, Rollout, Step, Task, Tokenizer

__all__ = ["PartialGroup", "continue_replies"]


@dataclass
class PartialGroup:
    """The replies to one task that one step has begun."""

    task: int
    """Index of the task."""
    step: int
    """Number of the step, from 0: that of the replies' random numbers."""
    first: int = 0
    """Number of the first sample, if the step has begun the task more than once."""
    replies: list[Completion] = field(default_factory=list)
    """What has been drawn so far; empty before the first tokens are."""

    def state_dict(self) -> dict[str, object]:
        """Plain data and tensors, without what a frozen trunk has computed."""
        replies = [asdict(replace(reply, states=None, allowed=None)) for reply in self.replies]
        for kept, reply in zip(replies, self.replies, strict=True):
            if (allowed := reply.allowed) is not None:  # there may be thousands of ids a token
                ids = torch.tensor([i for own in allowed for i in own], dtype=torch.int32)
                kept["allowed"] = {"counts": [*map(len, allowed)], "ids": ids}
        return {"task": self.task, "step": self.step, "first": self.first, "replies": replies}

    @classmethod
    def of(cls, state: dict[str, Any]) -> "PartialGroup":
        replies = []
        for kept in state["replies"]:
            if (allowed := kept["allowed"]) is not None:
                allowed = [ids.tolist() for ids in allowed["ids"].split(allowed["counts"])]
            replies.append(Completion(**kept | {"allowed": allowed}))
        return cls(**state | {"replies": replies})


def new_groups(step: int, tasks: Sequence[int]) -> list[PartialGroup]:
    """The groups of a step that begins the tasks with these indices."""
    seen, groups = Counter[int](), list[PartialGroup]()
    for task in tasks:
        groups.append(PartialGroup(task, step, seen[task]))
        seen[task] += 1
    return groups


def continue_replies(
    groups: Sequence[PartialGroup],
    count: int,
    tokens: int,
    *,
    attempts: Callable[[Sequence[int]], list[Task]],
    engine: Any,
    tokenizer: Tokenizer | None,
    sampling: Sampling,
    seed: int,
) -> tuple[list[Rollout], list[PartialGroup], list[PartialGroup]]:
    """Draw at most `tokens` more of each reply, again and again until `count` groups have ended.

    groups: in the order in which they were begun. attempts: from indices of tasks to what is attempted, as often as a
    group has replies.
    Returns the rollouts of the first `count` groups that have ended, these groups, and all others, each in this order.
    Raises: OperantError of the engine.
    """
    replies = [
        [
            PartialReply(Episode(task, 0, 0, group.first * len(tasks) + i, sampling, tokenizer), group, i, seed)
            for i, task in enumerate(tasks)
        ]
        for group, tasks in ((group, attempts([group.task])) for group in groups)
    ]
    done: list[int] = []
    while len(done) < count:
        live = [reply for own in replies for reply in own if not reply.ended]
        begun = [reply.drawn.action if reply.drawn is not None else [] for reply in live]
        prompts, keys = [reply.episode.prompt for reply in live], [reply.key for reply in live]
        pieces = engine.generate_more(prompts, begun, [tokens] * len(live), sampling, keys)
        for reply, piece in zip(live, pieces, strict=True):
            reply.add(piece)
        done = [g for g, own in enumerate(replies) if all(reply.ended for reply in own)][:count]
    rollouts = [replace(reply.rollout(), group=number) for number, g in enumerate(done) for reply in replies[g]]
    rest = [
        replace(group, replies=[reply.drawn for reply in own])
        for g, (group, own) in enumerate(zip(groups, replies, strict=True))
        if g not in done
    ]
    return [replace(rollout, place=place) for place, rollout in enumerate(rollouts)], [groups[g] for g in done], rest


class PartialReply:
    """One reply while a step continues it."""

    def __init__(self, episode: Episode, group: PartialGroup, number: int, seed: int):
        self.episode, self.drawn = episode, group.replies[number] if group.replies else None
        episode.start(Step(fresh=True))
        self.key = task_key(seed, "train", group.step, episode.task.id, episode.sample, 0)

    @property
    def ended(self) -> bool:
        reply = self.drawn
        return reply is not None and (reply.end == "stop" or len(reply.action) >= self.episode.sampling.max_tokens)

    def add(self, piece: Completion) -> None:
        """Append further tokens. The version stays that of the older weights."""
        if (old := self.drawn) is not None:
            values = None if old.values is None or piece.values is None else old.values + piece.values
            allowed = None if old.allowed is None or piece.allowed is None else [*old.allowed, *piece.allowed]
            ids, logprobs = old.action + piece.action, old.logprobs + piece.logprobs
            piece = replace(piece, action=ids, logprobs=logprobs, values=values, version=old.version, allowed=allowed)
        self.drawn = piece

    def rollout(self) -> Rollout:
        """The episode, which has ended."""
        assert self.drawn is not None
        episode, tokenizer = self.episode, self.episode.tokenizer
        text = reply_text(tokenizer, episode.prompt, self.drawn.action, episode.sampling) if tokenizer else ""
        episode.take(self.drawn, text, None, None)
        rollout = episode.answer(Step(terminated=True), lambda prompt, reply: True)
        assert rollout is not None
        return rollout
