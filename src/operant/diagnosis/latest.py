"""What a diagnosis reads of a learner in memory: the metrics of its last steps, and the replies of the newest one."""

from dataclasses import replace
from functools import partial
from typing import Any

from operant.diagnosis.history import History
from operant.metrics.rollout_table import rows
from operant.options import values
from operant.sampling import token_pieces


def latest(of: Any) -> History:
    """The history of a `Learner` or of a `Run`; without replies before its first step."""
    learner = getattr(of, "learner", of)
    history = _of_learner(learner)
    if learner is of:
        return history
    config = {**history.config, **values(of.config.train)}
    return replace(history, metrics=of.metrics, reference=of.folder.reference_probes(), config=config)


def _of_learner(learner: Any) -> History:
    config = learner.passes.given() | {"reference": "none" if learner.reference is None else "given"}
    last, tokenizer = learner.learnt, learner.policy.tokenizer
    if last is None:
        return History([], [], config=config)
    pieces = partial(token_pieces, tokenizer) if tokenizer is not None else None
    table = rows(last.rollouts, last.scores, None, last.batch, last.kept, pieces)
    info = last.rollouts[0].info if last.rollouts else {}
    declared, foreign = info.get("declared", {}), "declared" in info
    return History(list(learner.history), table, config=config, declared=declared, foreign=foreign)
