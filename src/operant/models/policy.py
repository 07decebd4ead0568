"""The policy: any causal or encoder-decoder language model of transformers, with or without a value head.

    policy = Policy(AutoModelForCausalLM.from_pretrained("gpt2"), tokenizer, value=ValueOptions())
    out = policy.forward(batch, sampling)     # Outputs, each [B, T]

The output head runs at action positions only. The constructor finds out which ways of computing hidden states are
exact, by trying them on three short rows (`capabilities.py`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from operant.models import layout
from operant.models.capabilities import branches_exactly, check_trunk, packs_exactly, probe
from operant.models.choices import Branch, among, branches, chosen, states_with_options
from operant.models.frozen_trunk import Trunk
from operant.models.hidden_states import HiddenStates, Modes
from operant.models.logprobs import DIVERGENCES, Head, score
from operant.models.options import ModelOptions
from operant.models.safe_loading import LanguageModel, PlainConfig
from operant.models.value_head import ActionValueHead, ValueHead, ValueOptions
from operant.sampling import Sampling
from operant.types import Batch, OperantError, Outputs, Tokenizer, with_defaults

PURE = Sampling()
ReadBranches = Callable[[Batch, list[Branch]], tuple[Tensor, Tensor]]
"""Computes what `Policy.branching` returns."""


class Policy(HiddenStates):
    """A language model that generates tokens, and that may have a value head or a critic network.

    Raises: OperantError if the model has no output head, or if its log-probs cannot be computed exactly.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer | None = None,
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
        self.value_head: ValueHead | None = None
        if value is not None and critic is None:
            made = ActionValueHead(width, value, self.vocabulary) if value.actions else ValueHead(width, value)
            self.value_head = made.to(self.device, self.numbers)
        self.version = 0
        self._twice = False
        self.eval()
        if modes is None:
            self.modes = probe(self)
        if options.train_layers is not None:
            self.trunk = Trunk(model, options)
            check_trunk(self)
        elif options.train_head is not None:
            for p in self.head.parameters(recurse=False):  # an MLP before it stands in it, and is trained by itself
                p.requires_grad_(options.train_head)

    def __repr__(self) -> str:
        whole, trained = (sum(p.numel() for p in weights) for weights in (self.parameters(), self.trainable()))
        critic = "critic network" if self.critic is not None else "value head" if self.has_values else "no critic"
        what = f"{type(self.model).__name__}, {whole:,} parameters, {trained:,} trained, {critic}"
        return f"Policy({what}, {self.device}, version={self.version})"

    @property
    def has_values(self) -> bool:
        """Whether there is a value head or a critic network."""
        return self.value_head is not None or self.critic is not None

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The model's own end-of-sequence ids."""
        first, second = (with_defaults(config, PlainConfig).eos_token_id for config in (self.generation, self.config))
        ids = second if first is None else first
        if ids is None and self.tokenizer is not None:
            ids = self.tokenizer.eos_token_id
        ids = () if ids is None else tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
        return tuple(token for token in ids if 0 <= token < self.vocabulary)  # a vocabulary may have been cut smaller

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that an optimizer changes."""
        return [p for p in self.parameters() if p.requires_grad]

    def train(self, mode: bool = True) -> "Policy":
        """Stay in evaluation mode, without dropout, so that scores depend on weights and tokens only."""
        return super().train(False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Policy":
        """Move to another device or dtype, and try again whether packing is exact with its kernels."""
        before = (self.device, self.head.weight.dtype)
        super()._apply(fn, recurse)
        if (self.device, self.head.weight.dtype) != before:
            self.modes = replace(self.modes, packed=packs_exactly(self))
        return self

    @contextmanager
    def double_backward(self) -> Iterator[None]:
        """Inside this context, gradients of what `forward` returns can be differentiated again, as for Fisher products.

        Attention is unfused, rows are not packed and the vocabulary is scored by torch's own operations, which is
        slower and takes several times the memory. Outside, a second derivative of log-probs is an error.
        """
        modes, self.modes, self._twice = self.modes, replace(self.modes, packed=False), True
        of_critic = nullcontext() if self.critic is None else self.critic.double_backward()
        try:
            with sdpa_kernel(SDPBackend.MATH), of_critic:
                yield
        finally:
            self.modes, self._twice = modes, False

    def forward(
        self,
        batch: Batch,
        sampling: Sampling = PURE,
        *,
        against: "Policy | None" = None,
        divergences: tuple[str, ...] = DIVERGENCES,
        likeliest: int | None = None,
        entropy_gradient: bool = False,
    ) -> Outputs:
        """Compute log-probs, entropy, logsumexp and values at every action of the batch: each [B, T], 0 off actions.

        `against`: another policy, to which the exact `divergences` are computed; it reads the prompts of
        `batch.hinted`, if there are some. `likeliest`: they compare that many likeliest tokens and all others as one
        outcome, but all options of a choice. `entropy_gradient`: whether the entropy has a gradient.
        """
        batch = batch.to(self.device)
        options = branches(batch, sampling.terminator) if batch.choices is not None else []
        states, before_options = self.branching(batch, options)
        theirs = None
        if against is not None:
            read = batch if batch.hinted is None else batch.hinted
            with torch.no_grad():
                known = branches(read, sampling.terminator) if options else []
                theirs = against.branching(against.drop_foreign_states(read, self), known)
        free, chosen_at = batch.actions & ~batch.chosen, batch.chosen
        generated = ~chosen_at[batch.actions] if options else slice(None)
        drawn = states[generated], batch.tokens[free], layout.places(batch)[free]
        allowed = batch.allowed
        if allowed is not None:  # at other tokens its pieces are empty, so only the offsets change
            lengths = allowed[1].diff()[free.flatten().cpu()]
            allowed = allowed[0], torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        scored = score(
            self.guided(sampling),
            *drawn,
            sampling,
            vocabulary=self.vocabulary,
            allowed=allowed,
            against=None if theirs is None else (against.logits, theirs[0][generated]),
            divergences=divergences,
            likeliest=likeliest,
            entropy_gradient=entropy_gradient,
            double_backward=self._twice,
        )
        spread = {k: _scatter(v, free) for k, v in scored.items()}
        if options:
            table, other = self._option_logprobs(batch, options, before_options, sampling), None
            if theirs is not None:
                with torch.no_grad():
                    other = against._option_logprobs(batch, options, theirs[1], sampling)
            found = chosen(table, batch.choices.picked, other, divergences)
            found["raw_logprobs"] = found["logprobs"]
            found["entropy"] = found["entropy"] if entropy_gradient else found["entropy"].detach()
            spread = {k: x.masked_scatter(chosen_at, found[k].to(x.dtype)) for k, x in spread.items()}
        kl = {k: spread.pop(k) for k in divergences} if against is not None else None
        if batch.allowed is None:
            spread["raw_logprobs"] = spread["logprobs"]
        q = None
        if isinstance(self.value_head, ActionValueHead):
            q = {name: _scatter(x, free) for name, x in self.value_head.scored(*drawn).items()}
        return Outputs(**spread, values=self._values(batch, states), kl=kl, q=q)

    def _option_logprobs(self, batch: Batch, options: list[Branch], states: Tensor, sampling: Sampling) -> Tensor:
        """[C, O] log-prob of each option of each choice, -inf beyond a choice's last option."""
        ids = torch.tensor([token for branch in options for token in branch.ids], device=states.device)
        plain = sampling.of_options
        known = {"vocabulary": self.vocabulary, "double_backward": self._twice}
        tokens = score(self.guided(plain), states, ids, torch.zeros_like(ids), plain, **known)
        return among(tokens["logprobs"], options, batch.choices, sampling)

    def choice_logprobs(
        self, batch: Batch, sampling: Sampling = PURE, compute: ReadBranches | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The log-prob of each option of each choice [C, O], -inf beyond a choice's last option; and values [B, T].

        `compute`: another way of computing the states of branches.
        """
        batch = batch.to(self.device)
        options = branches(batch, sampling.terminator)
        states, before_options = self.branching(batch, options, compute)
        return self._option_logprobs(batch, options, before_options, sampling), self._values(batch, states)

    def values(self, batch: Batch) -> Tensor | None:
        """[B, T] the critic's values; None without a critic."""
        batch = batch.to(self.device)
        return self._values(batch, self.states(batch) if self.value_head is not None else None)

    def _values(self, batch: Batch, states: Tensor | None) -> Tensor | None:
        if self.critic is not None:
            return self.critic.values(batch)
        return _scatter(self.value_head(states), batch.actions) if self.value_head is not None else None

    def branching(
        self, batch: Batch, options: list[Branch], compute: ReadBranches | None = None
    ) -> tuple[Tensor, Tensor]:
        """`states` [N, D], and the states before every token of the options in the batch [M, D].

        The first call with options tries whether the model computes them exactly as branches of their row. If it does,
        `compute` takes the place of `states_with_options`.
        Raises: OperantError for an option that does not fit into the model's context.
        """
        if not options:
            return (states := self.states(batch)), states[:0]
        for branch in options:
            if (why := self.misfit(branch.column, len(branch.ids))) is not None:
                raise OperantError(f"an option of a choice does not fit: its prompt {why}; shorten one of them")
        if self.modes.branched is None and not self.encoder_decoder:
            self.modes = replace(self.modes, branched=branches_exactly(self))
        wide = max(batch.tokens.shape[1], *(one.column + len(one.ids) for one in options)) + len(self.virtual)
        branched = bool(self.modes.branched) and not self.encoder_decoder and wide <= (self.packing.window or wide)
        if branched and compute is not None:
            return compute(batch, options)
        return states_with_options(self, batch, options, branched=branched)

    def guided(self, sampling: Sampling) -> Head:
        """[N, D] -> [N, V]: the output head, with `sampling.guidance` times the Q of each token (arXiv:2206.11871,
        equation 9). Their V is the same for all tokens of a state, so it changes no probability.

        Raises: OperantError if there is guidance, and the policy has no Q values.
        """
        head, times = self.value_head, sampling.guidance
        if not times:
            return self.logits
        if not isinstance(head, ActionValueHead):
            raise OperantError(
                f"sampling.guidance={times:g}: the policy has no Q values; train some (algorithm=ilql), or leave it out"
            )
        return lambda states: self.logits(states) + times * head.least(states)

    def logits(self, states: Tensor) -> Tensor:
        """[N, D] -> [N, V]: the output head, and the function that the model applies after it."""
        head = self.head
        if self.rounds and self.options.head_precision == "float32":
            wide = {name: x.float() for name, x in head.state_dict(keep_vars=True).items() if x.is_floating_point()}
            return self.modes.finish(functional_call(head, wide, states.float()))
        few = 8 <= len(states) <= 48 and states.dtype == torch.float32 and states.device.type == "cpu"
        plain = type(head) is nn.Linear and head.bias is None and "forward" not in vars(head)  # as with an `output_mlp`
        if few and plain and not torch.is_grad_enabled():
            # On a CPU, the transposed product is 10 to 40 % quicker for a few rows and a large vocabulary.
            return self.modes.finish((head.weight @ states.T).T.contiguous())
        return self.modes.finish(head(states))


def _scatter(x: Tensor, where: Tensor) -> Tensor:
    return torch.zeros(where.shape, dtype=x.dtype, device=x.device).masked_scatter(where, x)
