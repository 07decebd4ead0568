"""Train the built-in review sentiment classifier, a BERT of about 1.5M parameters.

    python recipes/builtin_tokenizers.py --data DIR --work build
    python recipes/train_classifier.py --work build --minutes 20 --compile

Every step reads whole reviews (cut at 510 tokens) and random crops of 16 to 62 tokens, so that the
classifier can also judge the short texts an RL run produces. Half of each target is the true label,
half the prediction of a linear bigram model that was not trained on the review (five folds), so that
a crop without an opinion gets a target near one half. 1,000 training reviews are held out.

The learning rate is a cosine over `--minutes` of training time. The state is saved every three
minutes, and training continues from there if started again. The newest weights are in
`build/sentiment`, a plain transformers folder (bf16).
"""

import argparse
import math
import os
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification

PAD, UNK, CLS, SEP, MASK = range(5)
MAX, HELD_OUT, FOLDS, PAIRS = 512, 1000, 5, 1 << 20
SHAPES = {64: 32, 192: 21, 320: 12, 512: 8}  # padded length -> batch size


def config(dropout: float) -> BertConfig:
    return BertConfig(
        vocab_size=8192,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=MAX,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.05,
        pad_token_id=PAD,
        id2label={0: "negative", 1: "positive"},
        label2id={"negative": 0, "positive": 1},
        attn_implementation="eager",  # on CPUs its backward pass is much faster than that of the fused kernel
    )


