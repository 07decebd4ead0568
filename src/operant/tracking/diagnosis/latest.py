"""What a diagnosis reads of a learner in memory: the metrics of its last steps, and the replies of the newest one."""

from functools import partial
from typing import Any

from operant.sampling import token_pieces
from operant.tracking.diagnosis.history import History
from operant.tracking.rows import rows


def latest(learner: Any) -> History:
    """The history of a `Learner`; without replies before its first step."""
    config = learner.passes.given() | {"reference": "none" if learner.reference is None else "given"}
    last, tokenizer = learner.learnt, learner.policy.tokenizer
    if last is None:
        return History([], [], config=config)
    pieces = partial(token_pieces, tokenizer) if tokenizer is not None else None
    table = rows(last.rollouts, last.scores, None, last.batch, last.kept, pieces)
    info = last.rollouts[0].info if last.rollouts else {}
    declared, foreign = info.get("declared", {}), "declared" in info
    return History(list(learner.history), table, config=config, declared=declared, foreign=foreign)
