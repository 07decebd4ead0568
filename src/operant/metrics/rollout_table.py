"""Rollouts as rows of a table, one a turn: what `rollouts/step-00012.parquet` holds. `registry.COLUMNS` explains it."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from operant.rewards.evaluate import Total, totals
from operant.types import Batch, Rollout, Turn

_PER_TOKEN = ("ref_logprobs", "kl", "values", "advantages", "returns")


def rows(
    rollouts: Sequence[Rollout],
    scores: Sequence[Total],
    parts: Mapping[str, Sequence[float | None]] | None = None,
    batch: Batch | None = None,
    learned: Sequence[int] | None = None,
    pieces: Callable[[list[int]], list[str]] | None = None,
) -> list[dict[str, Any]]:
    """One row a turn. What an attempt came to stands on its last turn; where the reward abstained, it is None.

    scores: one a rollout, as the reward gave them (a list: one number per token); what the world paid is added. parts:
    both by name.
    batch: where the rollouts were observed, for the columns of every token. learned: which rollouts the batch was made
    of, in order; None: those with a score. pieces: ids of a reply to the text of each.
    """
    if learned is None:
        learned = [i for i, score in enumerate(scores) if score is not None]
    whole = totals(scores, rollouts)
    episodes = {rollout: episode for episode, rollout in enumerate(learned)}
    table = []
    for number, rollout in enumerate(rollouts):
        for index, turn in enumerate(rollout.turns):
            row = _spoken(rollout, index, turn) | {"rollout": number, "reward": None}
            if index == len(rollout.turns) - 1:
                row["reward"] = whole[number]
                row |= {f"reward/{name}": said[number] for name, said in (parts or {}).items()}
            if pieces is not None:  # a choice is one action, with one number of each kind
                said = pieces(turn.action) if turn.options is None else [rollout.texts[index]]
                row["tokens"] = [_clean(piece) for piece in said]
            if batch is not None:
                row |= _seen(batch, episodes.get(number), index)
            table.append(row)
    return table


def _spoken(rollout: Rollout, index: int, turn: Turn) -> dict[str, Any]:
    return {
        "task": str(rollout.task.id),
        "group": rollout.group,
        "turn": index,
        "query": _clean(rollout.query),
        "reply": _clean(rollout.texts[index]),
        "prompt": list(turn.prompt),
        "ids": list(turn.action),
        "query_tokens": len(turn.prompt),
        "reply_tokens": len(turn.action),
        "logprobs": None if turn.logprobs is None else _finite(turn.logprobs),
        "paid": float(turn.reward),
        "end": turn.end,
        "version": turn.version,
    }


def _seen(batch: Batch, episode: int | None, turn: int) -> dict[str, Any]:
    """What the batch knows of the tokens of one turn."""
    known = [name for name in _PER_TOKEN if getattr(batch, name) is not None]
    if episode is None:
        return dict.fromkeys(known)
    of_episode = (batch.episodes == episode).nonzero().flatten()
    place = batch.turns[of_episode] == turn
    return {name: _finite(getattr(batch, name)[of_episode][place].tolist()) for name in known}


def _finite(numbers: Sequence[float]) -> list[float | None]:
    """Of a step that was refused, what is no number is none in the table either."""
    return [x if math.isfinite(x) else None for x in numbers]


def _clean(text: str) -> str:
    """Without lone surrogates, which no file in UTF-8 can hold."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
