"""(query, response, score) from anywhere to rollouts: texts, id lists or tensors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from operant.rollouts.chat import encode_more, encode_prompt
from operant.sampling import Sampling, check_ids, reply_text, stop_table
from operant.types import End, OperantError, Rollout, Task, Turn


def to_ids(tokenizer: Any, given: Any, *, reply: bool = False) -> list[int]:
    """Ids of a text (a reply gets no special tokens), a list of ids or a 1-d tensor."""
    if isinstance(given, torch.Tensor):
        if given.ndim != 1 or given.is_floating_point():
            raise OperantError(f"a query or response tensor must be [T] of ids; got {tuple(given.shape)} {given.dtype}")
        return given.tolist()
    if isinstance(given, str) and reply:
        if tokenizer is None:
            raise OperantError("the policy has no tokenizer: give responses as token ids")
        return encode_more(tokenizer, given)
    return encode_prompt(tokenizer, given if isinstance(given, str) else list(given))


def to_rollouts(
    queries: Sequence[Any],
    responses: Sequence[Any],
    *,
    tokenizer: Any,
    sampling: Sampling,
    episodes: Sequence[int] | None = None,
    rewards: Sequence[float] | None = None,
    next_values: Sequence[float] | None = None,
    groups: Sequence[int] | None = None,
    declared: Mapping[str, Any] | None = None,
    vocabulary: int | None = None,
    ends: bool = False,
) -> list[Rollout]:
    """One rollout an episode, in order of first appearance; without `episodes` every triplet is one.

    Turns of an episode follow each other in the order given, each paid its own of `rewards`. `next_values`: what the
    state after a turn is worth; that of an episode's last turn is its bootstrap, so 0 means that the episode has ended.
    `groups`: one a triplet, the same for all turns of an episode; None: episodes whose first queries are equal share
    one. `declared`, how they were sampled, stands in `info["declared"]` of each. `ends`: behind a response that is a
    text comes the first stop token, for there it ended.
    Raises: OperantError for lists of different length, an empty response, or an id that is not below `vocabulary`.
    """
    count = len(queries)
    names = list(range(count)) if episodes is None else [int(e) for e in episodes]
    paid = [0.0] * count if rewards is None else [_number(r, i) for i, r in enumerate(rewards)]
    ahead = [0.0] * count if next_values is None else [float(v) for v in next_values]
    groups = groups.tolist() if isinstance(groups, torch.Tensor) else groups
    together = [None] * count if groups is None else list(groups)
    given = {"responses": responses, "episodes": names, "rewards": paid, "next_values": ahead, "groups": together}
    for what, things in given.items():
        if len(things) != count:
            raise OperantError(f"{len(things)} {what} for {count} queries: give one for each")
    held: dict[int, list[tuple[Turn, str]]] = {}
    group_of: dict[int, Any] = {}
    for i in range(count):
        action = to_ids(tokenizer, responses[i], reply=True)
        if ends and isinstance(responses[i], str):
            action += sorted(sampling.stops)[:1]
        turn = _turn(tokenizer, to_ids(tokenizer, queries[i]), action, sampling, i)
        if group_of.setdefault(names[i], together[i]) != together[i]:
            raise OperantError(
                f"episode {names[i]} has turns in groups {group_of[names[i]]} and {together[i]}: give one"
            )
        if vocabulary is not None:
            check_ids([*turn.prompt, *turn.action], vocabulary, f"triplet {i}")
        turn = Turn(turn.prompt, turn.action, end=turn.end, reward=paid[i], next_value=ahead[i])
        text = reply_text(tokenizer, turn.prompt, turn.action, sampling) if tokenizer is not None else ""
        held.setdefault(names[i], []).append((turn, text))
    info = {"declared": dict(declared or {})}
    numbers: dict[Any, int] = {}
    for name, turns in held.items():
        key = tuple(turns[0][0].prompt) if groups is None else group_of[name]
        group_of[name] = numbers.setdefault(key, len(numbers))
    return [_rollout(name, group_of[name], turns, tokenizer, info) for name, turns in held.items()]


def _number(reward: Any, index: int) -> float:
    try:
        number = float("nan") if reward is None else float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise OperantError(f"the reward of turn {index} is {reward}: each turn of an episode has one finite number")
    return number


def _turn(tokenizer: Any, prompt: list[int], action: list[int], sampling: Sampling, index: int) -> Turn:
    if not prompt or not action:
        what = "response" if prompt else "query"
        raise OperantError(f"{what} {index} has no tokens: every reply needs at least one action, every query a token")
    return Turn(prompt, action, end=_end(tokenizer, action, sampling))


def _end(tokenizer: Any, action: list[int], sampling: Sampling) -> End:
    """Only a reply that is as long as it might be, and does not end in a stop token or string, was cut."""
    if len(action) < sampling.max_tokens or action[-1] in sampling.stops:
        return "stop"
    strings = () if sampling.fixed_length or tokenizer is None else sampling.stop_strings
    return "stop" if strings and stop_table(tokenizer, strings).ends(action, sampling.min_tokens) else "length"


def _rollout(name: int, group: int, turns: list[tuple[Turn, str]], tokenizer: Any, info: dict[str, Any]) -> Rollout:
    first, last = turns[0][0], turns[-1][0]
    query = tokenizer.decode(first.prompt, skip_special_tokens=True) if tokenizer is not None else ""
    end: End = "cut" if last.next_value else last.end if len(turns) == 1 else "world"
    task, texts = Task(f"given/{name}", first.prompt), [text for _, text in turns]
    return Rollout(task, group, [t for t, _ in turns], texts, end, info, query)
