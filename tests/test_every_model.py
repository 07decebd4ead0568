"""A tiny random model of each class that transformers has trains with the log-probs it was sampled with, or is refused.

Sizes are set by the names that a config has. A table lists the configs that need something else to be tiny.
"""

import pytest
import torch
import transformers as t
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from operant import OperantError, train

CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
PAIRS = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
PLAIN = {"algorithm": "rloo", "samples": 4, "batch": 8, "max_tokens": 6, "fixed_length": True, "probes": 0, "lr": 1e-3}
TASKS = [[3, 4, 5], [6, 7, 8, 9, 10, 11, 12]]
SIZES = {
    1: "n_group topk_group n_shared_experts mamba_n_groups n_groups",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_key_value_heads num_encoder_attention_heads num_decoder_attention_heads linear_num_value_heads "
    "linear_num_key_heads num_experts_per_tok moe_topk moe_k num_experts_per_token moe_num_experts_per_tok",
    4: "num_experts n_routed_experts num_local_experts moe_num_experts mamba_n_heads",
    8: "rotary_dim state_size mamba_d_state",
    16: "head_dim kv_lora_rank q_lora_rank v_head_dim d_kv linear_key_head_dim linear_value_head_dim mamba_d_head "
    "qk_rope_head_dim qk_nope_head_dim",
    32: "hidden_size n_embd d_model dim_model embed_dim embedding_size emb_dim word_embed_proj_dim conv_dim",
    40: "vocab_size",
    64: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim moe_intermediate_size "
    "shared_expert_intermediate_size dim_ff dff ffn_hidden_size feed_forward_size max_position_embeddings n_positions "
    "max_seq_len",
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OWN = {
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_chunk_size": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "bamba": {"attn_layer_indices": [1], "mamba_chunk_size": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_chunk_size": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
"""What a config needs beside the sizes."""
HYBRIDS = ("qwen3_5", "qwen3_next", "lfm2", "granitemoehybrid", "bamba", "jamba", "falcon_h1", "minimax")


def sized(config):
    """The arguments of a small config of the same class, and of those inside it."""
    known = config.to_dict()
    own = {name: n for n, names in SIZES.items() for name in names.split() if type(known.get(name)) is int}
    if known.get("layer_types"):  # a layer of each kind
        kinds = list(dict.fromkeys(known["layer_types"]))
        own["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        own |= {name: len(own["layer_types"]) for name in ("num_hidden_layers", "n_layer") if name in own}
    own |= {"sliding_window": 5} if type(known.get("sliding_window")) is int else {}
    own |= {"initializer_range": 0.1} if type(known.get("initializer_range")) is float else {}
    inside = {name: getattr(config, name, None) for name in config.sub_configs}
    return own | IDS | {name: type(sub)(**sized(sub)) for name, sub in inside.items() if sub is not None}


def tiny(kind, name):
    """A random model of the class `name`."""
    made, config = getattr(t, name), CONFIG_MAPPING[kind]()
    if name.endswith("ForCausalLM") and made.config_class is not type(config):
        config = config.get_text_config()
    torch.manual_seed(0)
    return made(type(config)(**sized(config) | OWN.get(kind, {}))).eval()


def gap(model):
    """Largest difference, over two steps, between the log-prob of a token in sampling and in the update."""
    score = lambda rollouts: [float(len(set(r.ids))) for r in rollouts]  # noqa: E731
    run = train(model, tasks=TASKS, reward=score, steps=2, quiet=True, **PLAIN)
    return max(metrics["rollout/logprob_gap"] for metrics in run.metrics)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_hybrid_of_attention_and_other_layers_trains(kind):
    assert gap(tiny(kind, CAUSAL[kind])) < 1e-4


@pytest.mark.parametrize(
    ("kind", "why"),
    [("bert", "depends on the tokens after it.*is_decoder"), ("xmod", "cannot read token ids alone.*language")],
)
def test_a_model_that_cannot_continue_a_text_is_refused_before_anything_starts(kind, why):
    with pytest.raises(OperantError, match=why):
        gap(tiny(kind, CAUSAL[kind]))
