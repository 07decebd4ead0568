"""Which models of transformers can be trained: `python -m benchmarks.architectures [KIND ...]`, ten minutes.

A tiny random model of every causal and encoder-decoder class of the installed transformers takes two steps of PPO. All
configurations are made small by one rule (`SMALL`); a class that the rule does not fit is counted apart. Printed, and
written to `results/architectures.json`: whether it trains, the largest gap between the log-probs of generation and of
training, the seconds of a step, or the sentence of the refusal. A child process tries the classes one after the other,
so that one that crashes or hangs costs itself alone.
"""

import argparse
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "architectures.json"
SECONDS = 150
"""The most for one class."""
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim", "model_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_groups"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("intermediate_size", "d_ff", "d_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk"), 2),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len", "max_target_positions"), 128),
    "rotary_dim": 8,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_chunk_size": 8,
    "vocab_size": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "is_decoder": True,
    "tie_word_embeddings": True,
}
"""The values that a configuration gets for those of its names that stand here."""


def kinds() -> dict[str, str]:
    """Model type -> `causal` or `encoder-decoder`."""
    from transformers.models.auto import modeling_auto as auto

    both = {"causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    both["encoder-decoder"] = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    return {f"{kind}:{name}": kind for kind, names in both.items() for name in names}


def small(config_class: Any) -> Any:
    """A configuration of that class with the values of `SMALL`, its parts (`text_config` and others) too."""
    from transformers import AutoConfig

    usual = config_class()
    values = {name: value for name, value in SMALL.items() if name in vars(usual) or hasattr(config_class, name)}
    values = {name: value for name, value in values.items() if not isinstance(getattr(config_class, name, 0), property)}
    parts = getattr(config_class, "sub_configs", {})
    values |= {name: small(part) for name, part in parts.items() if name in vars(usual) and part is not AutoConfig}
    if "qk_rope_head_dim" in values:  # latent attention: a head has two parts, and all heads have keys of their own
        values |= {"num_key_value_heads": 4}
        values.pop("head_dim", None)
    if usual.is_encoder_decoder:
        values["decoder_start_token_id"] = 2
    return config_class(**values)


def tried(name: str) -> dict[str, Any]:
    """One class: `outcome` is trained, refused (by operant, with its sentence), no small model, or failed."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    import operant

    kind, model_type = name.split(":")
    torch.manual_seed(0)
    try:
        config = small(CONFIG_MAPPING[model_type])
        model = {"causal": AutoModelForCausalLM, "encoder-decoder": AutoModelForSeq2SeqLM}[kind].from_config(config)
        size = sum(weight.numel() for weight in model.parameters())
        if size > 20e6:
            return {"outcome": "no small model", "why": f"{size / 1e6:.0f}M weights by the rule"}
    except Exception as error:
        return {"outcome": "no small model", "why": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    pieces = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(36))]
    core = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )

    def short(rollouts: Any) -> list[float]:
        return [len(set(rollout.ids)) / 6 for rollout in rollouts]

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options = {"steps": 2, "batch": 8, "minibatch": 8, "epochs": 1, "max_tokens": 6, "probes": 0, "lr": 1e-3}
        prompts = ["w1 w2", "w3", "w4 w5 w6 w7"]
        try:
            run = operant.train(
                model, prompts, short, tokenizer=tokenizer, out=Path(folder) / "run", quiet=True, **options
            )
        except operant.OperantError as error:
            return {"outcome": "refused", "why": str(error)[:300]}
        except Exception as error:
            return {"outcome": "failed", "why": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    seconds = (time.perf_counter() - began) / 2
    last = run.metrics[-1]
    refused = sum(metrics["update/refused"] for metrics in run.metrics)
    gap = max(metrics["rollout/logprob_gap"] for metrics in run.metrics)
    outcome = "failed" if refused else "trained"
    return {
        "outcome": outcome,
        "gap": gap,
        "step_s": round(seconds, 2),
        "kl": last.get("kl/per_reply"),
        "weights": size,
    }


def worker() -> None:
    """Try the classes named on stdin, one line each, and print a row of JSON for each."""
    out = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        print(json.dumps({"model": line.strip(), **tried(line.strip())}), file=out, flush=True)


class Child:
    """A process that tries classes, and is replaced if it dies or is silent."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.architectures", "--worker"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def ask(self, name: str, seconds: float) -> dict[str, Any] | None:
        """Its row, or None if the process died or took too long; it has then been killed."""
        try:
            print(name, file=self.process.stdin, flush=True)
            line = self.lines.get(timeout=seconds)
        except (queue.Empty, BrokenPipeError):
            line = ""
        if not line:
            self.process.kill()
            return None
        return json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", help="model types such as gpt2 or t5 [all]; with them nothing is written")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker()
    import transformers

    names = [name for name in kinds() if not args.kinds or name.split(":")[1] in args.kinds]
    if not names:
        raise SystemExit(f"transformers {transformers.__version__} has none of {', '.join(args.kinds)}")
    child, rows = Child(), list[dict[str, Any]]()
    for name in names:
        row = child.ask(name, SECONDS)
        if row is None:
            row, child = {"model": name, "outcome": "failed", "why": "the process died or took too long"}, Child()
        rows.append(row)
        print(json.dumps(row), flush=True)
    child.process.kill()
    print(dict(Counter(row["outcome"] for row in rows)))
    if not args.kinds:
        result = {
            "command": "python -m benchmarks.architectures",
            "transformers": transformers.__version__,
            "rows": rows,
        }
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
