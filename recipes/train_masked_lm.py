"""Train a masked language model of film reviews, a BERT of 4.6M parameters, with a tokenizer of its own.

    python recipes/train_masked_lm.py --data DIR --work runs/masked-lm --compile

`DIR` holds `imdb_train.jsonl.gz` and `imdb_test.jsonl.gz`, one `{"text", "label"}` object a line (the Large Movie
Review Dataset; the labels are not used). The script makes, each unless it is there:

1. `sentiment-tokenizer/` and `cls-{train,test}.npz`, by `builtin_tokenizers.py`: a lower-casing WordPiece of 8,192
   entries that has seen the training reviews only;
2. `masked-lm/`, a plain transformers folder (bf16) for `--task-model`. A step reads random spans of the training
   reviews, and predicts a fifth of their tokens, each replaced by `[MASK]`. Token vectors begin as those of their
   contexts (PPMI, SVD), which saves most of the first epochs. The learning rate is a cosine over `--minutes` of
   processor time;
3. `masked-lm.json`: its size, the seconds that it took, and loss and accuracy at masked tokens of test reviews.

The state is saved every two minutes, and training continues from there if started again. The weights are no part of
the package: `benchmarks/few_shot.py` uses the folder as a task model.
"""

import argparse
import json
import math
import os
import shutil
import time
from pathlib import Path

import builtin_tokenizers
import numpy as np
import torch
import torch.nn.functional as F
from train_classifier import MASK, PAD, context_vectors, crop, pack
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

LONGEST = 192
SHAPES = ((32, 64), (64, 32), (LONGEST, 10))  # padded length and rows of a step, in turn
MASKED = 0.2


def prepare(data: Path, work: Path, size: int) -> None:
    """Tokenise the reviews of both splits, with a tokenizer of the training ones."""
    work.mkdir(parents=True, exist_ok=True)
    splits = {split: builtin_tokenizers.read_reviews(data, split) for split in ("train", "test")}
    texts = {split: [builtin_tokenizers.clean(text, " ") for text in rows] for split, (rows, _) in splits.items()}
    tokenizer = builtin_tokenizers.train_wordpiece(texts["train"], size, LONGEST)
    builtin_tokenizers.save(tokenizer, work / "sentiment-tokenizer")
    for split in ("test", "train"):  # the file whose presence says that all is done comes last
        builtin_tokenizers.encode(tokenizer, texts[split], splits[split][1], work / f"cls-{split}.npz")


def fresh_model(size: int) -> BertForMaskedLM:
    config = BertConfig(
        vocab_size=size,
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=LONGEST,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=PAD,
        attn_implementation="eager",  # on CPUs its backward pass is much faster than that of the fused kernel
    )
    return BertForMaskedLM(config)


@torch.no_grad()
def warm_start(model: BertForMaskedLM, ids: np.ndarray) -> None:
    """Begin near a model that predicts a token from the mean of the vectors around it.

    Token vectors are those of their contexts, the first attention is an average, and the output's bias is the logarithm
    of how often each token occurs. Without this, the loss stays at that of single tokens for the first epoch.
    """
    table, head = model.bert.embeddings.word_embeddings.weight, model.cls.predictions
    size, width = table.shape
    table[MASK + 1 :] = context_vectors(ids, size, width)[MASK + 1 :]
    attention = model.bert.encoder.layer[0].attention
    for linear, scale in ((attention.self.value, 2), (attention.output.dense, 2), (head.transform.dense, 1)):
        linear.weight.copy_(scale * torch.eye(width))
    often = torch.from_numpy(np.bincount(ids, minlength=size) + 1.0)
    head.bias.copy_((often / often.sum()).log())


