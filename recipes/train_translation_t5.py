"""Train a small T5 that translates German into English: `python recipes/train_translation_t5.py --data DIR`.

`DIR` holds Multi30k, task 1: `train.de.gz`, `train.en.gz`, and the same of `val` and `test_2016_flickr`, one sentence a
line. Three steps, each left out if its result exists in `--work`:

1. `train.jsonl`, `val.jsonl`, `test.jsonl`: rows {"prompt", "completion"};
2. `tokenizer`: byte-level BPE of 4,096 entries for both languages, from the training sentences;
3. `t5`: a T5 of 2.9M parameters (width 192, 2 + 2 layers), trained by `operant train sft`, here from Python. Greedy
   BLEU and chrF of its translations of the test sentences are printed at the end. Half an hour on one core.

A run that was stopped continues from its newest checkpoint if started again.
"""

import argparse
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from builtin_tokenizers import save, train_bpe
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

import operant

SPLITS = {"train": "train", "val": "val", "test": "test_2016_flickr"}
END, VOCABULARY, LONGEST = 0, 4096, 64


def sentences(data: Path, split: str, language: str) -> list[str]:
    with gzip.open(data / f"{SPLITS[split]}.{language}.gz", "rt", encoding="utf-8") as file:
        return [" ".join(line.split()) for line in file]


def write_rows(data: Path, work: Path, split: str) -> Path:
    """Write the sentence pairs of a split, unless they are there."""
    path = work / f"{split}.jsonl"
    if not path.is_file():
        pairs = zip(sentences(data, split, "de"), sentences(data, split, "en"), strict=True)
        rows = [json.dumps({"prompt": de, "completion": en}, ensure_ascii=False) + "\n" for de, en in pairs]
        path.write_text("".join(rows), encoding="utf-8")
    return path


def fresh_model(width: int = 192, layers: int = 2) -> T5ForConditionalGeneration:
    """The decoder starts with the token that ends a text. Dropout is 0, because operant trains without it."""
    size: Any = {"d_model": width, "d_kv": width // 4, "d_ff": 4 * width, "num_heads": 4, "num_layers": layers}
    ends: Any = {"pad_token_id": END, "eos_token_id": END, "decoder_start_token_id": END}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, **size, **ends))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data/mt_multi30k"))
    parser.add_argument("--work", type=Path, default=Path("runs/translation"))
    parser.add_argument("--epochs", type=float, default=7)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, help="in place of --epochs")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    rows = {split: write_rows(given.data, given.work, split) for split in SPLITS}
    read = [json.loads(line) for line in rows["train"].read_text(encoding="utf-8").splitlines()]
    if not (given.work / "tokenizer").is_dir():
        tokenizer = train_bpe([text for row in read for text in row.values()], VOCABULARY)
        save(tokenizer, given.work / "tokenizer")
    if not (given.work / "start").is_dir():
        torch.manual_seed(1)
        fresh_model().save_pretrained(given.work / "start")
        AutoTokenizer.from_pretrained(given.work / "tokenizer").save_pretrained(given.work / "start")
    out = given.work / "sft"
    options: Any = {
        "algorithm": "sft",
        "steps": given.steps or int(given.epochs * len(read) / given.batch),
        "batch": given.batch,
        "lr": given.lr,
        "schedule": "cosine",
        "warmup": 0.05,
        "max_tokens": LONGEST,
        "evaluate": str(rows["test"]),
        "evaluation": {"sampling": {"top_k": 1}, "metrics": "bleu,chrf"},
        "checkpoint_minutes": 3,
        "keep": 1,
        "probes": 0,
        "seed": 1,
        "resume": (out / "checkpoints").is_dir(),
    }
    if not (given.work / "t5").is_dir():
        run = operant.train(str(given.work / "start"), str(rows["train"]), out=out, **options)
        if run.interrupted:
            raise SystemExit(f"stopped after step {len(run.metrics)}: the same command goes on from there")
        shutil.copytree(run.path / "export", given.work / "t5")
    print(f"trained: {given.work / 't5'}")


if __name__ == "__main__":
    main()
