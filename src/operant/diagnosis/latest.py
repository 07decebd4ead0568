"""The history of a learner in memory: the metrics of its last steps, and the replies of the newest one."""

from dataclasses import replace
from functools import partial
from typing import Any

from operant.diagnosis.history import History
from operant.metrics.rollout_table import rows
from operant.options import values
from operant.sampling import token_pieces


def latest(source: Any) -> History:
    """Return the history of a `Learner` or of a `Run`; it has no replies before the first step."""
    learner = getattr(source, "learner", source)
    config = learner.option_values() | {"reference": "none" if learner.reference is None else "given"}
    history = History(list(learner.history), config=config)
    last, tokenizer = learner.last_step, learner.policy.tokenizer
    if last is not None:
        pieces = partial(token_pieces, tokenizer) if tokenizer is not None else None
        table = rows(last.rollouts, last.scores, None, last.batch, last.places, pieces)
        info = last.rollouts[0].info if last.rollouts else {}
        history = replace(history, rows=table, declared=info.get("declared", {}), external="declared" in info)
    if learner is source:
        return history
    config |= values(source.config.train)
    return replace(history, metrics=source.metrics, reference=source.folder.reference_probes(), config=config)
