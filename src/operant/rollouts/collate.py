"""Collates rollouts to a batch, cuts a batch into micro-batches, and computes the weight of each action."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from operant import distributed
from operant.types import Batch, Choices, OperantError, Rollout, Turn, require


def collate(
    rollouts: Sequence[Rollout],
    scores: Sequence[float | Sequence[float]],
    *,
    joined: bool = True,
    numbers: torch.dtype = torch.float32,
    turn_discount: float = 1.0,
    mixed: bool = False,
) -> Batch:
    """Make a batch of rollouts. A score is paid on the episode's last action; a list of scores is one float per action.

    A turn whose prompt extends the episode's last row joins that row, unless `joined` is False (encoder-decoders). Any
    other turn opens a new row of the same episode. `numbers`: dtype of rewards, log-probs and values. A turn that is
    not trained on is part of the prompts after it, and its reward is paid on the last action before it, times
    `turn_discount` for each turn from there to it; without an action before it, its reward is not paid.
    Log-probs of turns that have none are left to scoring (`Batch.unscored`). mixed: mark the rows of demonstrations.
    """
    require(rollouts, "no rollouts to learn from: every reward abstained, or the list is empty")
    rows: list[dict[str, Any]] = []
    for episode, (rollout, score) in enumerate(zip(rollouts, scores, strict=True)):
        _add_rows(rows, episode, rollout, action_rewards(rollout, score, turn_discount), joined)
    turns = _rectangle(rows, "turns", -1, torch.long)
    lengths = torch.tensor([len(row["tokens"]) for row in rows])
    trained = [turn for r in rollouts for turn in r.turns if turn.trained]
    sampled = any(turn.logprobs is not None for turn in trained)
    valued = all(turn.values is not None for turn in trained if turn.logprobs is not None or not sampled)
    partly = sampled and any(turn.logprobs is None for turn in trained)
    skips = any(not turn.trained for r in rollouts for turn in r.turns)
    batch = Batch(
        tokens=_rectangle(rows, "tokens", 0, torch.long),
        mask=torch.arange(turns.shape[1]) < lengths[:, None],
        actions=turns >= 0,
        rewards=_rectangle(rows, "rewards", 0.0, numbers),
        turns=turns,
        episodes=torch.tensor([row["episode"] for row in rows]),
        groups=torch.tensor([row["group"] for row in rows]),
        bootstrap=torch.tensor([r.turns[-1].next_value for r in rollouts], dtype=numbers),
        logprobs=_rectangle(rows, "logprobs", 0.0, numbers) if sampled else None,
        values=_rectangle(rows, "values", 0.0, numbers) if valued else None,
        skipped=_rectangle(rows, "skipped", 0, torch.long) if skips else None,
        demonstrated=torch.tensor([row["demonstrated"] for row in rows]) if mixed else None,
        unscored=_rectangle(rows, "unscored", False, torch.bool) if partly else None,
    )
    width = turns.shape[1]
    choices = [(i * width + column, *choice) for i, row in enumerate(rows) for column, *choice in row["choices"]]
    if choices:
        batch = batch.with_(choices=Choices.of(choices))
    # The last token of a row has no state, because it was never fed to the model.
    elif all(row["states"] is not None and len(row["states"]) == len(row["tokens"]) - 1 for row in rows):
        padded = torch.nn.utils.rnn.pad_sequence([row["states"] for row in rows], batch_first=True)
        batch = batch.with_(states=torch.nn.functional.pad(padded, (0, 0, 0, width - padded.shape[1])))
    if not any(row["allowed"] for row in rows):
        return batch
    pieces = [row["allowed"][t] if t < len(row["allowed"]) else [] for row in rows for t in range(width)]
    ids = np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces])
    return batch.with_(allowed=(torch.from_numpy(ids), torch.tensor([0, *map(len, pieces)]).cumsum(0)))


def nothing(numbers: torch.dtype = torch.float32) -> Batch:
    """A batch of one row without any action, for a rank that has no rollouts while others have some."""
    batch = Batch.given([[0, 0]], [[]])
    off = torch.zeros(batch.tokens.shape, dtype=numbers)
    return batch.with_(rewards=off, bootstrap=torch.zeros(1, dtype=numbers), logprobs=off, values=off)


SETUP = {"cpu": 128, "cuda": 4096}
"""Fixed cost of a forward and backward pass by kind of device, as the number of tokens that take the same time."""


def action_rewards(rollout: Rollout, score: float | Sequence[float], turn_discount: float = 1.0) -> list[float]:
    """One reward per action of the rollout: the environment's rewards plus the score."""
    counts = [turn.count for turn in rollout.turns]
    if any(not turn.action for turn in rollout.turns if turn.trained):
        raise OperantError(f"task {rollout.task.id!r}: a reply has no tokens; every reply needs at least one action")
    require(sum(counts), f"task {rollout.task.id!r}: no turn of the episode is trained on; leave it out")
    paid = [0.0] * sum(counts)
    end, skipped = -1, 0
    for count, turn in zip(counts, rollout.turns, strict=True):
        end += count
        skipped = 0 if turn.trained else skipped + 1
        if end >= 0:
            paid[end] += turn.reward * turn_discount**skipped
    if isinstance(score, (int, float)):
        paid[-1] += float(score)
    elif len(score) == len(paid):
        paid = [a + float(b) for a, b in zip(paid, score, strict=True)]
    else:
        raise OperantError(
            f"task {rollout.task.id!r}: {len(score)} rewards for {len(paid)} actions; "
            "a per-token reward gives one float for each token of the reply, and one for a choice"
        )
    return paid


