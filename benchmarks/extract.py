"""Summaries by choosing a sentence of the abstract: `python -m benchmarks.extract`, hours on two cores.

Protocol, fixed before anything was measured. SciTLDR-A: 1,992 papers to train on, 618 held out (`--data` names the
folder). The policy is `builtin:reviews-lm`, which has read film reviews only; it reads the title, and draws one
sentence of the abstract by the mean log-prob of its tokens (the world `extract`). The reward is ROUGE-1 F against the
best of the paper's references. PPO, 48 steps of 64 papers, KL penalty 0.02 a nat of normalised scores; `shuffled` is
the same with the scores of a step in another order. Sentences of more than 150 tokens, and papers with fewer than two
others, are left out for all, because the model's context is 256 tokens.

Beside it stand, on the same held-out papers: a random sentence, the first and the last one, the one that shares most
words with the title, and the best one. A finished row is not repeated. Writes `benchmarks/results/extract.json`.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.kept import places, restore, whole
from benchmarks.shuffled import in_another_order
from operant import Policy, Rollout, Task, Turn, train
from operant.data import DataOptions, load_tasks
from operant.data.forms import sentences
from operant.models.loading import load_policy
from operant.rewards import resolve

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = places("bench-extract", "extract")
MODEL, LONGEST = "builtin:reviews-lm", 150
KINDS = ("ppo", "shuffled")
rouge = resolve("rouge:rouge1")


def shuffled(rollouts: list[Rollout]) -> list[float]:
    """ROUGE-1 of other papers' sentences."""
    return in_another_order(rollouts, rouge(rollouts))


def rows(data: Path, split: str) -> list[dict[str, Any]]:
    """Papers as rows: title, sentences of the abstract, references."""
    policy: Policy = load_policy(MODEL)
    found = []
    for task in load_tasks(
        str(data / f"scitldr_a_{split}.jsonl.gz"), None, DataOptions(text_field="title", target_field="source,target")
    ):
        known = task.target
        source = known["source"] if isinstance(known["source"], list) else sentences(known["source"])
        some = [one.strip() for one in source if one.strip() and len(policy.tokenizer.encode(one)) <= LONGEST]
        references = known["target"] if isinstance(known["target"], list) else [known["target"]]
        if len(some) > 1 and len(policy.tokenizer.encode(task.prompt)) < 60:
            found.append(
                {"title": str(task.prompt).strip(), "sentences": some, "good": [r.strip() for r in references]}
            )
    return found


def write(data: Path) -> dict[str, Path]:
    """The files of rows of both splits."""
    RUNS.mkdir(parents=True, exist_ok=True)
    files = {split: RUNS / f"{split}.jsonl" for split in ("train", "test")}
    for split, path in files.items():
        if not path.is_file():
            path.write_text("".join(json.dumps(row) + "\n" for row in rows(data, split)), encoding="utf-8")
    return files


def players(test: Path) -> list[dict[str, Any]]:
    """What rules without a model reach."""

    def words(text: str) -> set[str]:
        return set(text.lower().split())

    def score(name: str, pick: Any) -> dict[str, Any]:
        picked = [(row, pick(row)) for row in map(json.loads, test.read_text(encoding="utf-8").splitlines())]
        tasks = [Task(str(i), row["title"], references=tuple(row["good"])) for i, (row, _) in enumerate(picked)]
        rollouts = [Rollout(t, 0, [Turn([1], [1])], [text], "stop") for t, (_, text) in zip(tasks, picked)]
        return {"player": name, **summary([float(s) for s in rouge(rollouts)])}

    def best(row: dict[str, Any]) -> str:
        task = Task("0", row["title"], references=tuple(row["good"]))
        scores = rouge([Rollout(task, 0, [Turn([1], [1])], [one], "stop") for one in row["sentences"]])
        return max(zip(map(float, scores), row["sentences"]))[1]

    chance = Random(0)
    return [
        score("random", lambda row: chance.choice(row["sentences"])),
        score("first", lambda row: row["sentences"][0]),
        score("last", lambda row: row["sentences"][-1]),
        score("title", lambda row: max(row["sentences"], key=lambda one: len(words(one) & words(row["title"])))),
        score("best", best),
    ]


def summary(scores: list[float]) -> dict[str, float]:
    return {
        "rouge1": statistics.mean(scores),
        "error": statistics.stdev(scores) / math.sqrt(len(scores)),
        "papers": len(scores),
    }


def one(kind: str, seed: int, quick: bool) -> dict[str, Any]:
    """One trained player, sampled and with the likeliest sentence, before and after."""
    files = {split: str(RUNS / f"{split}.jsonl") for split in ("train", "test")}
    options: dict[str, Any] = {"env": "extract", "tasks": files["train"], "data.text_field": "title", "seed": seed}
    options |= {"data.target_field": "sentences", "data.reference_field": "good", "max_tokens": LONGEST, "threads": "1"}
    options |= {"steps": 1 if quick else 48, "batch": 4 if quick else 64, "lr": 3e-4, "schedule": "linear"}
    options |= {"score.normalise": True, "kl.coef": 0.02, "epochs": 2, "minibatch": 32, "probes": 0, "quiet": True}
    options |= {
        "evaluate": files["test"],
        "evaluation.sampling": {"temperature": 0.01},
        "data.limit": 4 if quick else None,
    }
    begin = time.process_time()
    run = train(MODEL, reward=rouge if kind == "ppo" else shuffled, out=RUNS / f"{kind}-{seed}", **options)
    whole(run)
    judged = json.loads((run.path / "evaluation.json").read_text(encoding="utf-8"))
    found = {"player": kind, "seed": seed, "seconds": time.process_time() - begin}
    found["curve"] = [m["reward/mean"] for m in run.metrics]
    for when in ("before", "after"):  # the control's own scores are shuffled: these are not
        tasks = {
            task.id: task
            for task in load_tasks(files["test"], None, DataOptions(text_field="title", reference_field="good"))
        }
        replies = judged[when]["replies"]
        rollouts = [Rollout(tasks[r["task"]], 0, [Turn([1], [1])], [r["reply"]], "stop") for r in replies]
        found[when] = summary([float(s) for s in rouge(rollouts)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT / "../shared/data/summ_scitldr")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    parser.add_argument("--quick", action="store_true", help="only check that it runs: tiny runs, no measurement")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "SEED"), help="one row, in this process")
    given = parser.parse_args()
    files = write(given.data)

    def place(row: dict[str, Any]) -> Path:
        return RUNS / f"{row['player']}-{row.get('seed', 0)}.json"

    if given.one:
        found = one(given.one[0], int(given.one[1]), given.quick)
        place(found).write_text(json.dumps(found), encoding="utf-8")
        print({name: value for name, value in found.items() if name != "curve"}, flush=True)
        return
    if given.keep:
        restore(RESULTS, place)
    for row in players(files["test"]):
        place(row).write_text(json.dumps(row), encoding="utf-8")

    def run(job: tuple[str, str]) -> None:
        if not place({"player": job[0], "seed": job[1]}).is_file():
            words = [sys.executable, "-m", "benchmarks.extract", "--data", str(given.data), "--one", *job]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            subprocess.run([*words, *(["--quick"] if given.quick else [])], cwd=ROOT, env=environment, check=True)
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*-*.json"))]
        RESULTS.write_text(json.dumps({"command": "python -m benchmarks.extract", "rows": found}, indent=1) + "\n")

    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(run, [(kind, seed) for seed in given.seeds.split(",") for kind in given.kinds.split(",")]))


if __name__ == "__main__":
    main()
