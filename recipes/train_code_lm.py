"""Train a small model of Python programs from nothing: `python recipes/train_code_lm.py --work build`.

Four steps, each left out if its result exists in `--work`:

1. `train.jsonl`, `held-out.jsonl`: generated problems of `operant.apps.code.generated`, which any seed makes again;
2. `start`: a byte-level BPE tokenizer of 1,024 entries of these texts, and a Llama of 0.6M parameters, or a T5 with
   `--encoder-decoder`, with random weights;
3. `sft`: supervised training on the references by `operant train sft`, here from Python; its export is `code-lm`;
4. pass@1 on the held-out problems, whose compositions training never has: one sample each, and the greedy one.

A run that was stopped continues from its newest checkpoint if started again.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from builtin_tokenizers import save, train_bpe
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import operant
from operant.apps.code.generated import held_out, programs
from operant.tools.cli import main as command

VOCABULARY, CONTEXT, END = 1024, 1024, 0


def fresh_model(encoder_decoder: bool, width: int, layers: int) -> LlamaForCausalLM | T5ForConditionalGeneration:
    """Rotary positions, as a model of this size learns much sooner with them to copy. Dropout is 0 as in training."""
    ends: Any = {"eos_token_id": END, "pad_token_id": END, "vocab_size": VOCABULARY}
    if encoder_decoder:
        ends |= {"decoder_start_token_id": END}
        size: Any = {"d_model": width, "d_kv": width // 4, "d_ff": 3 * width, "num_heads": 4, "num_layers": layers}
        return T5ForConditionalGeneration(T5Config(dropout_rate=0.0, **size, **ends))
    size = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 3 * width}
    ends |= {"bos_token_id": END, "tie_word_embeddings": True, "max_position_embeddings": CONTEXT}
    return LlamaForCausalLM(LlamaConfig(**size, **ends))


def write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Write the rows, unless they are there."""
    if not path.is_file():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("build"))
    parser.add_argument("--rows", type=int, default=60_000, help="problems of training; with fewer the start is weaker")
    parser.add_argument("--held-out", type=int, default=400)
    parser.add_argument("--levels", default="1-3")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--encoder-decoder", action="store_true", help="a T5")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    work = given.work
    work.mkdir(parents=True, exist_ok=True)
    write(work / "train.jsonl", programs(count=given.rows, levels=given.levels, seed=given.seed))
    judged = "-".join(
        str(max(2, int(level))) for level in given.levels.split("-")
    )  # all single operations are trained on
    write(work / "held-out.jsonl", held_out(count=given.held_out, levels=judged, seed=given.seed))
    if not (work / "start").is_dir():
        rows = programs(count=min(given.rows, 8000), levels=given.levels, seed=given.seed)
        tokenizer = train_bpe([text for row in rows for text in (row["prompt"], row["completion"])], VOCABULARY)
        tokenizer.model_max_length = CONTEXT
        save(tokenizer, work / "tokenizer")
        torch.manual_seed(given.seed)
        fresh_model(given.encoder_decoder, given.width, given.layers).save_pretrained(work / "start")
        AutoTokenizer.from_pretrained(work / "tokenizer").save_pretrained(work / "start")
    out = work / "sft"
    options: Any = {
        "algorithm": "sft",
        "form": "code",
        "steps": given.steps,
        "batch": given.batch,
        "lr": given.lr,
        "schedule": "cosine",
        "warmup": 0.03,
        "max_tokens": 100,
        "evaluate": str(work / "held-out.jsonl"),
        "checkpoint_minutes": 3,
        "keep": 1,
        "probes": 0,
        "seed": given.seed,
        "resume": (out / "checkpoints").is_dir(),
    }
    if not (work / "code-lm").is_dir():
        run = operant.train(str(work / "start"), str(work / "train.jsonl"), out=out, **options)
        if run.interrupted:
            raise SystemExit(f"stopped after step {len(run.metrics)}: the same command goes on from there")
        shutil.copytree(run.path / "export", work / "code-lm")
    judged = ["--tasks", str(work / "held-out.jsonl"), "--form", "code", "--reward", "tests", "--max-tokens", "100"]
    for sampling, name in ([], "sampled"), (["--top-k", "1"], "greedy"):
        command(["eval", str(work / "code-lm"), *judged, *sampling, "--out", str(work / f"{name}.json")])


if __name__ == "__main__":
    main()