def _add_rows(rows: list[dict[str, Any]], episode: int, rollout: Rollout, paid: list[float], joined: bool) -> None:
    """Append the rows of an episode to `rows`. `paid`: one reward per action."""
    row: dict[str, Any] | None = None
    spent = last_rest = 0
    for index, turn in enumerate(rollout.turns):
        if not turn.trained:  # the prompt of the next turn contains it
            if row is not None:
                row["skipped"][-1 - last_rest] += 1
            continue
        if row is None or not joined or turn.prompt[: len(row["tokens"])] != row["tokens"]:
            columns = ("tokens", "logprobs", "values", "rewards", "turns", "skipped", "unscored", "allowed", "choices")
            row = {name: [] for name in columns}
            row |= {"episode": episode, "group": rollout.group, "demonstrated": rollout.demonstrated}
            rows.append(row)
        shown = turn.prompt[len(row["tokens"]) :]
        n, blank = turn.count, [0.0] * len(shown)
        rest = len(turn.action) - n  # tokens of a chosen option after its first; the choice is a single action
        _check(turn, rollout)
        if turn.options is not None:
            among, places = distinct(turn.options)
            if turn.chosen is None or not 0 <= turn.chosen < len(places) or turn.action != among[places[turn.chosen]]:
                raise OperantError(
                    f"task {rollout.task.id!r}: option {turn.chosen} of {len(places)} was chosen, and its ids are not "
                    "the reply's: `chosen` must be the index in `options` of the action"
                )
            row["choices"].append((len(row["tokens"]) + len(shown), places[turn.chosen], among))
        row["tokens"] += shown + turn.action
        row["logprobs"] += blank + (turn.logprobs or [0.0] * n) + [0.0] * rest
        row["values"] += blank + (turn.values or [0.0] * n) + [0.0] * rest
        row["rewards"] += blank + paid[spent : spent + n] + [0.0] * rest
        row["turns"] += [-1] * len(shown) + [index] * n + [-1] * rest
        row["skipped"] += [0] * (len(shown) + n + rest)
        row["unscored"] += [False] * len(shown) + [turn.logprobs is None] * n + [False] * rest
        if turn.allowed is not None:
            row["allowed"] += [[]] * (len(row["tokens"]) - n - len(row["allowed"])) + list(turn.allowed)
        row["states"] = turn.states  # the states of the last turn contain those of all tokens before it
        spent, last_rest = spent + n, rest


def _check(turn: Turn, rollout: Rollout) -> None:
    """Raises: OperantError for a list that does not have one entry per action."""
    for name in ("logprobs", "values", "allowed"):
        entries = getattr(turn, name)
        if entries is not None and len(entries) != turn.count:
            raise OperantError(
                f"task {rollout.task.id!r}: {len(entries)} {name} for {turn.count} actions; "
                "give one per token (a choice is one action), or none"
            )


