"""Makes rollouts of external replies: (query, response) pairs as texts, lists of ids, or tensors."""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from operant.sampling import Sampling, check_ids, encode_more, encode_prompt, reply_end, reply_text
from operant.types import End, OperantError, Rollout, Task, Tokenizer, Turn, require, shown

Text = str | Sequence[int] | torch.Tensor
"""A query or response: text, token ids, or a [T] tensor of ids."""


def to_ids(tokenizer: Tokenizer | None, text: Text, *, reply: bool = False) -> list[int]:
    """Token ids of a text (a reply gets no special tokens), a list of ids, or a 1-d tensor."""
    if isinstance(text, torch.Tensor):
        if text.ndim != 1 or text.is_floating_point():
            raise OperantError(f"a query or response tensor must be [T] of ids; got {tuple(text.shape)} {text.dtype}")
        return text.tolist()
    if isinstance(text, str) and reply:
        require(tokenizer is not None, "the policy has no tokenizer: give responses as token ids")
        return encode_more(tokenizer, text)
    return encode_prompt(tokenizer, text if isinstance(text, str) else list(text))


def to_rollouts(
    queries: Sequence[Text],
    responses: Sequence[Text],
    *,
    tokenizer: Tokenizer | None,
    sampling: Sampling,
    episodes: Sequence[object] | None = None,
    rewards: Sequence[float] | None = None,
    next_values: Sequence[float] | None = None,
    groups: Sequence[object] | None = None,
    declared: Mapping[str, object] | None = None,
    vocabulary: int | None = None,
    ends: bool = False,
) -> list[Rollout]:
    """Make one rollout per episode, in order of first appearance.

    `episodes`: the episode of each pair, whose turns are in order of time; None: each pair is an episode. `rewards`:
    the reward of each turn. `next_values`: the value of the state after an episode's last turn, 0 if it has ended, and
    0 at its other turns, because the critic says what the states between turns are worth. `groups`: the group of each
    pair, equal for all turns of an episode; None: episodes whose first queries are equal share a group. `declared`: how
    the replies were sampled; it is stored in `info["declared"]`. `ends`: append the first stop token to responses that
    are texts.
    """
    count = len(queries)
    called: Any = (range(count) if episodes is None else episodes, [None] * count if groups is None else groups)
    names, together = ([x.item() if hasattr(x, "item") else x for x in some] for some in called)
    paid = [0.0] * count if rewards is None else [_number(r, i) for i, r in enumerate(rewards)]
    ahead = [0.0] * count if next_values is None else [_number(v, i, "next value") for i, v in enumerate(next_values)]
    lists = {"responses": responses, "episodes": names, "rewards": paid, "next_values": ahead, "groups": together}
    for what, things in lists.items():
        require(len(things) == count, f"{len(things)} {what} for {count} queries: give one for each")
    for odd in [name for name in (*names, *together) if not isinstance(name, Hashable)]:
        raise OperantError(f"{shown(odd)} names no episode and no group: give each a text or a number")
    turns_of: dict[Any, list[tuple[Turn, str]]] = {}
    group_of: dict[Any, Any] = {}
    for i, name in enumerate(names):
        action = to_ids(tokenizer, responses[i], reply=True)
        if ends and isinstance(responses[i], str):
            action += sorted(sampling.stops)[:1]
        prompt = to_ids(tokenizer, queries[i])
        if not prompt or not action:
            what = "response" if prompt else "query"
            raise OperantError(f"{what} {i} has no tokens: every reply needs at least one action, every query a token")
        if group_of.setdefault(name, together[i]) != together[i]:
            raise OperantError(f"episode {name} has turns in groups {group_of[name]} and {together[i]}: give one")
        if vocabulary is not None:
            check_ids([*prompt, *action], vocabulary, f"triplet {i}")
        turn = Turn(prompt, action, end=reply_end(tokenizer, action, sampling), reward=paid[i], next_value=ahead[i])
        text = reply_text(tokenizer, prompt, action, sampling) if tokenizer is not None else ""
        turns_of.setdefault(name, []).append((turn, text))
    for name, turns in turns_of.items():
        if inner := [turn.next_value for turn, _ in turns[:-1] if turn.next_value]:
            raise OperantError(
                f"next_values: a turn of episode {name} that is not its last has {inner[0]:g}; what the state between "
                "two turns is worth is for the critic to say: give 0 there, and the value after the last turn"
            )
    info = {"declared": dict(declared or {})}
    numbers: dict[Any, int] = {}
    for name, turns in turns_of.items():
        key = tuple(turns[0][0].prompt) if groups is None else group_of[name]
        group_of[name] = numbers.setdefault(key, len(numbers))
    rollouts = list[Rollout]()
    for name, turns in turns_of.items():
        first, last, texts = turns[0][0], turns[-1][0], [text for _, text in turns]
        query = tokenizer.decode(first.prompt, skip_special_tokens=True) if tokenizer is not None else ""
        end: End = "cut" if last.next_value else last.end if len(turns) == 1 else "world"
        task = Task(f"given/{name}", first.prompt)
        rollouts.append(Rollout(task, group_of[name], [turn for turn, _ in turns], texts, end, info, query))
    return rollouts


def _number(reward: object, index: int, what: str = "reward") -> float:
    """The reward (or `what`) of a turn as a float."""
    try:
        number = float("nan") if reward is None else float(reward)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise OperantError(f"the {what} of turn {index} is {reward}: each turn of an episode has one finite number")
    return number
