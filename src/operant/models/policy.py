"""The model in training: any causal or encoder-decoder language model of transformers, with or without a value head.

    policy = Policy(AutoModelForCausalLM.from_pretrained("gpt2"), tokenizer, value=ValueOptions())
    out = policy.forward(batch, sampling)     # Outputs, each [B, T]

The output head runs at action positions alone. Which ways of computing hidden states agree is found out at
construction, on three rows (`capabilities.py`).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from operant.models import layout
from operant.models.capabilities import branches_exactly, check_trunk, packs_exactly, probe
from operant.models.choices import Branch, among, branches, chosen
from operant.models.frozen_trunk import Trunk
from operant.models.hidden_states import HiddenStates, Modes
from operant.models.logprobs import score
from operant.models.options import ModelOptions
from operant.models.value_head import ValueHead, ValueOptions
from operant.sampling import Sampling
from operant.types import Batch, OperantError, Outputs

PURE = Sampling()


class Policy(HiddenStates):
    """A transformer that chooses tokens, and optionally values states.

    Raises: OperantError where the model has no output head, or where no way of computing log-probs agrees with itself.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        value: ValueOptions | None = None,
        critic: "Policy | None" = None,
        modes: Modes | None = None,
        options: ModelOptions = ModelOptions(),
    ):
        super().__init__(model, options, modes or Modes())
        self.tokenizer, self.critic = tokenizer, critic
        width = int(self.head.weight.shape[1])
        self.value_options = value
        own = value is not None and critic is None
        self.value_head = ValueHead(width, value).to(self.device, self.numbers) if own else None
        self.version = 0
        self.eval()
        if modes is None:
            self.modes = probe(self)
        if options.train_layers is not None:
            self.trunk = Trunk(model, options)
            check_trunk(self)
        elif options.train_head is not None:
            self.head.requires_grad_(options.train_head)

    @property
    def has_values(self) -> bool:
        return self.value_head is not None or self.critic is not None

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The model's own end-of-sequence ids."""
        given = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        given = self.config.eos_token_id if given is None else given
        if given is None and self.tokenizer is not None:
            given = self.tokenizer.eos_token_id
        ids = () if given is None else tuple(given) if isinstance(given, (list, tuple)) else (int(given),)
        return tuple(token for token in ids if 0 <= token < self.vocabulary)  # a config may name what was cut off

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that an optimizer moves."""
        return [p for p in self.parameters() if p.requires_grad]

    def train(self, mode: bool = True) -> "Policy":
        """Scoring is a function of weights and tokens: dropout stays off whatever is asked."""
        return super().train(False)

    def _apply(self, fn: Any, recurse: bool = True) -> "Policy":
        """To another device or other numbers, where other kernels are."""
        before = (self.device, self.head.weight.dtype)
        super()._apply(fn, recurse)
        if (self.device, self.head.weight.dtype) != before:
            self.modes = replace(self.modes, packed=packs_exactly(self))
        return self

    # --- one forward pass over a batch --------------------------------------------------------------------------------

    def forward(
        self,
        batch: Batch,
        sampling: Sampling = PURE,
        *,
        against: "Policy | None" = None,
        entropy_gradient: bool = False,
    ) -> Outputs:
        """Log-probs, entropy, logsumexp and values at every action of the batch, and with `against` the exact KL.

        Each [B, T], 0 off actions. `logprobs` are those of the distribution that was sampled from (`batch.allowed`),
        `raw_logprobs` the untruncated ones.
        """
        batch = batch.to(self.device)
        held = branches(batch, sampling.terminator) if batch.choices is not None else []
        states, behind = self.branching(batch, held)
        theirs = None
        if against is not None:
            with torch.no_grad():
                theirs = against.branching(against.reading(batch, self), held)
        free, chosen_at = batch.actions & ~batch.chosen, batch.chosen
        spoken = ~chosen_at[batch.actions] if held else slice(None)
        scored = score(
            self.logits,
            states[spoken],
            batch.tokens[free],
            layout.places(batch)[free],
            sampling,
            vocabulary=self.vocabulary,
            allowed=_at_actions(batch, free),
            against=None if theirs is None else (against.logits, theirs[0][spoken]),
            entropy_gradient=entropy_gradient,
        )
        spread = {k: _scatter(v, free) for k, v in scored.items()}
        if held:
            other = None if theirs is None else (against, theirs[1])
            found = self._chosen(batch, held, behind, sampling, other, entropy_gradient)
            spread = {k: x.masked_scatter(chosen_at, found[k].to(x.dtype)) for k, x in spread.items()}
        kl = {k: spread.pop(k) for k in ("reverse", "forward")} if against is not None else None
        if batch.allowed is None:
            spread["raw_logprobs"] = spread["logprobs"]
        return Outputs(**spread, values=self._values(batch, states), kl=kl)

    def _chosen(
        self,
        batch: Batch,
        held: list[Branch],
        behind: Tensor,
        sampling: Sampling,
        other: "tuple[Policy, Tensor] | None",
        entropy_gradient: bool,
    ) -> dict[str, Tensor]:
        """What `score` tells of tokens, of the choices among given replies: named tensors [C]."""
        assert batch.choices is not None  # there are branches
        table = among(self._of_branches(held, behind, sampling), held, batch.choices, sampling)
        theirs = None
        if other is not None:
            with torch.no_grad():
                theirs = among(other[0]._of_branches(held, other[1], sampling), held, batch.choices, sampling)
        found = chosen(table, batch.choices.picked, theirs)
        found["raw_logprobs"] = found["logprobs"]
        return found if entropy_gradient else found | {"entropy": found["entropy"].detach()}

    def _of_branches(self, held: list[Branch], behind: Tensor, sampling: Sampling) -> Tensor:
        """[M] log-probs of the tokens of all options."""
        ids = torch.tensor([token for branch in held for token in branch.ids], device=behind.device)
        plain = sampling.of_options
        return score(self.logits, behind, ids, torch.zeros_like(ids), plain, vocabulary=self.vocabulary)["logprobs"]

    def choice_logprobs(self, batch: Batch, sampling: Sampling = PURE) -> tuple[Tensor, Tensor | None]:
        """Log-probs [C, O] of the options of each choice, -inf where there are fewer; and the values [B, T]."""
        batch = batch.to(self.device)
        assert batch.choices is not None  # asked for by whoever has them
        held = branches(batch, sampling.terminator)
        states, behind = self.branching(batch, held)
        table = among(self._of_branches(held, behind, sampling), held, batch.choices, sampling)
        return table, self._values(batch, states)

    def values(self, batch: Batch) -> Tensor | None:
        """[B, T] the critic's values alone; None without a critic."""
        batch = batch.to(self.device)
        return self._values(batch, self.states(batch) if self.value_head is not None else None)

    def _values(self, batch: Batch, states: Tensor | None) -> Tensor | None:
        if self.critic is not None:
            return self.critic.values(batch)
        return _scatter(self.value_head(states), batch.actions) if self.value_head is not None else None

    def branching(self, batch: Batch, held: list[Branch]) -> tuple[Tensor, Tensor]:
        """`states` [N, D], and those before every token [M, D] of the options that the batch chooses among."""
        if not held:
            states = self.states(batch)
            return states, states[:0]
        for branch in held:
            if (why := self.misfit(branch.column, len(branch.ids))) is not None:
                raise OperantError(f"an option of a choice does not fit: its prompt {why}; shorten one of them")
        return self.with_options(batch, held, branched=not self.encoder_decoder and self._branches())

    def _branches(self) -> bool:
        """Whether rows with branches are computed exactly; tried out the first time that it is asked."""
        if self.modes.branched is None:
            self.modes = replace(self.modes, branched=branches_exactly(self))
        return bool(self.modes.branched)

    def logits(self, states: Tensor) -> Tensor:
        """[N, D] -> [N, V]: the output head and whatever the model does to its logits after it."""
        return self.modes.finish(_project(self.head, states))


def _project(head: nn.Module, states: Tensor) -> Tensor:
    """The output head. On a CPU a few rows times a whole vocabulary are quicker the other way round, by 10 to 40 %."""
    few = 8 <= len(states) <= 48 and states.dtype == torch.float32 and states.device.type == "cpu"
    if few and type(head) is nn.Linear and head.bias is None and not torch.is_grad_enabled():
        return (head.weight @ states.T).T.contiguous()
    return head(states)


def _scatter(x: Tensor, where: Tensor) -> Tensor:
    """[N] -> [B, T], 0 elsewhere."""
    return torch.zeros(where.shape, dtype=x.dtype, device=x.device).masked_scatter(where, x)


def _at_actions(batch: Batch, free: Tensor) -> tuple[Tensor, Tensor] | None:
    """`batch.allowed` at `free` actions alone: elsewhere its pieces are empty, so only the offsets change."""
    if batch.allowed is None:
        return None
    ids, offsets = batch.allowed
    lengths = offsets.diff()[free.flatten().cpu()]
    return ids, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
