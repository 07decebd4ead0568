"""Rollouts as rows of a table, one per turn, for `rollouts/step-00012.parquet`. `registry.COLUMNS` explains them."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from operant.metrics.games import transcript
from operant.types import Batch, Rollout, Total, totals

Row = dict[str, Any]
"""By the names of `registry.COLUMNS`."""
_PER_TOKEN = ("raw_logprobs", "ref_logprobs", "kl", "values", "advantages", "returns")


def as_rows(
    rollouts: Sequence[Rollout],
    scores: Sequence[Total],
    parts: Mapping[str, Sequence[float | None]] | None = None,
    batch: Batch | None = None,
    learned: Sequence[int] | None = None,
    pieces: Callable[[list[int]], list[str]] | None = None,
    remarks: Sequence[tuple[tuple[str, ...], str]] = (),
    passing: Sequence[Sequence[float] | None] = (),
) -> list[Row]:
    """Return one row per turn. The score of an attempt is in the row of its last turn; it is None if not judged.

    scores: one per rollout, as the reward returned it (a list: one number per token); what the environment paid is
    added here. parts: the named parts of the reward, one value per rollout.
    batch: the collated rollouts, for the columns with one value per token. learned: the indices of the rollouts that
    the batch was made of, in order; None: all that have a score. pieces: returns the text of each token id.
    remarks: the outcome classes and the message of each rollout; empty if the reward named none. An episode of several
    turns has its transcript as JSON in its last row. passing: of each rollout what a critic says after each action;
    empty without a critic.
    """
    if learned is None:
        learned = [i for i, score in enumerate(scores) if score is not None]
    whole = totals(scores, rollouts)
    episodes = {rollout: episode for episode, rollout in enumerate(learned)}
    table = []
    for number, rollout in enumerate(rollouts):
        begun, before = 0, rollout.parents
        for index, turn in enumerate(rollout.turns):
            row: Row = {
                "task": str(rollout.task.id),
                "group": rollout.group,
                "turn": index,
                "query": _without_surrogates(rollout.query),
                "reply": _without_surrogates(rollout.texts[index]),
                "prompt": list(turn.prompt),
                "ids": list(turn.action),
                "query_tokens": len(turn.prompt),
                "reply_tokens": len(turn.action),
                "logprobs": None if turn.logprobs is None else _finite(turn.logprobs),
                "paid": float(turn.reward),
                "end": turn.end,
                "version": turn.version,
                "rollout": number,
                "reward": None,
                "outcome": None,
                "message": None,
            }
            if index == len(rollout.turns) - 1:
                row["reward"] = whole[number]
                row |= {f"reward/{name}": values[number] for name, values in (parts or {}).items()}
                classes, message = remarks[number] if remarks else ((), "")
                row["outcome"] = ", ".join(classes) or None
                row["message"] = _without_surrogates(message) or None
                decode = None if pieces is None else lambda ids: "".join(pieces(ids))
                several = len(rollout.turns) > 1 or "game" in rollout.info
                if several and (game := transcript(rollout, decode)) is not None:
                    row["game"] = _without_surrogates(json.dumps(game, ensure_ascii=False))
            if before is not None:
                row["parent"] = before[index]
            if pieces is not None:  # choosing a whole reply is one action, with one number of each kind
                texts = pieces(turn.action) if turn.options is None else [rollout.texts[index]]
                row["tokens"] = [_without_surrogates(text) for text in texts]
            if passing:
                of_actions = passing[number]
                row["passing"] = None if of_actions is None else list(of_actions[begun : begun + turn.count])
                begun += turn.count
            if batch is not None:
                row |= _per_token(batch, episodes.get(number), index)
            table.append(row)
    return table


def _per_token(batch: Batch, episode: int | None, turn: int) -> Row:
    """Return the batch's values for the tokens of one turn, None for an episode that is not in the batch."""
    names = _PER_TOKEN if batch.allowed is not None else _PER_TOKEN[1:]  # else the first are the sampled ones
    known = [name for name in names if getattr(batch, name) is not None]
    if episode is None:
        return dict.fromkeys(known)
    of_episode = (batch.episodes == episode).nonzero().flatten()
    place = batch.turns[of_episode] == turn
    return {name: _finite(getattr(batch, name)[of_episode][place].tolist()) for name in known}


def _finite(numbers: Sequence[float]) -> list[float | None]:
    """Return the numbers with None for NaN and infinity, which a refused step may have."""
    return [x if math.isfinite(x) else None for x in numbers]


def _without_surrogates(text: str) -> str:
    """Return the text with lone surrogates replaced, which UTF-8 files cannot store."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
