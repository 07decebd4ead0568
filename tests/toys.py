"""Tiny random models and a tokenizer of letters, made in milliseconds and the same every time."""

import torch
import transformers as t
from tokenizers import Tokenizer, decoders, models

torch.set_num_threads(1)

WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
GATED = WIDE | {"intermediate_size": 48, "num_key_value_heads": 1}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CAUSAL = ("gpt2", "gpt_neox", "llama", "qwen2")


def lm(kind: str = "gpt2", vocab: int = 20, *, seed: int = 0, spread: float = 0.3, **more):
    """A causal or encoder-decoder model; `spread` is the std of its weights: 0.3 is far from uniform, 0.02 near."""
    torch.manual_seed(seed)
    more = SPECIAL | {"vocab_size": vocab, "initializer_range": spread} | more
    match kind:
        case "gpt2":  # its config has dropout, as that of the published model
            model = t.GPT2LMHeadModel(t.GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2, **more))
        case "gpt_neox":
            model = t.GPTNeoXForCausalLM(t.GPTNeoXConfig(intermediate_size=48, hidden_dropout=0.1, **WIDE, **more))
        case "llama":
            model = t.LlamaForCausalLM(t.LlamaConfig(**GATED | more))
        case "qwen2":
            model = t.Qwen2ForCausalLM(t.Qwen2Config(**GATED, **more))
        case "t5":
            shape = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2}
            shape |= {"num_heads": 2, "tie_word_embeddings": False}
            more["initializer_factor"] = more.pop("initializer_range")
            model = t.T5ForConditionalGeneration(t.T5Config(decoder_start_token_id=0, **shape, **more))
        case "bart":
            shape = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _HALF.items()}
            shape |= {"d_model": 32, "max_position_embeddings": 64, "decoder_start_token_id": 2}
            more = {k: v for k, v in more.items() if k != "initializer_range"} | {"init_std": spread}
            model = t.BartForConditionalGeneration(t.BartConfig(forced_eos_token_id=None, **shape, **more))
    return model.eval()


_HALF = {"layers": 2, "attention_heads": 2, "ffn_dim": 48}
PIECES = ["<pad>", "<s>", "</s>", *" abcdefghijklmnopqrstuvwxyz.!", "the", "d.", "en", "end.a", " b"]


def letters(template: str | None = None) -> t.PreTrainedTokenizerFast:
    """A tokenizer with one token per letter and a few longer ones, some of which overlap: `en`, `d.`, `end.a`."""
    core = Tokenizer(models.Unigram([(p, -float(i > 31) - 1) for i, p in enumerate(PIECES)], unk_id=0))
    core.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return t.PreTrainedTokenizerFast(
        tokenizer_object=core, chat_template=template, clean_up_tokenization_spaces=False, **special
    )


def ids(text: str) -> list[int]:
    """The tokens of letters of a text, without those that begin or end one."""
    return letters()(text, add_special_tokens=False)["input_ids"]


def on_disk(folder, model, tokenizer=None) -> str:
    """Write a model with its tokenizer, or that of letters, into a folder; returns the folder's path."""
    for part in (model, tokenizer or letters()):
        part.save_pretrained(folder)
    return str(folder)


def bare_table(model, prompt, action, temperature: float = 1.0) -> torch.Tensor:
    """[A, V] log-probs before each of `action` by the model's own forward: one row, no padding, no cache, float64."""
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            start = [model.config.decoder_start_token_id, *action[:-1]]
            logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([start])).logits[0]
        else:
            logits = model(torch.tensor([prompt + action])).logits[0, len(prompt) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1)


def bare_logprobs(model, prompt, action, temperature: float = 1.0) -> torch.Tensor:
    """[A] log-probs of `action`, as `bare_table`."""
    return bare_table(model, prompt, action, temperature).gather(-1, torch.tensor(action)[:, None]).squeeze(-1)


def says(model, prompt, turn, temperature: float = 1.0, atol: float = 1e-4) -> bool:
    """Whether the log-probs of a turn, or of a completion, are those of `bare_logprobs`."""
    truth = bare_logprobs(model, prompt, turn.action, temperature)
    return torch.allclose(torch.tensor(turn.logprobs, dtype=torch.float64), truth, atol=atol)
