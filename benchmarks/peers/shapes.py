"""Models with random weights and a tokenizer of numbers, for any version of transformers."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast


def language_model(spec: dict):
    """A GPT-2 of the shape, without dropout, in float32; equal weights for equal versions of torch."""
    torch.manual_seed(spec["seed"])
    return GPT2LMHeadModel(configuration(spec["shape"]))


def configuration(shape: dict):
    last = shape["vocab_size"] - 1
    return GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=last, eos_token_id=last)


def tokenizer(vocabulary: int, *, inside: bool = False):
    """A tokenizer with one word per id: `t0 t1 ...`. End and padding are ids behind the vocabulary, which no reply can
    contain, or `inside` it (the last id, and 0)."""
    words = {f"t{i}": i for i in range(vocabulary + (0 if inside else 2))}
    made = Tokenizer(WordLevel(words, unk_token="t1"))
    made.pre_tokenizer = WhitespaceSplit()
    end, pad = (f"t{vocabulary - 1}", "t0") if inside else (f"t{vocabulary}", f"t{vocabulary + 1}")
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, pad_token=pad, padding_side="left")


def trained(parameters) -> int:
    return sum(p.numel() for p in parameters if p.requires_grad)
