"""The numbers of a few steps of PPO through TRL 0.11.4's interface, from TRL itself or from `operant.compat.trl`.

    PYTHON_WITH_TRL tests/parity/trl_ppo_loop.py            # holds the file of numbers beside it to TRL's own code
    PYTHON_WITH_TRL tests/parity/trl_ppo_loop.py --write    # writes that file, which tests/test_compat_trl.py reads

Weights, queries, responses and scores are drawn here, so both sides train the same model on the same replies.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GPT2Config, PreTrainedTokenizerFast, T5Config

FILE = Path(__file__).with_suffix(".json")
VOCABULARY = 24
CASES = {
    "defaults": {},
    "small minibatches": {"mini_batch_size": 2, "init_kl_coef": 0.5, "horizon": 40},
    "accumulated gradients": {"mini_batch_size": 2, "gradient_accumulation_steps": 2},
    "absolute KL, fixed": {"kl_penalty": "abs", "adap_kl_ctrl": False, "gamma": 0.9, "lam": 0.8},
    "squared KL, clipped scores": {"kl_penalty": "mse", "score_clip": 0.5, "cliprange": 0.05, "cliprange_value": 0.1},
    "full KL": {"kl_penalty": "full"},
    "early stop": {"early_stopping": True, "target_kl": 0.001, "vf_coef": 0.5},
    "large ratios": {"ratio_threshold": 0.9},
    "shared layers": {"num_shared_layers": 1},
    "encoder-decoder": {"kind": "t5"},
    "left padding": {"padding_side": "left"},
    "masked responses": {"masked": True},
}


def tokenizer(side: str) -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    ends = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, padding_side=side, **ends)


def model(trl, kind: str):
    if kind == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.1}
        sizes |= {"decoder_start_token_id": 0}
        config = T5Config(vocab_size=VOCABULARY, pad_token_id=0, eos_token_id=1, **sizes)
        wrapped = trl.AutoModelForSeq2SeqLMWithValueHead.from_pretrained(AutoModelForSeq2SeqLM.from_config(config))
    else:
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 1}
        config = GPT2Config(vocab_size=VOCABULARY, **sizes)
        wrapped = trl.AutoModelForCausalLMWithValueHead.from_pretrained(AutoModelForCausalLM.from_config(config))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, p in sorted(wrapped.named_parameters()):
            p.copy_(torch.randn(p.shape, generator=draw) * 0.3 + (p.ndim == 1) * 0.5)
    return wrapped


def run(trl, changes: dict) -> dict[str, list[float]]:
    """Every statistic of two steps that is one number, and sums of the weights and of greedy replies after them."""
    changes = dict(changes)
    kind, side = changes.pop("kind", "gpt2"), changes.pop("padding_side", "right")
    shared, masked = changes.pop("num_shared_layers", None), changes.pop("masked", False)
    options = {"batch_size": 4, "mini_batch_size": 4, "learning_rate": 3e-3, "exp_name": "loop"} | changes
    config = trl.PPOConfig(**options)
    trainer = trl.PPOTrainer(config, model(trl, kind), None, tokenizer(side), num_shared_layers=shared)
    draw = torch.Generator().manual_seed(1)
    pick = lambda low, high, *shape: torch.randint(low, high, shape, generator=draw)  # noqa: E731
    found: dict[str, list[float]] = {}
    for _ in range(2):
        queries = [pick(2, VOCABULARY, int(pick(2, 7))) for _ in range(4)]
        responses = [pick(2, VOCABULARY, int(pick(4, 9))) for _ in range(4)]
        scores = list(torch.randn(4, generator=draw))
        masks = [(torch.arange(len(r)) != 2).long() for r in responses] if masked else None
        for name, value in trainer.step(queries, responses, scores, masks).items():
            if not name.startswith("time/") and getattr(value, "size", 1) == 1:
                found.setdefault(name, []).append(float(value))
    trainer.model.eval()  # after a step TRL generates with dropout, ours without
    replies = trainer.generate(queries, batch_size=3, return_prompt=False, do_sample=False, max_new_tokens=5)
    found["replies"] = [float(token) for reply in replies for token in reply]
    # The gradient of a key's bias is 0 but for rounding, and Adam makes a whole step of it.
    named = [p for name, p in sorted(trainer.model.named_parameters()) if "c_attn.bias" not in name]
    found["weights"] = [float(p.detach().abs().sum()) for p in named]
    return found


def gap(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    """The largest difference, relative for numbers above 1; infinity where the names or counts differ."""
    sizes = [{name: len(numbers) for name, numbers in side.items()} for side in (one, other)]
    if sizes[0] != sizes[1]:
        return float("inf")
    pairs = [pair for name in one for pair in zip(one[name], other[name])]
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs if not (a != a and b != b))


def main() -> int:
    import trl

    warnings.simplefilter("ignore")
    numbers = {name: run(trl, changes) for name, changes in CASES.items()}
    if "--write" in sys.argv:
        FILE.write_text(json.dumps(numbers), encoding="utf-8")
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    worst = {name: gap(numbers[name], kept[name]) for name in CASES}
    print(worst)
    return int(max(worst.values()) > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
