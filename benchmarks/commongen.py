"""A sentence with given words, by a T5 that has learnt to translate: `python -m benchmarks.commongen`, hours.

Protocol, fixed before anything was measured. Tasks: three or four content words (five letters or more, not among the
300 most frequent words) of an English caption of Multi30k, in another order; the caption is the reference. 29,000
captions to train on; 1,000 of `test_2016_flickr`, less those with too few such words, for the table.

- The start is the T5 of `recipes/train_translation_t5.py`, after six processor minutes of cross-entropy on these tasks.
- `ppo`: the recipe `commongen` (coverage plus repeat penalty, normalised scores, KL), `--minutes` of processor time.
- Controls: `sft`, cross-entropy that continues for the same time, and `shuffled`, PPO paid for another reply.
- Measured on held-out words, greedy and sampled: the share of words that occur, the mean repeat penalty, and BLEU
  with the caption.

A finished row is not repeated. Writes `benchmarks/results/commongen.json`; `make docs` writes the table.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.kept import places, restore
from benchmarks.shuffled import in_another_order
from benchmarks.timed import train_for
from operant import Learner, OperantError, Rollout
from operant.data import load_tasks
from operant.data.forms import commongen
from operant.machine import about
from operant.models.loading import export
from operant.rewards import judge, resolve
from operant.runs.evaluate import EvaluationOptions, Evaluator

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = places("bench-commongen", "commongen")
WORK = ROOT / "runs/translation"
START = str(RUNS / "t5")
KINDS = ("ppo", "sft", "shuffled")
COMMON: dict[str, Any] = {"form": "commongen", "steps": 100_000, "probes": 0, "quiet": True, "threads": "1"}
reward = resolve({"coverage": 1.0, "repeat_penalty": 1.0})


def shuffled(rollouts: list[Rollout]) -> list[float]:
    """The rewards of other replies."""
    return in_another_order(rollouts, judge(reward, rollouts).scores)


def write_tasks(quick: bool) -> None:
    """The rows of both splits."""
    rare: set[str] = set()
    for split in ("train", "test"):
        if not (WORK / f"{split}.jsonl").is_file():
            raise OperantError(f"{WORK / split}.jsonl does not exist: run recipes/train_translation_t5.py first")
        captions = [json.loads(line)["completion"] for line in (WORK / f"{split}.jsonl").open(encoding="utf-8")]
        words = [re.findall(r"[a-z]{5,}", caption.lower()) for caption in captions]
        if split == "train":
            counts = Counter(word for of_caption in words for word in of_caption)
            frequent = {word for word, _ in Counter(re.findall(r"[a-z]+", " ".join(captions).lower())).most_common(300)}
            rare = {word for word, count in counts.items() if count > 1} - frequent
        chance, rows = random.Random(0), []
        for caption, found in zip(captions, words):
            some = [word for word in dict.fromkeys(found) if word in rare]
            some = list(dict.fromkeys(caption.split())) if quick else some
            if len(some) >= 3:
                rows.append({"concepts": chance.sample(some, min(len(some), chance.choice((3, 4)))), "target": caption})
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (RUNS / f"{split}.jsonl").write_text(text, encoding="utf-8")


def measured(policy: Any, sentences: int | None) -> dict[str, dict[str, float]]:
    """Sentences for held-out words."""
    learner = Learner(policy, reference=START, algorithm="rloo", max_tokens=30, seed=1, threads="1")
    found = dict[str, dict[str, float]]()
    tasks = load_tasks(str(RUNS / "test.jsonl"), learner.policy.tokenizer, form=commongen)[:sentences]
    for name, sampling in (("sampled", None), ("greedy", {"top_k": 1})):
        options = EvaluationOptions(sampling=sampling, metrics="coverage,repeat_penalty,bleu")
        evaluation = Evaluator(learner, tasks, reward, options)()
        found[name] = {**evaluation.chosen(), "replies": len(evaluation.rollouts)}
        if evaluation.kl is not None:
            found[name]["kl"] = evaluation.kl
    return found


def one(kind: str, seed: int, minutes: float, sentences: int | None) -> dict[str, Any]:
    """One row, in this process."""
    options: dict[str, Any] = {**COMMON, "tasks": str(RUNS / "train.jsonl"), "seed": seed, "max_tokens": 30}
    if kind == "start":
        sft = {"algorithm": "sft", "policy": str(WORK / "t5"), "batch": 64, "lr": 1e-3}
        found, policy = train_for(minutes * 1.5, RUNS / "start", **options, **sft)
        export(policy, RUNS / "t5")
    elif kind == "sft":
        found, policy = train_for(
            minutes, RUNS / f"{kind}-{seed}", **options, algorithm="sft", batch=64, lr=3e-4, policy=START
        )
    else:
        options |= {"recipe": "commongen", "policy": START, "evaluate": None, "schedule": "constant"}
        options |= {"lr": 1e-4, "reward": shuffled if kind == "shuffled" else reward}
        found, policy = train_for(minutes, RUNS / f"{kind}-{seed}", **options)
    return {"player": kind, "seed": seed, **found, "evaluation": measured(policy, sentences)}


def place(row: dict[str, Any]) -> Path:
    return RUNS / f"{row['player']}-{row['seed']}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--sentences", type=int, help="of the test split; all without it")
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    parser.add_argument("--quick", action="store_true", help="only check that it runs: any words will do")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "SEED"), help="one row, in this process")
    given = parser.parse_args()
    RUNS.mkdir(parents=True, exist_ok=True)
    if given.one:
        found = one(given.one[0], int(given.one[1]), given.minutes, given.sentences)
        place(found).write_text(json.dumps(found), encoding="utf-8")
        print(*given.one, json.dumps(found["evaluation"]), flush=True)
        return
    write_tasks(given.quick)
    if given.keep:
        restore(RESULTS, place)
    for kind, seed in [
        ("start", "1"),
        *((kind, seed) for seed in given.seeds.split(",") for kind in given.kinds.split(",")),
    ]:
        made = RUNS / "t5" if kind == "start" else RUNS  # a kept row has left no model
        if not (place({"player": kind, "seed": seed}).is_file() and made.is_dir()):
            words = [sys.executable, "-m", "benchmarks.commongen", "--one", kind, seed, "--minutes", str(given.minutes)]
            words += ["--quick"] * given.quick + (["--sentences", str(given.sentences)] if given.sentences else [])
            environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            subprocess.run(words, cwd=ROOT, env=environment, check=True)
        rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*-*.json"))]
        result = {"command": "python -m benchmarks.commongen", "machine": about(), "minutes": given.minutes}
        RESULTS.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
