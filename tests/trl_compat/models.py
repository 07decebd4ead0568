"""Tiny random models under the names that TRL 0.11.4's tests ask the Hub for, in the layout of the Hub's cache.

Their sizes are those of the published ones wherever a test counts parameters or layers.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PretrainedConfig, PreTrainedTokenizerFast

ORGANISATION = "trl-internal-testing"
GPT2 = {"n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 512, "pad_token_id": 1023}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": 1024}
# The test of adapters counts 99,578 parameters, 10,273 of them in the adapter and the head.
NEOX = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 37}
SMALL = {
    **{name: 16 for name in ("d_model", "hidden_size", "n_embd", "word_embed_proj_dim")},
    **{name: 32 for name in ("d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size")},
    **{name: 2 for name in ("num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers", "n_layer")},
    **{name: 2 for name in ("num_hidden_layers", "num_encoder_layers", "num_attention_heads", "n_head", "num_heads")},
    **{name: 2 for name in ("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads")},
    **{name: 2 for name in ("num_encoder_attention_heads", "num_decoder_attention_heads", "num_experts")},
    **{"max_position_embeddings": 128, "n_positions": 128, "max_encoder_position_embeddings": 128},
    **{"max_decoder_position_embeddings": 128, "d_kv": 8, "vocab_size": 1024, "decoder_vocab_size": 1024},
    **{"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 8},
}
"""Sizes by the names that the configurations of transformers have for them; each takes those that it has."""
MORE: dict[str, dict[str, Any]] = {
    "GPTNeoXForCausalLM": {**NEOX, "vocab_size": 1024, "max_position_embeddings": 512},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "CodeGenForCausalLM": {"rotary_dim": 4, "n_head": 4},
    "OPTForCausalLM": {"ffn_dim": 32},
    "GPT2LMHeadModel": GPT2,
    "GPT2Model": GPT2,
    "FSMTForConditionalGeneration": {"langs": ["en", "de"], "src_vocab_size": 1024, "tgt_vocab_size": 1024},
    "LEDForConditionalGeneration": {"attention_window": [4, 4]},
    "MT5ForConditionalGeneration": {"decoder_start_token_id": 0},
    "T5ForConditionalGeneration": {"decoder_start_token_id": 0},
    "LongT5ForConditionalGeneration": {"decoder_start_token_id": 0, "local_radius": 4},
    "SwitchTransformersForConditionalGeneration": {"decoder_start_token_id": 0},
    "MarianMTModel": {"pad_token_id": 1023, "decoder_start_token_id": 1023},
    "PegasusXForConditionalGeneration": {"block_size": 8, "num_global_tokens": 4},
}
NAMES = """CodeGenForCausalLM GPTJForCausalLM GPTNeoForCausalLM GPTNeoXForCausalLM OPTForCausalLM BloomForCausalLM
GPT2LMHeadModel LlamaForCausalLM BartForConditionalGeneration BigBirdPegasusForConditionalGeneration
BlenderbotForConditionalGeneration BlenderbotSmallForConditionalGeneration FSMTForConditionalGeneration
LEDForConditionalGeneration LongT5ForConditionalGeneration M2M100ForConditionalGeneration MarianMTModel
MBartForConditionalGeneration MT5ForConditionalGeneration MvpForConditionalGeneration PegasusForConditionalGeneration
PegasusXForConditionalGeneration PLBartForConditionalGeneration ProphetNetForConditionalGeneration
SwitchTransformersForConditionalGeneration T5ForConditionalGeneration GPT2Model T5Model""".split()
ALIKE = {"CodeGenForCausalLM-sharded", "GPTNeoXForCausalLM-safetensors-sharded", "GPTNeoXForCausalLM-safetensors"}
WITH_VOCABULARY = {
    f"{ORGANISATION}/dummy-GPT2-correct-vocab": "GPT2LMHeadModel",
    f"{ORGANISATION}/tiny-BloomForCausalLM-correct-vocab": "BloomForCausalLM",
    f"{ORGANISATION}/tiny-T5ForConditionalGeneration-correct-vocab": "T5ForConditionalGeneration",
    "gpt2": "GPT2LMHeadModel",
}
# One test counts the tokens of its texts, which are as many as with GPT-2's own vocabulary.
TEXT = [
    "I am a prompt!\nHello there! General Kenobi!",
    "test<response>",
    "This morning I went to the ",
    "this is a test",
    "this is another, longer test",
    "hello world goodbye world",
]


def make_cache(folder: Path) -> None:
    """Fill a cache of the Hub with every model, and tokenizers where a test asks for one."""
    for kind in NAMES:
        for name in [kind, *(x for x in ALIKE if x.startswith(f"{kind}-"))]:
            size = {"max_shard_size": "20KB"} if name.endswith("sharded") else {}
            tiny(kind).save_pretrained(_snapshot(folder, f"{ORGANISATION}/tiny-random-{name}"), **size)
    for name, kind in WITH_VOCABULARY.items():
        model, where = tiny(kind), _snapshot(folder, name)
        model.save_pretrained(where)
        tokenizer(padding="GPT2" not in kind).save_pretrained(where)


def _snapshot(cache: Path, name: str) -> Path:
    root = cache / ("models--" + name.replace("/", "--"))
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("abc", encoding="utf-8")
    return root / "snapshots" / "abc"


def tiny(kind: str) -> Any:
    make = getattr(transformers, kind)
    usual: PretrainedConfig = make.config_class()
    mapped = {usual.attribute_map.get(name, name): value for name, value in SMALL.items()}
    own = {usual.attribute_map.get(name, name): value for name, value in MORE.get(kind, {}).items()}
    config = make.config_class(**{name: value for name, value in mapped.items() if name in vars(usual)} | own)
    torch.manual_seed(0)
    return make(config).eval()


def tokenizer(padding: bool) -> PreTrainedTokenizerFast:
    """Bytes and the words of the tests, as GPT-2 cuts them, whose tokenizer has no padding token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    wanted = trainers.BpeTrainer(vocab_size=480, special_tokens=["<|endoftext|>", "<pad>"], initial_alphabet=alphabet)
    core.train_from_iterator(TEXT * 4, wanted)
    ends = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    ends |= {"pad_token": "<pad>"} if padding else {}
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False, **ends)
