"""Computes the hidden states of a batch: calls a transformers model, and takes the input of its output head.

There is no code for particular architectures. A hook takes the hidden states where they enter the output head, and
leaves the head nothing to compute. `Modes` lists which ways of arranging rows are exact for a model; `capabilities.py`
tries them.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from operant.models import adapters, layout
from operant.models.frozen_trunk import Trunk, find_blocks
from operant.models.kernels import Packing, compute_in, plain_attention
from operant.models.options import ModelOptions, recomputing
from operant.models.safe_loading import LanguageModel, PlainConfig
from operant.types import Batch, OperantError, require, with_defaults

_signature = cache(inspect.signature)


def named_cache(model: nn.Module, kwargs: dict[str, object]) -> dict[str, object]:
    """Arguments of a model whose `past_key_values` have the model's own name: `cache`, from transformers 5.24 on."""
    if "past_key_values" not in kwargs or "cache" not in _signature(type(model).forward).parameters:
        return kwargs
    return {"cache" if name == "past_key_values" else name: value for name, value in kwargs.items()}


def cache_of(out: object) -> Any:
    """The key-value cache of a model's output; None without one."""
    return getattr(out, "cache" if hasattr(out, "cache") else "past_key_values", None)


@dataclass(frozen=True)
class Modes:
    """The ways of computing that are exact for a model. None: not tried yet."""

    padded: bool = True
    """Rows of unequal length side by side, padded on the right."""
    left: bool | None = None
    """Prompts padded on the left."""
    cached: bool | None = None
    """Decoding with a key-value cache."""
    pooled: bool | None = None
    """Decoding in one buffer, where new rows take the place of finished ones."""
    continued: bool | None = None
    """Prompts read from where the keys and values of an earlier call end."""
    packed: bool = False
    """Rows packed end to end."""
    branched: bool | None = None
    """The given replies of a choice (`choices.py`) as branches of one row."""
    branched_on: bool | None = None
    """Such branches, of a prompt that is read from where the keys and values of an earlier call end."""
    finish: Callable[[Tensor], Tensor] = lambda logits: logits
    """The function that the model applies to its logits after the head, such as soft-capping."""

    @property
    def tried(self) -> bool:
        """Whether it is known which ways of decoding are exact."""
        return None not in (self.left, self.cached, self.pooled)


