"""Soft prompts: trained vectors in front of every prompt of a frozen language model (arXiv:2104.08691).

    attach(model, first_vectors(model, SoftPromptOptions(tokens=8), tokenizer, seed=0))
    policy = Policy(model)              # `policy.virtual`: the 8 ids that begin every row
    save(model, "out")                  # in peft's format: PeftModel.from_pretrained(base, "out") computes the same

A virtual token has an id behind the last one of the embedding, whose lookup alone knows what it means. So positions,
masks, packed rows and caches are those of any row. The ids are put in front where a model's input is made; they are in
no rollout, and the output head does not score them. An encoder-decoder has them in front of its encoder's input; its
decoder has none, as in peft.
"""

from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding as rows_of

from operant.models import adapters
from operant.models.adapters import SoftPromptOptions
from operant.models.safe_loading import LanguageModel, PlainConfig
from operant.storage import hub
from operant.types import OperantError, Tokenizer, require, with_defaults

TENSOR = "prompt_embeddings"
"""peft's name of the vectors in its file."""
TOLERANCE = 1e-3
"""Largest difference, relative to the largest logit, between virtual tokens given by id and as vectors."""


class SoftPrompt(adapters.TrainedPart):
    """The vectors of a soft prompt [n, D], and the ids of its virtual tokens."""

    kind = "PROMPT_TUNING"

    def __init__(self, vectors: Tensor, first: int, base: str | None):
        super().__init__()
        self.vectors = nn.Parameter(vectors)
        self.ids, self.base = list(range(first, first + len(vectors))), base


@torch.no_grad()
def first_vectors(model: LanguageModel, options: SoftPromptOptions, tokenizer: Tokenizer | None, seed: int) -> Tensor:
    """[n, D] the vectors that a new soft prompt begins with."""
    embedding, count = _embedding(model), options.tokens
    if options.text is None:
        words = embedding(torch.arange(embedding.num_embeddings, device=embedding.weight.device))
        drawn = torch.randn(count, words.shape[1], generator=torch.Generator().manual_seed(seed))
        return drawn * float(words.std())
    if tokenizer is None:
        raise OperantError("soft_prompt.text: the policy has no tokenizer; use soft_prompt.init=random")
    ids = tokenizer(options.text, add_special_tokens=False).input_ids
    if not 0 < len(ids) <= count:
        raise OperantError(
            f"soft_prompt.text has {len(ids)} tokens: it needs at least one, and at most the {count} of "
            "soft_prompt.tokens, because a text is not cut silently"
        )
    return embedding(torch.tensor((ids * count)[:count], device=embedding.weight.device))


def attach(model: LanguageModel, vectors: Tensor, base: str | None = None) -> LanguageModel:
    """Freeze the model and put vectors [n, D] in front of its prompts; returns the model.

    It is tried whether the model uses the ids of its input for one embedding alone.
    """
    embedding = _embedding(model)
    why = f"does not fit this {type(model).__name__} of width {embedding.embedding_dim}: is it of another model?"
    require(vectors.shape[1] == embedding.embedding_dim, f"a soft prompt of width {vectors.shape[1]} {why}")
    model.requires_grad_(False)
    embedding.soft_prompt = SoftPrompt(vectors.detach().clone().to(embedding.weight), embedding.num_embeddings, base)
    embedding.forward = MethodType(look_up, embedding)
    if embedding.weight.device.type != "meta":
        _try(model.eval(), embedding)
    return model


def look_up(embedding: Any, input: Tensor) -> Tensor:
    """[B, T, D] the embeddings of ids [B, T]: the model's own, or the vectors of virtual tokens."""
    virtual = input - embedding.num_embeddings
    words = type(embedding).forward(embedding, input.clamp(max=embedding.num_embeddings - 1))
    vectors = rows_of(virtual.clamp(min=0), embedding.soft_prompt.vectors)
    return torch.where(virtual[..., None] < 0, words, vectors.to(words.dtype))


@torch.no_grad()
def _try(model: LanguageModel, embedding: Any) -> None:
    ids = torch.tensor([[*embedding.soft_prompt.ids[:2], 0, 1]], device=embedding.weight.device)
    more = {"decoder_input_ids": ids[:, -1:]} if model.config.is_encoder_decoder else {}
    try:
        by_id, by_vector = model(input_ids=ids, **more).logits, model(inputs_embeds=embedding(ids), **more).logits
        why = "" if (by_id - by_vector).abs().max() <= TOLERANCE * by_vector.abs().max() else "the states differ"
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        why = f"{type(error).__name__}: {str(error)[:120]}"
    what = f"{type(model).__name__} uses token ids for more than one embedding ({why})"
    require(not why, f"{what}, so a soft prompt cannot be put in front of them: train an adapter (lora.rank)")


def _embedding(model: LanguageModel) -> nn.Embedding:
    reads = model.get_encoder() if with_defaults(model.config, PlainConfig).is_encoder_decoder else model
    embedding = with_defaults(reads, LanguageModel).get_input_embeddings()
    if not hasattr(model, "save_pretrained") or not isinstance(embedding, nn.Embedding):
        raise OperantError(
            f"soft_prompt.*: {type(model).__name__} is no model of transformers with an embedding of token ids; leave "
            "them out, or train another model"
        )
    return embedding


def save(model: LanguageModel, folder: Path) -> Path:
    """Write the soft prompt. A model that is built in, or on the Hub, is only named."""
    soft = adapters.find(model, SoftPrompt)
    config = soft.belongs_to() | {
        "peft_type": soft.kind,
        "task_type": "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
        "num_virtual_tokens": len(soft.ids),
        "num_transformer_submodules": 1,
        "token_dim": soft.vectors.shape[1],
        "inference_mode": True,
    }
    unnamed = soft.base is None or hub.found(soft.base) is not None
    return adapters.write(folder, "soft prompt", config, {TENSOR: soft.vectors}, model if unnamed else None)


def attach_saved(model: LanguageModel, folder: Path) -> LanguageModel:
    """Put the soft prompt of a folder in front of its model's prompts; returns the model.

    For encoder-decoders, peft may store as many vectors again for the decoder, which it never reads: they are left out.
    """
    config, tensors = adapters.read(folder, "soft prompt")
    count, vectors = config.get("num_virtual_tokens"), tensors.get(TENSOR)
    if len(tensors) != 1 or vectors is None or vectors.ndim != 2:
        held = ", ".join(sorted(tensors)[:3]) or "nothing"
        raise OperantError(f"{folder / adapters.WEIGHTS} holds {held}, and not {TENSOR} alone: it is no soft prompt")
    if not isinstance(count, int) or not 0 < count <= len(vectors):
        raise OperantError(f"{folder} is damaged: it has {len(vectors)} vectors for num_virtual_tokens={count}")
    return attach(model, vectors[:count], adapters.base_of(folder))