def spans(ids, offsets, rng, width: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [rows, width] of random reviews' random spans, and which of them [rows, width] are to be predicted."""
    drawn = rng.integers(len(offsets) - 1, size=rows)
    x = pack(ids, [crop(offsets, r, rng, width - 2, width - 2) for r in drawn], width)
    return x, torch.from_numpy(rng.random(x.shape) < MASKED) & (x > MASK)


def predicted(model: BertForMaskedLM, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [N, V] at the N hidden tokens; the output head reads no others."""
    states = model.bert(input_ids=x.masked_fill(hidden, MASK), attention_mask=(x != PAD).long())[0]
    return model.cls(states[hidden])


@torch.inference_mode()
def measure(model: BertForMaskedLM, data, batches: int) -> dict[str, float]:
    """Mean loss in nats, and accuracy, at masked tokens of test reviews."""
    rng, loss, right, count = np.random.default_rng(7), 0.0, 0, 0
    for i in range(batches):
        x, hidden = spans(data["ids"], data["offsets"], rng, *SHAPES[i % len(SHAPES)])
        logits, truth = predicted(model, x, hidden).float(), x[hidden]
        loss += float(F.cross_entropy(logits, truth, reduction="sum"))
        right, count = right + int((logits.argmax(-1) == truth).sum()), count + len(truth)
    return {"test_loss": loss / count, "test_accuracy": right / count, "test_tokens": count}


def export(model: BertForMaskedLM, work: Path) -> None:
    """Write a bf16 folder that `from_pretrained` loads, in one rename."""
    temporary, final = work / "masked-lm.new", work / "masked-lm"
    shutil.rmtree(temporary, ignore_errors=True)
    copy = BertForMaskedLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(temporary)
    shutil.copytree(work / "sentiment-tokenizer", temporary, dirs_exist_ok=True)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data/imdb"))
    parser.add_argument("--work", type=Path, default=Path("runs/masked-lm"))
    parser.add_argument("--minutes", type=float, default=18, help="of processor time")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler")
    parser.add_argument("--batches", type=int, default=120, help="batches of test reviews to measure")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)

    if not (given.work / "cls-train.npz").is_file():
        prepare(given.data, given.work, given.vocab)
    data = np.load(given.work / "cls-train.npz")
    ids, offsets = data["ids"], data["offsets"]
    model = fresh_model(len(AutoTokenizer.from_pretrained(given.work / "sentiment-tokenizer")))
    optimizer = torch.optim.AdamW(model.parameters(), given.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    state_file = given.work / "masked-lm.pt"
    seconds, step, tokens = 0.0, 0, 0
    if state_file.is_file():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        seconds, step, tokens = state["seconds"], state["step"], state["tokens"]
    else:
        warm_start(model, ids)
    if given.compile:
        model.bert.compile(dynamic=False)

    total, mean, saved, clock = 60 * given.minutes, None, seconds, time.process_time()
    while seconds < total:
        cosine = 0.5 * (1 + math.cos(math.pi * seconds / total))
        for group in optimizer.param_groups:
            group["lr"] = given.lr * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * cosine)
        # By the step, so that a run that goes on draws what an uninterrupted one would.
        x, hidden = spans(ids, offsets, np.random.default_rng([given.seed, step]), *SHAPES[step % len(SHAPES)])
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            loss = F.cross_entropy(predicted(model, x, hidden).float(), x[hidden])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step, tokens = step + 1, tokens + int((x != PAD).sum())
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        now = time.process_time()
        seconds, clock = seconds + min(now - clock, 30.0), now  # compiling does not count as training
        if step % 50 == 0:
            print(f"step {step} {tokens / 1e6:.2f}M tokens {seconds / 60:.1f} min loss {mean:.4f}", flush=True)
        if seconds - saved > 120 or seconds >= total:
            saved = seconds
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"seconds": seconds, "step": step, "tokens": tokens}, state_file.with_suffix(".new"))
            os.replace(state_file.with_suffix(".new"), state_file)
            export(model, given.work)
            clock = time.process_time()
    parameters, weights = sum(p.numel() for p in model.parameters()), given.work / "masked-lm/model.safetensors"
    found = {"parameters": parameters, "bytes": weights.stat().st_size, "seconds": round(seconds), "steps": step}
    found |= {"tokens": tokens, "vocabulary": model.config.vocab_size}
    trained = BertForMaskedLM.from_pretrained(given.work / "masked-lm", dtype=torch.float32).eval()
    found |= measure(trained, np.load(given.work / "cls-test.npz"), given.batches)
    (given.work / "masked-lm.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
