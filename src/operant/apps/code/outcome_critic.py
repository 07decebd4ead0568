"""An outcome critic: predicts from a problem and a program what will become of it, also of a program's beginning.

    OutcomeCritic("runs/sft")       # a language model, causal or encoder-decoder, becomes the trunk; the head is new
    OutcomeCritic("runs/critic")    # one that was trained already

The head reads the state before each token of the program and before its end: position t has read its first t tokens.
The prediction for the program is the softmax of the element-wise maximum of the logits over these positions (CodeRL,
arXiv:2207.01780), and for its first t tokens that of the maximum until position t.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from operant.models.base import PolicyBase, ReadingPolicy
from operant.models.loading import load_policy
from operant.models.safe_loading import load_tensors
from operant.sampling import Sampling, token_pieces
from operant.storage import atomic_io
from operant.storage.hub import find_model
from operant.types import OUTCOMES, Batch, OperantError, Outputs, Rollout, Tokenizer, require

HEAD, ABOUT = "outcome_head.safetensors", "outcome_critic.json"
PASSED = OUTCOMES.index("passed")
"""The column of passed programs."""
BINS = 10
QUARTERS = (25, 50, 75, 100)


class OutcomeCritic(ReadingPolicy):
    """A policy for `algorithm=outcome-critic`: `Outputs.outcomes` has its predictions, and it generates nothing.

    trunk: a folder, a run, `builtin:NAME` or a Hub name: a language model with a tokenizer, or an outcome critic, whose
    head is then loaded. hidden: width of the ReLU layer before the logits (CodeRL: 128); 0: none. None: that of the
    critic that is loaded, or 128. pool_padding: 0 pools over the program's own positions; N > 0 pads every program to N
    tokens, or cuts it, and pools over the padding too, as the code of CodeRL did. None: that of the critic that is
    loaded, or 0. seed: of a new head.
    """

    as_reward = "critic:"
    trained_by = "outcome-critic"

    def __init__(
        self,
        trunk: str = "builtin:reviews-lm",
        hidden: int | None = None,
        pool_padding: int | None = None,
        seed: int = 0,
    ):
        super().__init__()
        folder = Path(find_model(trunk))
        about = _about(folder)
        if about and hidden not in (None, about["hidden"]):
            raise OperantError(f"policy.hidden={hidden}: {trunk} has a head with {about['hidden']}; leave it out")
        self.hidden = about.get("hidden", 128) if hidden is None else hidden
        self.pool_padding = about.get("pool_padding", 0) if pool_padding is None else pool_padding
        for name in ("hidden", "pool_padding"):
            require(getattr(self, name) >= 0, f"policy.{name}={getattr(self, name)}: it must be at least 0")
        self.inner: Any = load_policy(str(folder))
        if isinstance(self.inner, PolicyBase) or self.inner.tokenizer is None:
            what = "no language model" if isinstance(self.inner, PolicyBase) else "a model without a tokenizer"
            raise OperantError(f"policy.trunk={trunk!r} is {what}: a critic reads text with a language model")
        self.tokenizer, self.vocabulary = self.inner.tokenizer, self.inner.vocabulary
        self.stop_tokens, self.context = self.inner.stop_tokens, self.inner.context
        self.encoder_decoder = self.inner.encoder_decoder
        if (most := self.room()[1]) is not None and self.pool_padding >= most:
            raise OperantError(f"policy.pool_padding={self.pool_padding}: {trunk} reads {most} tokens; lower it")
        if not self.stop_tokens:
            raise OperantError(f"policy.trunk={trunk!r} has no end token, before which a program is judged as a whole")
        if self.inner.head.weight is not self.inner.model.get_input_embeddings().weight:
            self.inner.head.requires_grad_(False)  # nothing reads it
        width = int(self.inner.head.weight.shape[1])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            before = [nn.Linear(width, self.hidden), nn.ReLU()] if self.hidden else []
            self.outcome_head = nn.Sequential(*before, nn.Linear(self.hidden or width, len(OUTCOMES)))
        if about:
            weights = load_tensors(folder / HEAD)
            expected = {name: x.shape for name, x in self.outcome_head.state_dict().items()}
            if {name: x.shape for name, x in weights.items()} != expected:
                raise OperantError(f"{folder / HEAD} does not fit its {ABOUT}: the folder is damaged")
            self.outcome_head.load_state_dict(weights)
        self.outcome_head.to(self.inner.numbers)

    @property
    def model(self) -> Any:
        return self.inner.model

    def forward(self, batch: Batch, sampling: Sampling = Sampling(), **kwargs: object) -> Outputs:
        """`Outputs.outcomes` [B, T, C] at each action; at the last one of a row for the whole program."""
        pooled = self.logits(batch)[1]
        off = pooled.new_zeros(pooled.shape[:2])
        return Outputs(off, off, outcomes=pooled)

    def logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[B, T, C] the logits of each position, and those pooled from the first position of the row to it; 0 off
        actions. At the last action of a row it is the pool of the whole program, with its padding if that is pooled."""
        batch = batch.to(self.device)
        if not self.pool_padding:
            read = self._head(self.inner.states(batch))
            own = read.new_zeros(*batch.actions.shape, read.shape[-1]).masked_scatter(batch.actions[..., None], read)
            lowest = torch.where(batch.actions[..., None], own, -torch.inf)
            return own, torch.where(batch.actions[..., None], lowest.cummax(1).values, 0.0)
        rows = [row[at].tolist() for row, at in zip(batch.tokens.cpu(), (batch.actions & batch.mask).cpu())]
        prompts = [row[at].tolist() for row, at in zip(batch.tokens.cpu(), (~batch.actions & batch.mask).cpu())]
        pad, width = self.tokenizer.pad_token_id or 0, self.pool_padding
        padded = Batch.given(prompts, [(row + [pad] * width)[:width] for row in rows]).to(self.device)
        own = self._head(self.inner.states(padded)).view(len(rows), width, -1)
        pooled = own.cummax(1).values
        place = (batch.actions.cumsum(1) - 1).clamp(0, width - 1)[..., None].expand(-1, -1, own.shape[-1])
        last = torch.arange(place.shape[1], device=self.device) == batch.mask.sum(1, keepdim=True) - 1
        whole = torch.where(last[..., None], pooled[:, -1:], pooled.gather(1, place))
        return tuple(torch.where(batch.actions[..., None], x, 0.0) for x in (own.gather(1, place), whole))  # type: ignore

    def _head(self, states: Tensor) -> Tensor:
        """[N, D] -> [N, C], in float32 or the trunk's dtype if that is wider."""
        with torch.autocast(states.device.type, enabled=False):
            return self.outcome_head(states.to(next(self.outcome_head.parameters()).dtype))

    @torch.no_grad()
    def read(self, rows: Sequence[tuple[list[int], list[int]]], batch: int = 32) -> list[tuple[Tensor, Tensor]]:
        """Of each prompt and program with its end token, A tokens: `logits` at its positions, both [A, C], on the CPU.

        `batch` rows of similar length are read at a time.
        """
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]) - len(rows[i][1]))
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for some in (order[i : i + batch] for i in range(0, len(order), batch)):
            given = Batch.given([rows[i][0] for i in some], [rows[i][1] for i in some])
            own, pooled = (x.cpu() for x in self.logits(given))
            for row, (i, at) in enumerate(zip(some, given.actions)):
                found[i] = (own[row, at], pooled[row, at])
        return [found[i] for i in range(len(rows))]

    def room(self) -> tuple[int | None, int | None]:
        """Most tokens of a prompt with its program, or of an encoder-decoder: of each; None: no limit."""
        return self.inner.context, self.inner.positions["decoder"] if self.encoder_decoder else self.inner.context

    def misfit(self, prompt: int, reply: int) -> str | None:
        return self.inner.misfit(prompt, max(reply, self.pool_padding))

    def packs(self, batch: Batch) -> bool:
        return not self.pool_padding and self.inner.packs(batch)

    def export(self, folder: Path) -> None:
        """Write the head beside the trunk, as safetensors."""
        from safetensors.torch import save_file

        with atomic_io.operation("write", folder / HEAD):
            save_file({k: v.detach().contiguous() for k, v in self.outcome_head.state_dict().items()}, folder / HEAD)
        about = {"outcomes": OUTCOMES, "hidden": self.hidden, "pool_padding": self.pool_padding}
        atomic_io.write(folder / ABOUT, json.dumps(about, indent=1))

    def measure(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        read = self.read([(rollout.turns[-1].prompt, rollout.turns[-1].action) for rollout in rollouts])
        return metrics([pooled for _, pooled in read], [rollout.paid for rollout in rollouts])


def metrics(pooled: Sequence[Tensor], outcomes: Sequence[float]) -> dict[str, float]:
    """The metrics of N programs and the numbers of their true outcomes.

    pooled: of each program of T tokens the logits [T + 1, C] for its first 0 to T tokens (`OutcomeCritic.logits`).
    The areas under the curve are absent if all have passed, or none has.
    """
    true = torch.tensor([round(outcome) for outcome in outcomes])
    chances = [logits.double().softmax(-1) for logits in pooled]
    found = {
        "critic/majority": max(Counter(true.tolist()).values()) / len(true),
        "critic/calibration_error": calibration_error(torch.stack([own[-1] for own in chances]), true),
    }
    for share in QUARTERS:
        scores = torch.stack([own[math.ceil(share / 100 * (len(own) - 1)), PASSED] for own in chances])
        area = area_under_curve(scores, true == PASSED)
        if area is not None:
            found[f"critic/auc_{share}"] = area
    return found


def calibration_error(probabilities: Tensor, true: Tensor) -> float:
    """The expected calibration error of predictions [N, C] for classes [N]: over ten intervals of the probability of
    the predicted class, the distance of its mean from the share that is right, weighted by their number
    (arXiv:1706.04599)."""
    sure, guess = probabilities.max(-1)
    where = (sure * BINS).ceil().clamp(1, BINS).long() - 1
    gap = sure - (guess == true).to(sure)
    return float(torch.zeros(BINS, dtype=gap.dtype).index_add(0, where, gap).abs().sum() / len(true))


def area_under_curve(scores: Tensor, positive: Tensor) -> float | None:
    """The share of pairs of a positive and a negative whose order the scores [N] tell; equal ones count half. None
    without such a pair."""
    above, below = scores[positive], scores[~positive]
    if not len(above) or not len(below):
        return None
    ordered = below.sort().values
    beaten = torch.searchsorted(ordered, above) + torch.searchsorted(ordered, above, right=True)
    return float(beaten.double().sum()) / (2 * len(above) * len(below))


def is_critic(folder: Path) -> bool:
    return (folder / ABOUT).is_file()


def ends_of(tokenizer: Tokenizer | None, ids: Sequence[int], text: str) -> list[int]:
    """[len(ids)] the characters of `text`, a reply, until the end of each of its tokens; special tokens have none."""
    special = set(tokenizer.all_special_ids)
    pieces = ["" if token in special else piece for token, piece in zip(ids, token_pieces(tokenizer, ids))]
    first = next((piece for piece in pieces if piece), "")
    lead = int(first.startswith(" ") and not text.startswith(" "))  # a space that is dropped where a text begins
    return [min(max(end - lead, 0), len(text)) for end in accumulate(map(len, pieces))]


def _about(folder: Path) -> dict[str, int]:
    """What an exported critic says of its head; empty if the folder is none."""
    if not is_critic(folder):
        return {}
    try:
        found = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        known = {"hidden": int(found["hidden"]), "pool_padding": int(found["pool_padding"])}
        if tuple(found["outcomes"]) != OUTCOMES or min(known.values()) < 0:
            raise ValueError(f"outcomes {found['outcomes']!r}")
        return known
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise OperantError(f"{folder / ABOUT} is damaged ({error}): export the critic again") from error