def linear_teacher(ids, offsets, labels, rng):
    """Running sums, per token, of the evidence from a bigram model that was trained on the other folds."""
    ids = torch.from_numpy(ids.astype(np.int64))
    pairs = 8192 + (torch.roll(ids, 1) * 8191 + ids * 131071) % PAIRS
    pairs[torch.from_numpy(offsets[:-1])] = 8192 + PAIRS  # no pair at a review's start
    fold = torch.from_numpy(rng.integers(0, FOLDS, len(labels)))
    lengths = torch.from_numpy(np.diff(offsets))
    fold_of, evidence = torch.repeat_interleave(fold, lengths), torch.zeros(len(ids))
    for k in range(FOLDS):
        weight = torch.zeros(8192 + PAIRS + 1, 1, requires_grad=True)
        opt = torch.optim.Adagrad([weight], lr=0.05)
        train = np.flatnonzero((fold != k).numpy())
        for _ in range(3):
            for rows in np.array_split(rng.permutation(train), len(train) // 50):
                spans = [crop(offsets, r, rng, 32, MAX) for r in rows]
                index = torch.cat([torch.arange(a, b) for a, b in spans])
                n = torch.tensor([b - a for a, b in spans])
                starts = F.pad(n.cumsum(0)[:-1], (1, 0))
                bags = torch.cat([ids[index], pairs[index]]), torch.cat([starts, starts + n.sum()])
                both = F.embedding_bag(bags[0], weight, bags[1], mode="sum")[:, 0].view(2, -1).sum(0)
                target = torch.from_numpy(labels[rows]).float()
                opt.zero_grad()
                F.binary_cross_entropy_with_logits(both / n.sqrt(), target).backward()
                opt.step()
        mine = fold_of == k
        evidence[mine] = (weight[ids[mine]] + weight[pairs[mine]])[:, 0].detach()
    return np.concatenate([[0.0], evidence.double().cumsum(0).numpy()])


@torch.no_grad()
def context_vectors(ids, size, width, near=5):
    """A unit vector [size, width] for each token from what stands within `near` places of it (PPMI, SVD).

    ids: of all texts in one array. Levy and Goldberg (2014).
    """
    wide, count = ids.astype(np.int64), np.zeros(size * size, np.float32)
    for k in range(1, near + 1):
        count += np.bincount(wide[:-k] * size + wide[k:], minlength=size * size)
    count = torch.from_numpy(count).view(size, size)
    count += count.T.clone()
    total = count.sum(1, keepdim=True) + 1
    ppmi = (count * total.sum() / total / total.T + 1e-9).log_().clamp_(min=0)
    u, s, _ = torch.svd_lowrank(ppmi, q=min(width, size), niter=3)
    return F.pad(F.normalize(u * s.sqrt(), dim=1), (0, max(0, width - size)))


@torch.no_grad()
def warm_start(model, ids, offsets, labels, rows):
    """Initialise word embeddings from their contexts and from how often each label uses them.

    The first layer begins as an average over the text, which is what the classifying position needs.
    """
    size = 8192
    uses = [np.ones(size), np.ones(size)]
    for r in rows:
        np.add.at(uses[labels[r]], np.unique(ids[offsets[r] : offsets[r + 1]]), 1)
    odds = torch.from_numpy(np.log(uses[1] / uses[0])).float()
    table = torch.cat([context_vectors(ids, size, 127), odds[:, None].clamp(-2, 2)], 1) * 0.5
    model.bert.embeddings.word_embeddings.weight[MASK + 1 :] = table[MASK + 1 :]
    attention = model.bert.encoder.layer[0].attention
    for linear in (attention.self.value, attention.output.dense):
        linear.weight.copy_(2 * torch.eye(128))


def crop(offsets, row, rng, low, high):
    """Draw a span of `low` to `high` tokens of a review; a third of the spans start where the review starts."""
    start, end = int(offsets[row]), int(offsets[row + 1])
    n = min(int(rng.integers(low, high + 1)), end - start)
    a = start if rng.random() < 1 / 3 else start + int(rng.integers(0, end - start - n + 1))
    return a, a + n


def pack(ids, spans, width):
    x = np.full((len(spans), width), PAD, np.int64)
    for row, (a, b) in zip(x, spans, strict=True):
        row[: b - a + 2] = [CLS, *ids[a:b], SEP]
    return torch.from_numpy(x)


def labelled_batches(ids, offsets, labels, rows, running, rng, token_dropout=0.1):
    """Yield pairs of batches, one of whole reviews and one of crops, each with its soft targets."""
    widths = np.array(list(SHAPES))
    bucket = widths[np.searchsorted(widths, np.minimum(np.diff(offsets)[rows] + 2, MAX))]

    def finish(chosen, spans, width):
        x = pack(ids, spans, width)
        drop = (torch.rand(x.shape) < token_dropout * torch.rand(len(x), 1) * 2) & (x > MASK)
        n = np.array([b - a for a, b in spans])
        soft = np.array([running[b] - running[a] for a, b in spans]) / np.sqrt(n)
        target = 0.5 * labels[chosen] + 0.5 / (1 + np.exp(-soft))
        return x.masked_fill(drop, MASK), torch.from_numpy(target).float()

    while True:
        batches = []
        for w, size in SHAPES.items():
            pool = rng.permutation(rows[bucket == w])
            batches += [(w, pool[i : i + size]) for i in range(0, len(pool) - size + 1, size)]
        for i in rng.permutation(len(batches)):
            width, whole = batches[i]
            spans = [crop(offsets, r, rng, MAX - 2, MAX - 2) for r in whole]
            other = rng.choice(rows, SHAPES[64], replace=False)
            crops = [crop(offsets, r, rng, 16, 62) for r in other]
            yield finish(whole, spans, width), finish(other, crops, 64)


@torch.inference_mode()
def accuracy(model, ids, offsets, labels, rows, snippet=None):
    """Accuracy and log loss on whole reviews (cut at the context) or on random snippets."""
    model.eval()
    rng, right, loss = np.random.default_rng(7), 0, 0.0
    n = snippet or MAX - 2
    order = rows if snippet else rows[np.argsort(np.diff(offsets)[rows])]
    for i in range(0, len(order), 32):
        part = order[i : i + 32]
        spans = [(offsets[r], min(offsets[r] + n, offsets[r + 1])) for r in part]
        if snippet:
            spans = [crop(offsets, r, rng, n, n) for r in part]
        x = pack(ids, spans, max(b - a for a, b in spans) + 2)
        logits = model(input_ids=x, attention_mask=(x != PAD).long()).logits.float()
        y = torch.from_numpy(labels[part]).long()
        right += int((logits.argmax(1) == y).sum())
        loss += float(F.cross_entropy(logits, y, reduction="sum"))
    model.train()
    return right / len(rows), loss / len(rows)


@torch.inference_mode()
def calibrate(model, ids, offsets, labels, rows) -> float:
    """Scale the logits so that held-out crops of 24 to 48 tokens are predicted best; returns the factor.

    Half of the training targets are a cautious teacher's, so the raw probabilities lie too near one half. One factor
    mends that and changes no label (Guo et al., 2017).
    """
    rng, logits, truth = np.random.default_rng(5), [], []
    for part in np.array_split(np.tile(rows, 3), 30):
        x = pack(ids, [crop(offsets, r, rng, 24, 48) for r in part], 50)
        logits.append(model(input_ids=x, attention_mask=(x != PAD).long()).logits)
        truth.append(torch.from_numpy(labels[part].astype(np.int64)))
    logits, truth = torch.cat(logits), torch.cat(truth)
    factors = [1 + i / 20 for i in range(21)]
    best = min(factors, key=lambda f: float(torch.nn.functional.cross_entropy(f * logits, truth)))
    model.classifier.weight.mul_(best)
    model.classifier.bias.mul_(best)
    return best


def export(model, work: Path) -> None:
    """Write a bf16 folder that `from_pretrained` loads, in one rename."""
    temporary, final = work / "sentiment.new", work / "sentiment"
    shutil.rmtree(temporary, ignore_errors=True)
    copy = BertForSequenceClassification(config(0.0))
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(temporary)
    shutil.copytree(work / "sentiment-tokenizer", temporary, dirs_exist_ok=True)
    (temporary / "model.safetensors").chmod(0o644)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)


