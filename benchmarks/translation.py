"""Reinforcement learning of translation, beside cross-entropy: `python -m benchmarks.translation`, hours on two cores.

`recipes/train_translation_t5.py` has trained the start. Protocol, fixed before anything was measured:

- The reward is sentence chrF (0 to 1) of a sampled translation of a training sentence of Multi30k. Every method gets
  `--minutes` of processor time (other work on the machine does not count) on one thread, 64 replies a step, and one
  rate of `RATES`: the one that did best on the validation sentences after a quarter of that time (seed 0), by the mean
  reward of sampled translations less 0.01 times their KL to the start in nats. Methods that charge KL in the reward
  charge that much; all other options are the defaults, but for `ppo-normalised`: a new critic predicts 0, and the mean
  of normalised scores is 0. (The rule counted the reward alone at first. It was changed on
  validation sentences, where it chose a rate at which PPO gained .017 of reward for 6.5 nats and lost 5 BLEU, greedy.)
- `a2c`, `nlpo`, `reinforce` and `trpo` came later: they have the options of `ppo-normalised`, and the rate of `ppo`
  instead of one of their own (of TRPO, it is the critic's).
- Controls: `sft`, which is supervised training that continues for the same seconds, its rate chosen alike; and
  `shuffled`, which is PPO where the reward compares with the reference of another sentence.
- Every row is measured on the 1,000 sentences of `test_2016_flickr`, never seen before: greedy and sampled
  (temperature 1, equal random numbers) BLEU and chrF of the corpus, mean sentence chrF, and of the sampled ones the KL
  to the start in nats a reply.

The start must have 15 BLEU, greedy. A finished row is not repeated. Writes `benchmarks/results/translation.json`;
`make docs` writes the table.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.kept import restore
from benchmarks.timed import train_for
from operant import Learner, OperantError
from operant.data.tasks import DataOptions, load_tasks
from operant.machine import about
from operant.metrics.evaluation import references
from operant.runs.evaluate import EvaluationOptions, Evaluator
from operant.types import Rollout

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = ROOT / "runs/bench-translation", ROOT / "benchmarks/results/translation.json"
WORK = ROOT / "runs/translation"
"""Of the recipe."""
GATE = 15.0
"""BLEU, greedy, of a start that is worth training."""
RATES = (3e-5, 1e-4, 3e-4)
PRICE = 0.01
"""Of a nat."""
CHARGED: dict[str, Any] = {"kl.coef": PRICE}
COMMON: dict[str, Any] = {"batch": 64, "max_tokens": 64, "steps": 100_000, "probes": 0, "quiet": True, "threads": "1"}
NEW = ("a2c", "nlpo", "reinforce", "trpo")
METHODS: dict[str, dict[str, Any]] = {
    "ppo": CHARGED,
    "ppo-normalised": {"score.normalise": True, "kl.coef": 8 * PRICE},  # a chrF has a standard deviation of an eighth
    **{name: {"algorithm": name, "score.normalise": True, "kl.coef": 8 * PRICE} for name in NEW},
    "grpo": {"algorithm": "grpo"},
    "rejection": {"algorithm": "rejection", "samples": 8, "select": "group:1"},
    "shuffled": {**CHARGED, "tasks": "shuffled"},
    "sft": {"algorithm": "sft"},
}
"""The options of each, besides `COMMON`."""
RATE_OF = dict.fromkeys(("shuffled", "ppo-normalised", *NEW), "ppo")
"""Methods that are not tuned: they have the rate of another."""


def chrf(rollouts: list[Rollout]) -> list[float]:
    """Sentence chrF of each reply, 0 to 1."""
    return [metric().sentence_score(r.reply, references(r.task)).score / 100 for r in rollouts]


@cache
def metric() -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF()


def shuffle(rows: Path, to: Path) -> None:
    """Write rows in which every prompt has the completion of another."""
    pairs = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(pairs)
    others = [one | {"completion": other["completion"]} for one, other in zip(pairs, pairs[1:] + pairs[:1])]
    to.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in others), encoding="utf-8")


def measured(policy: Any, split: str, sentences: int | None) -> dict[str, dict[str, float]]:
    """Translate the sentences of a split, sampled and greedy."""
    learner = Learner(policy, reference=str(WORK / "t5"), algorithm="rloo", max_tokens=64, seed=1234, threads="1")
    options, found = DataOptions(reference_field="completion", limit=sentences), dict[str, dict[str, float]]()
    tasks = load_tasks(str(WORK / f"{split}.jsonl"), learner.policy.tokenizer, options)
    for name, sampling in (("sampled", None), ("greedy", {"top_k": 1})):
        evaluation = Evaluator(learner, tasks, chrf, EvaluationOptions(sampling=sampling, metrics="bleu,chrf"))()
        scores = [score for score in evaluation.scores if score is not None]
        found[name] = {
            **evaluation.chosen(),
            "reward": statistics.mean(scores),
            "error": statistics.stdev(scores) / math.sqrt(len(scores)),
            "tokens": statistics.mean(rollout.count for rollout in evaluation.rollouts),
        }
        if sampling is None and evaluation.kl is not None:
            found[name]["kl"] = evaluation.kl
    return found


def train(method: str, seed: int, rate: float, minutes: float) -> tuple[dict[str, Any], Any]:
    """Train for so many minutes; returns what was measured, and the policy."""
    options = {"tasks": "train", **COMMON, **METHODS[method]}
    options |= {"tasks": str(WORK / f"{options['tasks']}.jsonl"), "policy": str(WORK / "t5"), "seed": seed, "lr": rate}
    if options.get("algorithm") != "sft":
        options |= {"reward": chrf, "data.reference_field": "completion"}
    found, policy = train_for(minutes, RUNS / f"{method}-{rate:g}-{seed}", **options)
    return {"rate": rate, **found}, policy


def one(method: str, seed: int, rate: float, minutes: float, sentences: int | None) -> dict[str, Any]:
    """A row. That of seed 0 is measured on the validation sentences."""
    if method == "start":
        return {"evaluation": measured(str(WORK / "t5"), "test", sentences)}
    found, policy = train(method, seed, rate, minutes if seed else minutes / 4)
    return {**found, "evaluation": measured(policy, "test" if seed else "val", sentences)}


def row_file(method: str, seed: int, rate: float | None) -> Path:
    return RUNS / (f"{method}-{seed}.json" if seed else f"{method}-{rate:g}-tuning.json")


def best_rate(method: str) -> float:
    """The rate that did best on the validation sentences."""

    def gain(rate: float) -> float:
        row = row_file(RATE_OF.get(method, method), 0, rate)
        found = json.loads(row.read_text())["evaluation"]["sampled"]
        return found["reward"] - PRICE * found["kl"]

    return max(RATES, key=gain)


def check_start(given: argparse.Namespace) -> None:
    """Raises: OperantError for a start that translates too badly."""
    if not (WORK / "t5").is_dir():
        raise OperantError(f"{WORK / 't5'} does not exist: run recipes/train_translation_t5.py first")
    bleu = json.loads(row_file("start", 1, None).read_text())["evaluation"]["greedy"]["bleu"]
    if bleu < given.gate:
        raise OperantError(f"the start has {bleu:.1f} BLEU, and training begins from {given.gate:g}: train it further")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(METHODS), help="methods and controls, separated by commas")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--sentences", type=int, help="of the split that is translated; all without it")
    parser.add_argument("--gate", type=float, default=GATE)
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    parser.add_argument("--one", nargs=3, metavar=("METHOD", "SEED", "RATE"), help="one row, in this process")
    given = parser.parse_args()
    if given.one:
        method, seed, rate = given.one[0], int(given.one[1]), float(given.one[2])
        row = {"method": method, "seed": seed, **one(method, seed, rate, given.minutes, given.sentences)}
        row_file(method, seed, rate).write_text(json.dumps(row))
        print(method, seed, rate, json.dumps(row["evaluation"]), flush=True)
        return
    RUNS.mkdir(parents=True, exist_ok=True)
    if given.keep:
        restore(RESULTS, lambda row: row_file(row["method"], row["seed"], row.get("rate")))

    def job(method: str, seed: int, rate: float) -> None:
        if not row_file(method, seed, rate).is_file():
            words = [sys.executable, "-m", "benchmarks.translation", "--one", method, str(seed), str(rate)]
            words += ["--minutes", str(given.minutes)]
            words += ["--sentences", str(given.sentences)] if given.sentences else []
            environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            subprocess.run(words, cwd=ROOT, env=environment, check=True)
        rows = [json.loads(path.read_text()) for path in sorted(RUNS.glob("*.json"))]
        result = {"command": "python -m benchmarks.translation", "machine": about(), "minutes": given.minutes}
        RESULTS.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n", encoding="utf-8")

    if not (WORK / "shuffled.jsonl").is_file():
        shuffle(WORK / "train.jsonl", WORK / "shuffled.jsonl")
    job("start", 1, 0.0)
    check_start(given)
    methods = given.only.split(",")
    for seed in map(int, given.seeds.split(",")):
        for method in methods:
            for rate in RATES:
                job(RATE_OF.get(method, method), 0, rate)
            job(method, seed, best_rate(method))


if __name__ == "__main__":
    main()