class HiddenStates(nn.Module):
    """A transformers model up to its output head."""

    def __init__(self, model: LanguageModel, options: ModelOptions, modes: Modes):
        super().__init__()
        wrapped = f"{type(model).__name__} is a wrapper of peft's: load_policy(model) makes a policy of what is inside"
        require(not hasattr(model, "get_base_model"), wrapped)
        self.model: Any = compute_in(model, options.precision)
        self.options, self.modes = options, modes
        self.encoder_decoder = with_defaults(model.config, PlainConfig).is_encoder_decoder
        # transformers takes a padding id for padding and warns of a missing mask. Here masks come from lengths.
        for module in model.modules():
            if hasattr(module, "warn_if_padding_and_no_attention_mask"):
                module.warn_if_padding_and_no_attention_mask = lambda *args, **kwargs: None
        self.head = model.get_output_embeddings()
        if self.head is None:
            raise OperantError(f"{type(model).__name__} has no output head: a policy needs a language-model head")
        self.vocabulary = int(self.head.weight.shape[0])
        if self.encoder_decoder:
            _ = self.start_token
        self.trunk: Trunk | None = None
        self.positions: dict[str | None, int | None] = {}
        """Number of positions of the model (None), or of one side of an encoder-decoder; None if there is no limit."""
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        for side in (None, "encoder", "decoder"):  # once, because transformers' configs are slow to ask
            names = ([f"max_{side}_position_embeddings"] if side else []) + ["max_position_embeddings"]
            limit = next((limit for name in names if (limit := getattr(config, name, None))), None)
            self.positions[side] = int(limit) if limit and limit > 0 else None
        rope = with_defaults(config, PlainConfig).rope_parameters or {}
        if rope.get("rope_type") == "longrope":  # beyond these, one long row changes the angles of all rows of its call
            self.positions[None] = min(int(rope["original_max_position_embeddings"]), self.positions[None] or 1 << 60)
        self.packing = Packing(model)
        part = adapters.find(model, adapters.TrainedPart)
        self.virtual = list(part.ids) if part is not None else []
        """The ids of a soft prompt, which begin every row; empty without one."""
        if part is not None:
            options.check_frozen(adapters.PROMPT_ALONE if part.ids else adapters.MLP_ALONE)
        require(not (options.train_head and adapters.adapted(model)), adapters.HEAD_ALONE)
        self.shards: Any = None
        """The `training.sharding.Shards` of a policy that is divided over ranks."""

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """The device of the output head."""
        return self.head.weight.device

    @property
    def numbers(self) -> torch.dtype:
        """The dtype of log-probs and values: float32, or float64 if the model computes in it."""
        return torch.promote_types(self.head.weight.dtype, torch.float32)

    @property
    def rounds(self) -> bool:
        """Whether the weights are of a 16-bit type, so that decoding and scoring differ visibly by rounding."""
        return self.head.weight.dtype in (torch.bfloat16, torch.float16)

    @property
    def context(self) -> int | None:
        """Most tokens of a row (for an encoder-decoder: of a source) behind a soft prompt; None: there is no limit."""
        positions = self.positions["encoder" if self.encoder_decoder else None]
        return positions and positions - len(self.virtual)

    def misfit(self, prompt: int, reply: int) -> str | None:
        """Why a prompt and reply of these lengths do not fit the model, as the end of a sentence; None if they fit."""
        context, replies = self.context, self.positions["decoder"] if self.encoder_decoder else None
        behind = f" behind a soft prompt of {len(self.virtual)}" if self.virtual else ""
        if context is not None and not self.encoder_decoder and prompt + reply > context:
            return (
                f"has {prompt} token{'s' * (prompt != 1)}, and with {reply} of the reply does not fit into the model's "
                f"context of {context}{behind}"
            )
        if context is not None and prompt > context:
            return f"has {prompt} tokens, and the model's encoder reads at most {context}{behind}"
        if replies is not None and reply > replies:
            return f"has {reply} tokens in its reply, and the model's decoder writes at most {replies}"
        return None

    def drop_foreign_states(self, batch: Batch, states_of: "HiddenStates") -> Batch:
        """The batch, without the cached states that `states_of` has computed if this model has another trunk."""
        if batch.states is None or self is states_of:
            return batch
        mine, theirs = self.trunk, states_of.trunk
        if mine is None or theirs is None or mine.cut != theirs.cut:
            return batch.with_(states=None)
        pairs = zip(mine.stack[0].parameters(), theirs.stack[0].parameters(), strict=False)
        return batch if all(a is b for a, b in pairs) else batch.with_(states=None)

    as_reward: str | None = None
    """As in `models.base.PolicyBase`."""

    @property
    def generation(self) -> object:
        """transformers' generation config of the model; None if it has none."""
        return with_defaults(self.model, LanguageModel).generation_config

    @property
    def start_token(self) -> int:
        """The first token that an encoder-decoder's decoder is given. Raises: OperantError if its configs have none."""
        named = (with_defaults(c, PlainConfig).decoder_start_token_id for c in (self.config, self.generation))
        start = next((token for token in named if token is not None), None)
        if start is None:
            raise OperantError(
                f"the encoder-decoder {type(self.model).__name__} has no decoder_start_token_id, with which each reply "
                "begins: add it to its config.json (of T5 the id of the padding token, of BART that of the end token)"
            )
        return int(start)

    def states(self, batch: Batch) -> Tensor:
        """[N, D] the hidden state before each action, as it enters the output head; rows first."""
        if self._row_by_row(batch):
            return torch.cat([self.states(batch.rows(slice(i, i + 1))) for i in range(len(batch))])
        return self.selected_states(batch, self.model_input(batch))

    def selected_states(self, batch: Batch, inputs: layout.ModelInput) -> Tensor:
        """[N, D] the states that `inputs` selects, by one call of the model."""
        cached = None
        if self.trunk is not None and batch.states is not None:
            cached = layout.to_model_layout(batch, inputs, encoder_decoder=self.encoder_decoder)
        anew = partial(self._computing, batch, inputs, cached)
        again = self.options.gradient_checkpointing and torch.is_grad_enabled()
        kept = recomputing(self.blocks(), anew) if again else nullcontext()
        with self.catching(inputs.select) as caught, anew(), kept:
            self.call(**{"use_cache": False} | inputs.kwargs)
        return caught["states"]

    @contextmanager
    def _computing(self, batch: Batch, inputs: layout.ModelInput, cached: Tensor | None = None) -> Iterator[None]:
        """Inside this context, attention stays within packed rows, and the model begins at `cached` trunk states."""
        packed = nullcontext() if inputs.rows is None else self.packing.within(inputs.rows.lengths, self.device)
        trunk = nullcontext() if cached is None else self.trunk.starting_from(cached)
        with self.kernels(batch), packed, trunk:
            yield

    def kernels(self, batch: Batch) -> AbstractContextManager[object]:
        """Inside this context, attention uses the fastest kernel of the machine. It holds for all threads.

        The kernel depends on the width of the whole batch, and not on gradients or micro-batches: scoring before the
        update and the update itself then compute the same numbers.
        """
        return plain_attention(self.head.weight.dtype, self.device, max(batch.longest, batch.tokens.shape[1]))

    @torch.no_grad()
    def trunk_states(self, batch: Batch) -> Tensor:
        """[B, T, D] the hidden states that the frozen trunk computes for every token; 0 at tokens that are not read.

        For an encoder-decoder: the encoder's output at the source, the first trained block's input at the reply.
        """
        batch = batch.to(self.device).with_(states=None)
        if self._row_by_row(batch):
            rows = [self.trunk_states(batch.rows(slice(i, i + 1)))[0] for i in range(len(batch))]
            wide = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            return nn.functional.pad(wide, (0, 0, 0, batch.tokens.shape[1] - wide.shape[1]))
        inputs, source = self.model_input(batch), None
        kwargs = inputs.kwargs
        if self.encoder_decoder:
            kwargs["encoder_outputs"] = source = self.encoded(kwargs.pop("input_ids"), kwargs["attention_mask"])
        with self._computing(batch, inputs):
            hidden = self.trunk.below(lambda: self.call(**kwargs, use_cache=False))
        return layout.to_batch_layout(batch, hidden, None if source is None else source[0], inputs.rows)

    def model_input(self, batch: Batch) -> layout.ModelInput:
        """The arguments that the model is called with for a batch, and which of its states belong to actions."""
        packed, batch = self.packs(batch), layout.in_front(self.virtual, batch)
        if self.encoder_decoder:
            return layout.encoder_decoder(batch, self.start_token)
        return layout.end_to_end(batch) if packed else layout.causal(batch)

    def packs(self, batch: Batch) -> bool:
        """Whether the rows of the batch are packed end to end: if that is exact, and saves enough padding."""
        mask = layout.in_front(self.virtual, batch).mask
        return self.modes.packed and batch.choices is None and self.packing.pays(mask)

    def _row_by_row(self, batch: Batch) -> bool:
        return len(batch) > 1 and not self.modes.padded and not self.packs(batch)

    def blocks(self) -> list[nn.ModuleList]:
        """The stacks of blocks: the decoder's, and the encoder's if the model has one."""
        encoder = [self.model.get_encoder()] if self.encoder_decoder else []
        return [find_blocks(part) for part in (self.model, *encoder)]

    def last_states(self, **kwargs: object) -> tuple[Tensor, Any]:
        """[B, D] the state at the last position of every row, and the key-value cache, unless `use_cache` is false."""
        with self.catching(lambda hidden: hidden[:, -1]) as caught:
            out = self.call(**{"use_cache": True} | kwargs)
        return caught["states"], cache_of(out)

    @contextmanager
    def catching(self, select: layout.Select) -> Iterator[dict[str, Tensor]]:
        """Inside this context, collect `select(states)` [N, D] as they enter the output head, under the key `states`.

        The head is given an empty input, so it computes nothing.
        """
        caught: dict[str, Tensor] = {}

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            caught["states"] = select(args[0])
            return (args[0][:1, :0],)

        handle = self.head.register_forward_pre_hook(hook)
        try:
            yield caught
        finally:
            handle.remove()

    def call(self, **kwargs: object) -> Any:
        """Call the model in evaluation mode."""
        return self._evaluated()(**named_cache(self.model, kwargs))

    def encoded(self, ids: Tensor, mask: Tensor) -> Any:
        """What an encoder-decoder's encoder makes of sources [B, S], in evaluation mode."""
        return self._evaluated().get_encoder()(input_ids=ids, attention_mask=mask)

    def _evaluated(self) -> LanguageModel:
        return self.model.eval() if self.model.training else self.model
