"""Train the built-in language model of film reviews with operant's own SFT.

    python recipes/builtin_tokenizers.py --data DIR --work build
    python recipes/train_reviews_lm.py --work build --minutes 90 --compile

A GPT-2 of 5.3M parameters reads windows of 256 tokens from the training reviews, which are in a
new order in every epoch, each ended by `<|endoftext|>`. The loss, the optimizer and the update are
those of an `sft` run; the learning rate is a cosine over the given minutes. Every five minutes the
state is saved, and training continues from there if started again. The newest weights are in
`build/reviews-lm`, a plain transformers folder (bf16); bits per byte on test reviews are printed at the end.
"""

import argparse
import math
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from operant.algorithms import find
from operant.models.policy import Policy
from operant.sampling import Sampling
from operant.training.objective import Objective
from operant.training.optimizer import OptimizerOptions, make_optimizer
from operant.training.update import UpdateOptions, update
from operant.types import Batch

END, CONTEXT = 0, 256


def fresh_model() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=8192,
        n_positions=CONTEXT,
        n_embd=256,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        attn_implementation="eager",  # on CPUs its backward pass is much faster than that of the fused kernel
    )
    return GPT2LMHeadModel(config)


def windows(ids, offsets, rng, rows, width=CONTEXT):
    """Yield batches of windows forever; the reviews are shuffled in every epoch."""
    while True:
        pieces = [np.array([END])]
        for r in rng.permutation(len(offsets) - 1):
            pieces += [ids[offsets[r] : offsets[r + 1]], np.array([END])]
        stream = np.concatenate(pieces).astype(np.int64)
        stream = stream[rng.integers(width) if rng.random() < 0.5 else 0 :]
        cut = stream[: len(stream) // width * width].reshape(-1, width)
        cut = cut[rng.permutation(len(cut))]
        for i in range(0, len(cut) - rows + 1, rows):
            yield torch.from_numpy(cut[i : i + rows])


def as_batch(tokens: torch.Tensor) -> Batch:
    """Return a batch in which every token except the first of each row is an action."""
    actions = torch.ones_like(tokens, dtype=torch.bool)
    actions[:, 0] = False
    rows = torch.arange(len(tokens))
    return Batch(
        tokens=tokens,
        mask=torch.ones_like(actions),
        actions=actions,
        rewards=torch.zeros(tokens.shape),
        turns=torch.where(actions, 0, -1),
        episodes=rows,
        groups=rows,
        bootstrap=torch.zeros(len(tokens)),
    )


def export(model, work: Path) -> None:
    """Write a bf16 folder that `from_pretrained` loads, in one rename."""
    temporary, final = work / "reviews-lm.new", work / "reviews-lm"
    shutil.rmtree(temporary, ignore_errors=True)
    copy = GPT2LMHeadModel(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(temporary)
    shutil.copytree(work / "reviews-lm-tokenizer", temporary, dirs_exist_ok=True)
    (temporary / "model.safetensors").chmod(0o644)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)


@torch.inference_mode()
def bits_per_byte(folder: Path, data: Path, reviews: int) -> float:
    """Bits per byte of the first tokens of each review, after `<|endoftext|>`; no window has text of two reviews."""
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    arrays = np.load(data)
    ids, offsets = arrays["ids"].astype(np.int64), arrays["offsets"]
    bits, size = 0.0, 0
    for r in np.random.default_rng(0).permutation(len(offsets) - 1)[:reviews]:
        text = ids[offsets[r] : offsets[r + 1]]
        for i in range(0, len(text), CONTEXT - 1):
            x = torch.from_numpy(np.concatenate([[END], text[i : i + CONTEXT - 1]]))[None]
            nats = model(input_ids=x, labels=x).loss * (x.shape[1] - 1)
            bits += float(nats) / math.log(2)
        size += len(tokenizer.decode(text).encode())
    return bits / size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("build"))
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--rows", type=int, default=16, help="windows per step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="needs a C++ compiler")
    parser.add_argument("--reviews", type=int, default=2000, help="number of test reviews to measure")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    state_file = args.work / "reviews-lm.pt"
    state = torch.load(state_file, weights_only=False) if state_file.exists() else None
    done, step = (state["seconds"], state["step"]) if state else (0.0, 0)
    data = np.load(args.work / "lm-train.npz")
    batches = windows(data["ids"], data["offsets"], np.random.default_rng([args.seed, step]), args.rows)

    policy = Policy(fresh_model())
    options = OptimizerOptions(lr=args.lr, weight_decay=0.1, betas=(0.9, 0.95))
    optimizer = make_optimizer(policy, options)
    if state:
        policy.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    if args.compile:
        policy.model.transformer.compile(dynamic=False)
    row = find("sft")
    objective = Objective(loss=row.loss, unit=row.unit, per=row.per)
    pieces = UpdateOptions(epochs=1, micro_tokens=args.rows * CONTEXT)
    total, mean, last_save, clock = args.minutes * 60, None, done, time.perf_counter()
    while done < total:
        cosine = 0.5 * (1 + math.cos(math.pi * done / total))
        lr = args.lr * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * cosine)
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            tally, refused = update(
                policy,
                optimizer,
                as_batch(next(batches)),
                objective,
                options=pieces,
                optimizer_options=replace(options, lr=lr),
                sampling=Sampling(),
                seed=args.seed,
                step=step,
            )
        if refused is not None:
            raise SystemExit(f"step {step}: {refused.fault}")
        loss = tally.result()["loss/total"]
        mean = loss if mean is None else 0.98 * mean + 0.02 * loss
        step += 1
        now = time.perf_counter()
        done, clock = done + min(now - clock, 30.0), now  # compiling does not count as training
        if step % 50 == 0:
            seen = step * args.rows * CONTEXT / 1e6
            print(f"step {step} {seen:.2f}M tokens {done / 60:.1f} min loss {mean:.4f}", flush=True)
        if done - last_save > 300 or done >= total:
            last_save = done
            weights = {"model": policy.model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**weights, "seconds": done, "step": step}, state_file.with_suffix(".new"))
            os.replace(state_file.with_suffix(".new"), state_file)
            export(policy.model, args.work)
    measured = bits_per_byte(args.work / "reviews-lm", args.work / "lm-test.npz", args.reviews)
    print(f"{measured:.4f} bits per byte on {args.reviews:,} test reviews", flush=True)


if __name__ == "__main__":
    main()
