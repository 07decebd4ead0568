"""Prompts, the keys of their replies, and what an engine says to them."""

import torch
import transformers as t
from toys import lm

from operant.engines.native.engine import NativeEngine
from operant.sampling import task_key

PROMPTS = [[5, 6, 7, 8, 9], [4], [12, 13, 14], [3, 3], [10, 11, 4, 5, 6, 7, 8], [15, 16]] * 4
KEYS = [task_key(0, "train", 3, f"task/{i}") for i in range(len(PROMPTS))]


def replies(policy, sampling, prompts=PROMPTS, keys=KEYS, **options):
    return NativeEngine(policy, **options).generate(prompts, sampling, keys)


def model_of(kind: str, window: int = 5, **more):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    ids = {"vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    match kind:
        case "opt":
            config = t.OPTConfig(ffn_dim=48, word_embed_proj_dim=32, init_std=0.3, **shape, **ids)
            return t.OPTForCausalLM(config).eval()
        case "bloom":  # ALiBi
            known = {"hidden_size": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.3}
            return t.BloomForCausalLM(t.BloomConfig(**known, **ids)).eval()
        case "mistral":  # a sliding window, shorter than the rows
            known = {"intermediate_size": 48, "num_key_value_heads": 1, "initializer_range": 0.3, **shape, **ids}
            return t.MistralForCausalLM(t.MistralConfig(sliding_window=window, **known)).eval()
        case "gpt_neo":  # every second layer sees that many columns
            known = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "initializer_range": 0.3, **ids}
            known |= {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64}
            return t.GPTNeoForCausalLM(t.GPTNeoConfig(window_size=window, **known)).eval()
    return lm(kind, **more)
