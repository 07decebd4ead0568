"""Train the small model of sums and Countdown from nothing: `python recipes/train_maths_lm.py --work build`.

Two steps, each left out if its result exists in `--work`: `start`, a tokenizer of bytes and a Llama of 0.2M parameters
with random weights; and `sft`, supervised training on generated problems that stops early, whose export is `maths-lm`.
What it then solves of held-out ones is printed. A run that was stopped continues from its newest checkpoint if
started again.
"""

import argparse
import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from builtin_tokenizers import save, train_bpe
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import operant
from operant.apps.maths.generated import arithmetic, countdown
from operant.tools.cli import main as command

VOCABULARY, CONTEXT, END = 257, 256, 0
"""Bytes and the end: a tokenizer without merges, so that each digit is a token."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("build"))
    parser.add_argument("--sums", type=int, default=4000, help="problems of addition")
    parser.add_argument("--countdowns", type=int, default=3000, help="problems of Countdown")
    parser.add_argument("--steps", type=int, default=520)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    work = given.work
    work.mkdir(parents=True, exist_ok=True)
    rows = [*arithmetic(count=given.sums, seed=given.seed), *countdown(count=given.countdowns, seed=given.seed)]
    (work / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if not (work / "start").is_dir():
        tokenizer = train_bpe([text for row in rows for text in (row["prompt"], row["completion"])], VOCABULARY)
        tokenizer.model_max_length = CONTEXT
        save(tokenizer, work / "tokenizer")
        torch.manual_seed(given.seed)
        size: Any = {"hidden_size": given.width, "num_hidden_layers": given.layers, "num_attention_heads": 4}
        size |= {"intermediate_size": 3 * given.width, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
        ends: Any = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END, "tie_word_embeddings": True}
        LlamaForCausalLM(LlamaConfig(**size, **ends)).save_pretrained(work / "start")
        AutoTokenizer.from_pretrained(work / "tokenizer").save_pretrained(work / "start")
    out = work / "sft"
    options: Any = {"algorithm": "sft", "steps": given.steps, "batch": given.batch, "lr": given.lr, "seed": given.seed}
    options |= {"schedule": "cosine", "warmup": 0.03, "checkpoint_minutes": 3, "keep": 1, "probes": 0}
    if not (work / "maths-lm").is_dir():
        resumed = (out / "checkpoints").is_dir()
        run = operant.train(str(work / "start"), str(work / "train.jsonl"), out=out, resume=resumed, **options)
        if run.interrupted:
            raise SystemExit(f"stopped after step {len(run.metrics)}: the same command goes on from there")
        shutil.copytree(run.path / "export", work / "maths-lm")
    for tasks, greedy in chain.from_iterable(((name, False), (name, True)) for name in ("arithmetic", "countdown")):
        judged = ["--tasks", f"{tasks}/held-out", "--form", "maths", "--reward", "maths", "--max-tokens", "16"]
        name = f"{tasks}-{'greedy' if greedy else 'sampled'}.json"
        (work / name).unlink(missing_ok=True)
        command(["eval", str(work / "maths-lm"), *judged, *(["--top-k", "1"] * greedy), "--out", str(work / name)])


if __name__ == "__main__":
    main()