def distinct(options: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """The lists of ids without repetition, in order of first appearance, and the index of each in that result."""
    require(options and all(options), "a choice needs at least one option, and each option at least one token")
    numbers: dict[tuple[int, ...], int] = {}
    places = [numbers.setdefault(tuple(option), len(numbers)) for option in options]
    return [list(option) for option in numbers], places


def _rectangle(rows: list[dict[str, Any]], name: str, fill: float, dtype: torch.dtype) -> Tensor:
    """[B, T] one field of all rows, padded on the right with `fill`."""
    width = max(len(row[name]) for row in rows)
    return torch.tensor([row[name] + [fill] * (width - len(row[name])) for row in rows], dtype=dtype)


def units(batch: Batch, unit: str = "episode") -> list[list[int]]:
    """Row numbers of each unit, whose rows stay together.

    `unit`: turn (a row; each turn has one if not `joined`), episode, pair (two neighbouring episodes), or group.
    """
    rows = torch.arange(len(batch))
    numbers_of = {"turn": rows, "episode": batch.episodes, "pair": batch.episodes // 2, "group": batch.groups}
    require(unit in numbers_of, f"unit {unit!r} is unknown: turn, episode, pair or group")
    rows_of: dict[int, list[int]] = {}
    for row, number in enumerate(numbers_of[unit].tolist()):
        rows_of.setdefault(number, []).append(row)
    return list(rows_of.values())


def played(batch: Batch) -> tuple[Tensor, Batch]:
    """The numbers [P] of the rows that the policy has generated, and a batch of these rows and their episodes."""
    if batch.demonstrated is None:
        return torch.arange(len(batch), device=batch.tokens.device), batch
    rows = (~batch.demonstrated).nonzero()[:, 0]
    part = batch.rows(rows)
    known, episodes = torch.unique(part.episodes, return_inverse=True)
    return rows, part.with_(episodes=episodes, bootstrap=batch.bootstrap[known], demonstrated=None)


def spread_over(batch: Batch, rows: Tensor, part: Batch) -> Batch:
    """The batch with the advantages, returns and price of a part of its rows; those of the other rows are 0."""

    def whole(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        full = x.new_zeros(batch.tokens.shape)
        full[rows, : x.shape[1]] = x
        return full

    return batch.with_(**{name: whole(getattr(part, name)) for name in ("advantages", "returns", "price")})


def cut(
    batch: Batch, groups: Sequence[list[int]], budget: int, setup: int | None = None, *, packed: bool = False
) -> list[list[int]]:
    """Put groups of rows of similar length together to micro-batches of at most `budget` tokens; returns row numbers.

    Among all ways to cut the groups in order of length, it takes the one with the least work. The work of a micro-batch
    is its number of tokens, with padding unless rows are `packed` end to end, plus `setup` (None: that of the device).
    """
    setup = SETUP.get(batch.tokens.device.type, SETUP["cuda"]) if setup is None else setup
    lengths = batch.sizes()
    ordered = sorted(((max(lengths[r] for r in rows), rows) for rows in groups), key=lambda group: group[0])
    # Packed, every token counts as a row of width 1.
    sizes = [(1, sum(lengths[r] for r in rows)) if packed else (width, len(rows)) for width, rows in ordered]
    before = np.cumsum([0] + [count for _, count in sizes])
    cost, begins = np.zeros(len(ordered) + 1), [0] * (len(ordered) + 1)
    firsts = np.searchsorted(before, [stop - budget // max(width, 1) for stop, (width, _) in zip(before[1:], sizes)])
    for end, (width, _) in enumerate(sizes, 1):
        first = min(int(firsts[end - 1]), end - 1)
        each = cost[first:end] + width * (before[end] - before[first:end]) + setup
        least = int(each.argmin())
        begins[end], cost[end] = first + least, each[least]
    cuts: list[list[int]] = []
    end = len(ordered)
    while end:
        cuts.append([r for _, rows in ordered[begins[end] : end] for r in rows])
        end = begins[end]
    return cuts[::-1]


def token_weights(batch: Batch, per: str = "token", horizon: int | None = None) -> Tensor:
    """[B, T] the weight of each action in the loss, so that the loss is, over all ranks,

    `token`: the mean over tokens. `episode`: the mean over episodes of the mean over their tokens. `sequence`: the mean
    over episodes of the sum over their tokens. `horizon`: the same divided by the fixed length `horizon` (Dr. GRPO).
    `group`: the mean over groups of the mean over their episodes of the mean over their tokens. `prompt`: the mean over
    groups of the mean over all their tokens (arXiv:2510.13786).
    `source`: the mean over tokens of the policy's own replies, plus the mean over tokens of demonstrations.
    """
    if per == "source":
        given = batch.actions & batch.demonstrated[:, None] if batch.demonstrated is not None else batch.actions & False
        own, other = (token_weights(batch.with_(actions=some)) for some in (batch.actions & ~given, given))
        return own + other
    actions = batch.actions.double()
    index = torch.unique(batch.episodes, return_inverse=True)[1]
    counts = actions.new_zeros(int(index.max()) + 1 if len(index) else 0).index_add(0, index, actions.sum(1))
    episodes = distributed.total_float(float((counts > 0).sum()))
    match per:
        case "token":
            weights = actions / max(distributed.total_float(float(counts.sum())), 1.0)
        case "episode":
            weights = actions / counts[index].clamp(min=1)[:, None] / episodes
        case "group":
            group = torch.unique(batch.groups, return_inverse=True)[1]
            # An episode may have several rows, and each of them its share of the episode's actions.
            share = actions.sum(1) / counts[index].clamp(min=1)
            sizes = share.new_zeros(int(group.max()) + 1 if len(group) else 0).index_add(0, group, share)
            groups = distributed.total_float(float((sizes > 0).sum()))
            weights = actions / (counts[index].clamp(min=1) * sizes[group].clamp(min=1) * groups)[:, None]
        case "prompt":
            group = torch.unique(batch.groups, return_inverse=True)[1]
            sizes = actions.new_zeros(int(group.max()) + 1 if len(group) else 0).index_add(0, group, actions.sum(1))
            weights = actions / sizes[group].clamp(min=1)[:, None] / distributed.total_float(float((sizes > 0).sum()))
        case "sequence":
            weights = actions / episodes
        case "horizon":
            weights = actions / (episodes * (horizon or 1))
        case _:
            raise OperantError(f"per={per!r} is unknown: token, source, episode, group, prompt, sequence or horizon")
    return weights.to(batch.rewards.dtype)
