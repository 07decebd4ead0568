"""Train the tokenizers of the two built-in models and tokenise the review data once.

    python recipes/builtin_tokenizers.py --data DIR --work build

`DIR` holds `imdb_train.jsonl.gz` and `imdb_test.jsonl.gz`, one `{"text", "label"}` object per line
(the Large Movie Review Dataset; label 1 is positive). The script writes to `--work`:

    reviews-lm-tokenizer/   byte-level BPE, 8,192 entries, `<|endoftext|>` for bos, eos and pad
    sentiment-tokenizer/    lower-casing WordPiece, 8,192 entries
    {lm,cls}-{train,test}.npz   all reviews as one array of token ids, with offsets and labels

Both tokenizers see the train split only. Takes about a minute on two cores.
"""

import argparse
import gzip
import json
import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"


def clean(text: str, breaks: str) -> str:
    """Replace HTML line breaks and collapse runs of spaces."""
    text = re.sub(r"\s*(?:<br\s*/?>\s*)+", breaks, text)
    return re.sub(r"[ \t]+", " ", text).strip()


def read_reviews(data: Path, split: str) -> tuple[list[str], list[int]]:
    with gzip.open(Path(data) / f"imdb_{split}.jsonl.gz", "rt", encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    return [row["text"] for row in rows], [int(row["label"]) for row in rows]


def train_bpe(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def train_wordpiece(texts: list[str], size: int, max_length: int) -> PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tok = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tok.normalizer = normalizers.BertNormalizer(lowercase=True)
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tok.decoder = decoders.WordPiece()
    tok.train_from_iterator(
        texts,
        trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, limit_alphabet=200, show_progress=False),
    )
    tok.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        unk_token="[UNK]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        mask_token="[MASK]",
        model_max_length=max_length,
    )


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save like `save_pretrained`, with a one-line tokenizer.json and a class name that every transformers knows."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    compact = json.dumps(json.loads(path.read_text()), ensure_ascii=False, separators=(",", ":"))
    path.write_text(compact, encoding="utf-8")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config = {k: v for k, v in config.items() if k not in ("backend", "is_local", "local_files_only")}
    path.write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2))


def encode(tokenizer, texts: list[str], labels: list[int], path: Path) -> None:
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    ids = [np.asarray(e.ids, dtype=np.uint16) for e in encodings]
    offsets = np.concatenate([[0], np.cumsum([len(i) for i in ids])]).astype(np.int64)
    np.savez(path, ids=np.concatenate(ids), offsets=offsets, labels=np.asarray(labels, np.int8))
    print(f"{path.name}: {len(ids):,} reviews, {offsets[-1]:,} tokens", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build"))
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--max-length", type=int, default=512, help="maximum number of tokens of the classifier")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)

    splits = {split: read_reviews(args.data, split) for split in ("train", "test")}
    # The language model needs paragraph breaks, the classifier does not.
    for name, breaks in (("cls", " "), ("lm", "\n\n")):
        texts = {s: [clean(t, breaks) for t in rows[0]] for s, rows in splits.items()}
        if name == "lm":
            tokenizer, folder = train_bpe(texts["train"], args.vocab), "reviews-lm-tokenizer"
        else:
            tokenizer = train_wordpiece(texts["train"], args.vocab, args.max_length)
            folder = "sentiment-tokenizer"
        save(tokenizer, args.work / folder)
        for split in splits:
            encode(tokenizer, texts[split], splits[split][1], args.work / f"{name}-{split}.npz")


if __name__ == "__main__":
    main()
