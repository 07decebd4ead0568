"""The hidden states of a batch: how a transformers model is called, and what enters its output head.

No class knows an architecture. Hidden states are caught where they enter the output head, which itself is given nothing
to do. `Modes` says which ways of laying out rows agree with the plainest one; `capabilities.py` tries them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from operant.models import layout
from operant.models.choices import Branch, spelt_out, tree
from operant.models.frozen_trunk import Trunk, find_blocks
from operant.models.options import ModelOptions, compute_in, plain_attention, recomputing
from operant.models.packing import Packing
from operant.types import Batch, OperantError


@dataclass(frozen=True)
class Modes:
    """What the probe allows."""

    padded: bool = True
    """Rows of unequal length side by side, padded on the right."""
    left: bool | None = None
    """Prompts padded on the left. None, here and below: not tried yet."""
    cached: bool | None = None
    """Decoding with a key-value cache."""
    pooled: bool | None = None
    """Decoding in one buffer that rows leave and step into."""
    packed: bool = False
    """Rows end to end."""
    branched: bool | None = None
    """Options as branches of their row."""
    finish: Callable[[Tensor], Tensor] = lambda logits: logits
    """What the model does to its logits after the head."""


class HiddenStates(nn.Module):
    """A transformers model up to its output head.

    Raises: OperantError where the model has no output head.
    """

    def __init__(self, model: Any, options: ModelOptions, modes: Modes):
        super().__init__()
        self.model: Any = compute_in(model, options.precision)
        self.options, self.modes = options, modes
        self.encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
        # transformers guesses padding from ids and warns; here masks come from lengths, and such ids are just ids.
        for module in model.modules():
            if hasattr(module, "warn_if_padding_and_no_attention_mask"):
                module.warn_if_padding_and_no_attention_mask = _no_warning
        self.head = model.get_output_embeddings()
        if self.head is None:
            raise OperantError(f"{type(model).__name__} has no output head: a policy needs a language-model head")
        self.vocabulary = int(self.head.weight.shape[0])
        self.trunk: Trunk | None = None
        self.packing = Packing(model)

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
        """Whether the weights are so coarse that decoding and scoring differ visibly."""
        return self.head.weight.dtype in (torch.bfloat16, torch.float16)

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

    def shares_trunk(self, other: "HiddenStates") -> bool:
        """Whether both compute the same below their first trained block, so that one may read the other's states."""
        mine, theirs = self.trunk, other.trunk
        if mine is None or theirs is None or mine.cut != theirs.cut:
            return False
        pairs = zip(mine.stack[0].parameters(), theirs.stack[0].parameters(), strict=False)
        return all(a is b for a, b in pairs)

    def reading(self, batch: Batch, states_of: "HiddenStates") -> Batch:
        """The batch without trunk states that `states_of` has computed, unless this policy would compute the same."""
        known = batch.states is None or self is states_of or self.shares_trunk(states_of)
        return batch if known else batch.with_(states=None)

    @property
    def start_token(self) -> int:
        """What an encoder-decoder's replies begin after."""
        start = self.config.decoder_start_token_id
        if start is None:
            raise OperantError("the encoder-decoder's config has no decoder_start_token_id: set it before training")
        return int(start)

    # --- states of a batch --------------------------------------------------------------------------------------------

    def states(self, batch: Batch) -> Tensor:
        """[N, D] the hidden state before each action, as it enters the output head; rows first."""
        if self._alone(batch):
            return torch.cat([self.states(batch.rows(slice(i, i + 1))) for i in range(len(batch))])
        return self._computed(batch, self.laid(batch))

    def _computed(self, batch: Batch, laid: layout.Laid) -> Tensor:
        """The states that `laid` selects, from one call of the model."""
        with ExitStack() as during:
            caught = during.enter_context(self.catching(laid.select))
            if self.trunk is not None and batch.states is not None:
                kept = layout.kept(batch, laid, encoder_decoder=self.encoder_decoder)
                during.enter_context(self.trunk.starting_from(kept))
            if self.options.gradient_checkpointing and torch.is_grad_enabled():
                during.enter_context(recomputing(self.blocks(), lambda: self._attending(batch, laid)))
            during.enter_context(self._attending(batch, laid))
            self.call(**laid.kwargs, use_cache=False)
        return caught["states"]

    def with_options(self, batch: Batch, options: list[Branch], *, branched: bool) -> tuple[Tensor, Tensor]:
        """`states` [N, D], and those before every token [M, D] of the options that the batch chooses among.

        branched: options grow from their row like branches; otherwise each has a row of its own.
        """
        if not branched:
            return self.states(batch), self._spelt_out(batch, options)
        if len(batch) > 1 and not self.modes.padded:
            rows = [(batch.rows(slice(i, i + 1)), _of_row(options, i)) for i in range(len(batch))]
            parts = [self.with_options(row, own, branched=True) for row, own in rows]
            return torch.cat([states for states, _ in parts]), torch.cat([before for _, before in parts])
        laid = tree(batch, options, self.head.weight.dtype)
        states = self._computed(batch.with_(states=None), laid)
        count = len(states) - sum(len(option.ids) for option in options)
        return states[:count], states[count:]

    def _spelt_out(self, batch: Batch, options: list[Branch]) -> Tensor:
        """[M, D] with a row for each option. An encoder reads the prompt that several share once."""
        rows = spelt_out(batch, options)
        if not self.encoder_decoder:
            return self.states(rows)
        laid, prompts = self.laid(rows), {b.row: i for i, b in reversed(list(enumerate(options)))}
        once = [prompts[row] for row in sorted(prompts)]
        which = torch.tensor([sorted(prompts).index(b.row) for b in options], device=self.device)
        ids, mask = laid.kwargs.pop("input_ids"), laid.kwargs["attention_mask"]
        read = self.model.get_encoder()(input_ids=ids[once], attention_mask=mask[once])
        laid.kwargs["encoder_outputs"] = (read[0][which],)
        return self._computed(rows, laid)

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
        laid, source = self.laid(batch), None
        kwargs = laid.kwargs
        if self.encoder_decoder:
            ids, mask = kwargs.pop("input_ids"), kwargs["attention_mask"]
            kwargs["encoder_outputs"] = source = self.model.get_encoder()(input_ids=ids, attention_mask=mask)
        with self._attending(batch, laid):
            hidden = self.trunk.below(lambda: self.call(**kwargs, use_cache=False))
        return layout.spread(batch, hidden, None if source is None else source[0], laid.rows)

    def laid(self, batch: Batch) -> layout.Laid:
        """The arguments that the model is called with for a batch, and which of its states are the actions'."""
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

    # --- calls of the model -------------------------------------------------------------------------------------------

    def last_states(self, **kwargs: Any) -> tuple[Tensor, Any]:
        """[B, D] the state at the last place of every row, and the cache."""
        with self.catching(lambda hidden: hidden[:, -1]) as caught:
            out = self.call(**kwargs, use_cache=True)
        return caught["states"], getattr(out, "past_key_values", None)

    @contextmanager
    def catching(self, select: layout.Select) -> Iterator[dict[str, Tensor]]:
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

    def call(self, **kwargs: Any) -> Any:
        """Call the model, in evaluation mode."""
        if self.model.training:  # somebody called model.train() on the inner model
            self.model.eval()
        return self.model(**kwargs)


def _no_warning(*arguments: Any, **kwargs: Any) -> None:
    pass


def _of_row(options: list[Branch], row: int) -> list[Branch]:
    return [replace(option, row=0) for option in options if option.row == row]
