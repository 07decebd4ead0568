"""Find the first NaN or infinity of a step: its tensor, token and reply.

fault = find_in_batch(batch)                            # None, or NonFinite("log-prob", "nan", row=3, column=17)
fault = located(fault, batch, tokenizer)                 # ... token=12, piece=" film", reply="The film was"
fault.message()
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from operant import distributed
from operant.sampling import Sampling, token_pieces
from operant.training.scoring import Bootstraps
from operant.types import Batch, Tokenizer

KNOWN = {
    "logprobs": "log-prob",
    "raw_logprobs": "untruncated log-prob",
    "importance": "importance weight",
    "values": "value",
    "ref_logprobs": "reference log-prob",
    "kl": "KL",
    "rewards": "reward",
    "returns": "return",
    "advantages": "advantage",
}
"""Fields of a batch in the order in which they are computed, and their names in messages."""


@dataclass(frozen=True)
class NonFinite:
    """The first NaN or infinity: tensor, row and token."""

    what: str
    """`log-prob`, `value`, `loss`, `gradient of model.wte.weight` ..."""
    value: str
    """`nan`, `inf` or `-inf`."""
    row: int | None = None
    """The row of the batch; None if the number does not belong to a token."""
    column: int | None = None
    rank: int = 0
    """The process (rank) whose batch it was in."""
    token: int | None = None
    piece: str = ""
    """The token as text."""
    reply: str = ""

    def message(self) -> str:
        """The tensor, the value and the place, as part of a sentence."""
        if self.row is None:
            return f"the {self.what} is {self.value}"
        rank = f" of rank {self.rank}" if self.rank else ""
        at = "" if self.column is None else f", column {self.column} (token {self.token}, {self.piece!r})"
        return f"the {self.what} at row {self.row}{rank}{at} is {self.value}; the reply: {self.reply!r}"


def find_in_batch(batch: Batch) -> NonFinite | None:
    """The first NaN or infinity in a scored batch; None if there is none."""
    ends = (~batch.bootstrap.isfinite()).nonzero().flatten().tolist()
    if ends:
        row = (batch.episodes == ends[0]).nonzero().flatten().tolist()[-1]
        return NonFinite("value after the end", str(float(batch.bootstrap[ends[0]])), row)
    return find_at_actions({word: getattr(batch, name) for name, word in KNOWN.items()}, batch)


def find_at_actions(named: Mapping[str, Tensor | None], batch: Batch) -> NonFinite | None:
    """The first NaN or infinity at an action in named [B, T] tensors. Other positions are not checked."""
    for what, x in named.items():
        if x is not None and len(bad := (~x.isfinite() & batch.actions).nonzero()):
            row, column = bad[0].tolist()
            return NonFinite(what, str(float(x[row, column].detach())), row, column)
    return None


def located(fault: NonFinite, batch: Batch, tokenizer: Tokenizer | None, rank: int = 0) -> NonFinite:
    """The fault with its token and reply added; without a tokenizer, the reply is written as ids."""
    if fault.row is None:
        return fault
    tokens, turns = batch.tokens[fault.row], batch.turns[fault.row]
    turn = turns[turns >= 0][-1] if fault.column is None else turns[fault.column]
    ids = tokens[turns == turn].tolist()
    reply = tokenizer.decode(ids) if tokenizer is not None else " ".join(map(str, ids))
    if fault.column is None:
        return replace(fault, reply=reply, rank=rank)
    token = int(tokens[fault.column])
    return replace(fault, token=token, piece=token_pieces(tokenizer, [token])[0], reply=reply, rank=rank)


def first(faults: Iterable[NonFinite | None]) -> NonFinite | None:
    """The fault that was computed first, of those of all ranks; the others may follow from it."""
    order, found = [*KNOWN.values(), "logsumexp", "loss"], [f for f in faults if f is not None]
    return min(found, key=lambda f: (order.index(f.what) if f.what in order else len(order), f.rank), default=None)


@dataclass(frozen=True)
class RefusedStep:
    """A step that was not made, or not completed, because of NaN or infinity."""

    stage: str
    """observe: found before the update. update: found in an optimizer step, which ended the update."""
    fault: NonFinite
    parts: list[tuple[Batch, Bootstraps]]
    """For each rank: the collated batch or the minibatch, and the states to bootstrap from."""
    sampling: Sampling
    coef: float
    tokens: int
    """The token budget of one forward and backward pass."""
    whole: bool = True
    """Whether no weight has changed: no optimizer step came before it in its training step."""

    def message(self) -> str:
        where = "before the update" if self.stage == "observe" else "in the update"
        effect = "nothing has changed" if self.whole else "the optimizer steps before it stand"
        return f"a step was refused, {where}: {self.fault.message()}; {effect}"


def refuse(
    stage: str,
    fault: NonFinite | None,
    batch: Batch,
    bootstraps: Bootstraps,
    *,
    tokenizer: Tokenizer | None,
    **remaining: object,
) -> RefusedStep | None:
    """The refused step that all ranks agree on; None if no rank found NaN or infinity. Every rank must call.

    remaining: `sampling`, `coef`, `tokens` and, for an update, `whole` of the refused step.
    """
    rank = distributed.rank()
    found = first(distributed.gathered(None if fault is None else located(fault, batch, tokenizer, rank)))
    if found is None and stage == "observe":
        return None
    parts = distributed.gathered((batch.to("cpu"), dict(bootstraps)))
    # The gradient of every rank may be finite, and their sum infinite.
    return RefusedStep(stage, found or NonFinite("gradient norm", "not finite"), parts, **remaining)


@dataclass(frozen=True)
class RefusedUpdate:
    """An optimizer step that was not made because of NaN or infinity. The weights are those from before it."""

    fault: NonFinite | None
    """None if no number of this rank is at fault, for example if only the sum over ranks is infinite."""
    batch: Batch
    """This rank's minibatch, with its weights."""
    first: bool
    """Whether no optimizer step came before it in its training step."""
