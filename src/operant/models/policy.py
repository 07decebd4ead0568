"""The model in training: any causal or encoder-decoder language model of transformers, with or without a value head.

    policy = Policy(AutoModelForCausalLM.from_pretrained("gpt2"), tokenizer, value=ValueOptions())
    out = policy.forward(batch, sampling)     # Outputs, each [B, T]

No class knows an architecture. Hidden states are caught where they enter the output head, so the head runs at action
positions alone, and a probe of three rows (`probe.py`) finds out at construction which ways of computing agree.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from operant.models import layout
from operant.models.capabilities import Modes, branches_exactly, check_trunk, packs_exactly, probe
from operant.models.choices import Branch, among, branches, chosen, spelt_out, tree
from operant.models.frozen_trunk import Trunk, find_blocks
from operant.models.logprobs import score
from operant.models.options import ModelOptions, compute_in, plain_attention, recomputing
from operant.models.packing import Packing
from operant.models.value_head import ValueHead, ValueOptions
from operant.sampling import Sampling
from operant.types import Batch, OperantError, Outputs

PURE = Sampling()


class Policy(nn.Module):
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
        super().__init__()
        self.model: Any = compute_in(model, options.precision)
        self.options = options
        self.tokenizer, self.critic = tokenizer, critic
        self.encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
        # transformers guesses padding from ids and warns; here masks come from lengths, and such ids are just ids.
        for module in model.modules():
            if hasattr(module, "warn_if_padding_and_no_attention_mask"):
                module.warn_if_padding_and_no_attention_mask = _say_nothing
        self.head = model.get_output_embeddings()
        if self.head is None:
            raise OperantError(f"{type(model).__name__} has no output head: a policy needs a language-model head")
        self.vocabulary = int(self.head.weight.shape[0])
        width = int(self.head.weight.shape[1])
        self.value_options = value
        own = value is not None and critic is None
        self.value_head = ValueHead(width, value).to(self.device, self.numbers) if own else None
        self.version = 0
        self.eval()
        self.trunk: Trunk | None = None
        self.packing = Packing(model)
        self.modes = modes or probe(self)
        if options.train_layers is not None:
            self.trunk = Trunk(model, options)
            check_trunk(self)
        elif options.train_head is not None:
            self.head.requires_grad_(options.train_head)

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.head.weight.device

    @property
    def numbers(self) -> torch.dtype:
        """What log-probs and values come in: float32, or more where the model is."""
        return torch.promote_types(self.head.weight.dtype, torch.float32)

    @property
    def rounds(self) -> bool:
        """Whether the numbers that compute are so coarse that decoding and scoring differ visibly."""
        return self.head.weight.dtype in (torch.bfloat16, torch.float16)

    @property
    def has_values(self) -> bool:
        return self.value_head is not None or self.critic is not None

    @property
    def context(self) -> int | None:
        """The longest row, in tokens; None where positions have no limit. Of an encoder-decoder: the longest source."""
        return self._positions("encoder" if self.encoder_decoder else None)

    def _positions(self, side: str | None) -> int | None:
        """Positions of a side of an encoder-decoder (some have one number for both), or of the model."""
        text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        names = ([f"max_{side}_position_embeddings"] if side else []) + ["max_position_embeddings"]
        held = next((limit for name in names if (limit := getattr(text, name, None))), None)
        return int(held) if held and held > 0 else None

    def misfit(self, prompt: int, reply: int) -> str | None:
        """Why a prompt and a reply of so many tokens do not fit, as the end of a sentence; None where they do."""
        context, replies = self.context, self._positions("decoder") if self.encoder_decoder else None
        if context is not None and not self.encoder_decoder and prompt + reply > context:
            return (
                f"has {prompt} tokens, and with {reply} of the reply does not fit into the model's context of {context}"
            )
        if context is not None and prompt > context:
            return f"has {prompt} tokens, and the model's encoder reads at most {context}"
        if replies is not None and reply > replies:
            return f"has {reply} tokens in its reply, and the model's decoder writes at most {replies}"
        return None

    def shares_trunk(self, other: "Policy") -> bool:
        """Whether both compute the same below their first trained block, so that one may read the other's states."""
        mine, theirs = self.trunk, other.trunk
        if mine is None or theirs is None or mine.cut != theirs.cut:
            return False
        pairs = zip(mine.stack[0].parameters(), theirs.stack[0].parameters(), strict=False)
        return all(a is b for a, b in pairs)

    def reading(self, batch: Batch, states_of: "Policy") -> Batch:
        """The batch without trunk states that `states_of` has computed, unless this policy would compute the same."""
        known = batch.states is None or self is states_of or self.shares_trunk(states_of)
        return batch if known else batch.with_(states=None)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The model's own end-of-sequence ids."""
        given = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        given = self.config.eos_token_id if given is None else given
        if given is None and self.tokenizer is not None:
            given = self.tokenizer.eos_token_id
        ids = () if given is None else tuple(given) if isinstance(given, (list, tuple)) else (int(given),)
        return tuple(token for token in ids if 0 <= token < self.vocabulary)  # a config may name what was cut off

    @property
    def start_token(self) -> int:
        """What an encoder-decoder's replies begin after."""
        start = self.config.decoder_start_token_id
        if start is None:
            raise OperantError("the encoder-decoder's config has no decoder_start_token_id: set it before training")
        return int(start)

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

    def states(self, batch: Batch) -> Tensor:
        """[N, D] the hidden state before each action, as it enters the output head; rows first."""
        if self._alone(batch):
            return torch.cat([self.states(batch.rows(slice(i, i + 1))) for i in range(len(batch))])
        return self._computed(batch, self._laid(batch))

    def _computed(self, batch: Batch, laid: layout.Laid) -> Tensor:
        """The states that `laid` selects, from one call of the model."""
        with ExitStack() as during:
            caught = during.enter_context(self._catching(laid.select))
            if self.trunk is not None and batch.states is not None:
                kept = layout.kept(batch, laid, encoder_decoder=self.encoder_decoder)
                during.enter_context(self.trunk.starting_from(kept))
            if self.options.gradient_checkpointing and torch.is_grad_enabled():
                during.enter_context(recomputing(self.blocks(), lambda: self._attending(batch, laid)))
            during.enter_context(self._attending(batch, laid))
            self._call(**laid.kwargs, use_cache=False)
        return caught["states"]

    def branching(self, batch: Batch, held: list[Branch]) -> tuple[Tensor, Tensor]:
        """`states` [N, D], and those before every token [M, D] of the options that the batch chooses among."""
        if not held:
            states = self.states(batch)
            return states, states[:0]
        for branch in held:
            if (why := self.misfit(branch.column, len(branch.ids))) is not None:
                raise OperantError(f"an option of a choice does not fit: its prompt {why}; shorten one of them")
        if self.encoder_decoder or not self._branches():
            return self.states(batch), self._spelt_out(batch, held)
        if len(batch) > 1 and not self.modes.padded:
            parts = [self.branching(batch.rows(slice(i, i + 1)), _of_row(held, i)) for i in range(len(batch))]
            return torch.cat([own for own, _ in parts]), torch.cat([behind for _, behind in parts])
        laid = tree(batch, held, self.head.weight.dtype)
        states = self._computed(batch.with_(states=None), laid)
        count = len(states) - sum(len(branch.ids) for branch in held)
        return states[:count], states[count:]

    def _spelt_out(self, batch: Batch, held: list[Branch]) -> Tensor:
        """[M, D] with a row for each option. An encoder reads the prompt that several share once."""
        rows = spelt_out(batch, held)
        if not self.encoder_decoder:
            return self.states(rows)
        laid, prompts = self._laid(rows), {b.row: i for i, b in reversed(list(enumerate(held)))}
        once = [prompts[row] for row in sorted(prompts)]
        which = torch.tensor([sorted(prompts).index(b.row) for b in held], device=self.device)
        ids, mask = laid.kwargs.pop("input_ids"), laid.kwargs["attention_mask"]
        read = self.model.get_encoder()(input_ids=ids[once], attention_mask=mask[once])
        laid.kwargs["encoder_outputs"] = (read[0][which],)
        return self._computed(rows, laid)

    def _branches(self) -> bool:
        """Whether rows with branches are computed exactly; tried out the first time that it is asked."""
        if self.modes.branched is None:
            self.modes = replace(self.modes, branched=branches_exactly(self))
        return bool(self.modes.branched)

    @contextmanager
    def _attending(self, batch: Batch, laid: layout.Laid) -> Iterator[None]:
        """While this lasts, attention is what this layout needs and this machine has faster."""
        with ExitStack() as during:
            # With gradients or without, cut or whole: what is scored before the update is what the update computes.
            width = max(batch.longest, batch.tokens.shape[1])
            during.enter_context(plain_attention(self.head.weight.dtype, self.device, width))
            if laid.rows is not None:
                during.enter_context(self.packing.within(laid.rows.lengths, self.device))
            yield

    @torch.no_grad()
    def trunk_states(self, batch: Batch) -> Tensor:
        """[B, T, D] what the frozen trunk computes of every token, in the layout of the batch; 0 where nothing is read.

        Of an encoder-decoder: the encoder's output at the source, what enters the first trained block at the reply.
        """
        assert self.trunk is not None  # asked for by whoever has looked
        batch = batch.to(self.device).with_(states=None)
        if self._alone(batch):
            rows = [self.trunk_states(batch.rows(slice(i, i + 1)))[0] for i in range(len(batch))]
            wide = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            return nn.functional.pad(wide, (0, 0, 0, batch.tokens.shape[1] - wide.shape[1]))
        laid, source = self._laid(batch), None
        kwargs = laid.kwargs
        if self.encoder_decoder:
            ids, mask = kwargs.pop("input_ids"), kwargs["attention_mask"]
            kwargs["encoder_outputs"] = source = self.model.get_encoder()(input_ids=ids, attention_mask=mask)
        with self._attending(batch, laid):
            hidden = self.trunk.below(lambda: self._call(**kwargs, use_cache=False))
        return layout.spread(batch, hidden, None if source is None else source[0], laid.rows)

    def _laid(self, batch: Batch) -> layout.Laid:
        if self.encoder_decoder:
            return layout.encoder_decoder(batch, self.start_token)
        return layout.end_to_end(batch) if self.packs(batch) else layout.causal(batch)

    def packs(self, batch: Batch) -> bool:
        """Whether the rows of the batch are laid end to end: where that is exact, and enough of it would be padding."""
        return self.modes.packed and batch.choices is None and self.packing.pays(batch.mask)

    def _alone(self, batch: Batch) -> bool:
        """Whether each row has to be computed by itself."""
        return len(batch) > 1 and not self.modes.padded and not self.packs(batch)

    def blocks(self) -> list[nn.ModuleList]:
        """The stacks of blocks: of the decoder, and of an encoder where there is one."""
        stacks = [find_blocks(self.model)]
        if self.encoder_decoder:
            stacks.append(find_blocks(self.model.get_encoder()))
        return stacks

    def logits(self, states: Tensor) -> Tensor:
        """[N, D] -> [N, V]: the output head and whatever the model does to its logits after it."""
        return self.modes.finish(_project(self.head, states))

    def last_states(self, **kwargs: Any) -> tuple[Tensor, Any]:
        """[B, D] the state at the last place of every row, and the cache."""
        with self._catching(lambda hidden: hidden[:, -1]) as caught:
            out = self._call(**kwargs, use_cache=True)
        return caught["states"], getattr(out, "past_key_values", None)

    @contextmanager
    def _catching(self, select: layout.Select) -> Iterator[dict[str, Tensor]]:
        """Take the states on their way into the output head; the head itself is given nothing to do."""
        caught: dict[str, Tensor] = {}

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            caught["states"] = select(args[0])
            return (args[0][:1, :0],)

        handle = self.head.register_forward_pre_hook(hook)
        try:
            yield caught
        finally:
            handle.remove()

    def _call(self, **kwargs: Any) -> Any:
        if self.model.training:  # somebody called model.train() on the inner model
            self.model.eval()
        return self.model(**kwargs)


def _project(head: nn.Module, states: Tensor) -> Tensor:
    """The output head. On a CPU a few rows times a whole vocabulary are quicker the other way round, by 10 to 40 %."""
    few = 8 <= len(states) <= 48 and states.dtype == torch.float32 and states.device.type == "cpu"
    if few and type(head) is nn.Linear and head.bias is None and not torch.is_grad_enabled():
        return (head.weight @ states.T).T.contiguous()
    return head(states)


def _say_nothing(*arguments: Any, **kwargs: Any) -> None:
    pass


def _scatter(x: Tensor, where: Tensor) -> Tensor:
    """[N] -> [B, T], 0 elsewhere."""
    return torch.zeros(where.shape, dtype=x.dtype, device=x.device).masked_scatter(where, x)


def _of_row(held: list[Branch], row: int) -> list[Branch]:
    return [replace(branch, row=0) for branch in held if branch.row == row]


def _at_actions(batch: Batch, free: Tensor) -> tuple[Tensor, Tensor] | None:
    """`batch.allowed` at `free` actions alone: elsewhere its pieces are empty, so only the offsets change."""
    if batch.allowed is None:
        return None
    ids, offsets = batch.allowed
    lengths = offsets.diff()[free.flatten().cpu()]
    return ids, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