def test(work: Path) -> None:
    """Measure the exported bf16 weights on the test split, as the model card reports."""
    model = BertForSequenceClassification.from_pretrained(work / "sentiment", dtype=torch.float32)
    data = np.load(work / "cls-test.npz")
    everything = np.arange(len(data["labels"]))
    for snippet in (None, 32):
        acc, nll = accuracy(model, data["ids"], data["offsets"], data["labels"], everything, snippet)
        print(f"test, {snippet or 'whole'}: {acc:.4f} log loss {nll:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("build"))
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler; twice as fast")
    parser.add_argument(
        "--held-out", type=int, default=HELD_OUT, help="number of training reviews held out for evaluation"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    data = np.load(args.work / "cls-train.npz")
    ids, offsets, labels = data["ids"], data["offsets"], data["labels"]
    shuffled = np.random.default_rng(0).permutation(len(labels))
    held_out, rows = shuffled[: args.held_out], shuffled[args.held_out :]
    state_file = args.work / "classifier.pt"
    state = torch.load(state_file, weights_only=False) if state_file.exists() else None
    done, step = (state["seconds"], state["step"]) if state else (0.0, 0)
    rng = np.random.default_rng(args.seed + step)

    model = BertForSequenceClassification(config(0.1))
    teacher_file = args.work / "classifier-teacher.npy"
    if not teacher_file.exists():
        np.save(teacher_file, linear_teacher(ids, offsets, labels, np.random.default_rng(0)))
    running = np.load(teacher_file)
    n = np.diff(offsets)
    verdict = (running[offsets[1:]] - running[offsets[:-1]]) / np.sqrt(n)
    print(f"linear model on unseen folds: {np.mean((verdict > 0) == labels):.4f}", flush=True)
    batches = labelled_batches(ids, offsets, labels, rows, running, rng)
    opt = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    if state:
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
    else:
        warm_start(model, ids, offsets, labels, rows)

    def label_loss(x, y):
        logits = model(input_ids=x, attention_mask=(x != PAD).long()).logits.float()
        return F.binary_cross_entropy_with_logits(logits[:, 1] - logits[:, 0], y, reduction="sum")

    loss_of = torch.compile(label_loss, dynamic=False) if args.compile else label_loss
    total, mean, last_save, clock = args.minutes * 60, None, done, time.perf_counter()
    model.train()
    while done < total:
        share = done / total
        warm = min(1.0, (step + 1) / 200)
        for group in opt.param_groups:
            group["lr"] = args.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            loss = sum(loss_of(*part) for part in batch) / sum(len(y) for _, y in batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        step += 1
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        now = time.perf_counter()
        done, clock = done + min(now - clock, 30.0), now  # compiling does not count as training
        if step % 100 == 0:
            print(f"step {step} {done / 60:.1f} min loss {mean:.4f}", flush=True)
        if done - last_save > 180 or done >= total:
            last_save = done
            state = {"model": model.state_dict(), "opt": opt.state_dict(), "seconds": done, "step": step}
            torch.save(state, state_file.with_suffix(".new"))
            os.replace(state_file.with_suffix(".new"), state_file)
            export(model, args.work)
            for snippet in (None, 32):
                acc, nll = accuracy(model, ids, offsets, labels, held_out, snippet)
                print(f"  held out, {snippet or 'whole'}: {acc:.4f} log loss {nll:.4f}", flush=True)
            clock = time.perf_counter()
    print(f"logits scaled by {calibrate(model.eval(), ids, offsets, labels, held_out):.2f}", flush=True)
    export(model, args.work)
    test(args.work)


if __name__ == "__main__":
    main()
