"""A model of four layers, and the run whose memory is planned."""

from toys import letters
from transformers import GPT2Config, GPT2LMHeadModel

SMALL = {"tasks": [[3, 4, 5, 6]] * 8, "reward": len, "batch": 8, "max_tokens": 6, "minibatch": 4, "watch_every": 0}


def four_layers() -> GPT2LMHeadModel:
    shape = {"vocab_size": len(letters()), "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=2)).eval()
