"""The reward `intent` with a classifier of topics: `python -m benchmarks.dialog_intents`, an hour of processor time.

DailyDialog's acts are not at hand, its topics are: so the classifier that judges replies knows ten topics, and a reply
is right if it has the topic of its dialogue. Protocol, fixed before anything was measured:

- 2,624 dialogues (`--data` names the file), of which every fifth is held out.
- The classifier is `builtin:sentiment` with a new head, trained for five epochs on utterances and their dialogue's
  topic. Its accuracy on utterances that are held out stands beside that of the most frequent topic.
- The start is `builtin:reviews-lm` after 300 steps of cross-entropy on 64 replies each (recipe `dialog`, `sft`).
- `ppo`: 48 steps of 64 replies, reward `{intent: 0.5, rouge: 0.5}` as RL4LMs' sum of intent and an overlap, KL
  penalty .1 a nat; `shuffled`: the same, paid for other replies. Three seeds.
- The openings of 128 held-out dialogues, two to five utterances, are continued before and after.

A finished row is not repeated. Writes `benchmarks/results/dialog-intents.json`.
"""

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.kept import places, restore, whole
from benchmarks.shuffled import in_another_order
from operant import Rollout, train
from operant.machine import about
from operant.models.loading import export
from operant.rewards import judge, resolve
from operant.storage.hub import BUILTIN

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = places("bench-dialog", "dialog-intents")
CLASSIFIER, START = RUNS / "classifier", RUNS / "start-lm"
TOPICS = (
    "ordinary life,school,culture and education,attitude and emotion,relationship,tourism,health,work,politics,finance"
).split(",")
TRUNK = BUILTIN / "sentiment"
KINDS = ("ppo", "shuffled")
LONGEST = 48


def write_dialogues(data: Path) -> None:
    """Dialogues with the names of their topics."""
    with gzip.open(data, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    for split in ("train", "test"):
        some = [row for i, row in enumerate(rows) if (i % 5 == 0) == (split == "test")]
        named = [{"topic": TOPICS[row["topic"] - 1], "turns": row["turns"]} for row in some]
        (RUNS / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named), encoding="utf-8")


def utterances(split: str) -> tuple[list[str], list[int]]:
    rows = [json.loads(line) for line in (RUNS / f"{split}.jsonl").open(encoding="utf-8")]
    pairs = [(turn.strip(), TOPICS.index(row["topic"])) for row in rows for turn in row["turns"][1:]]
    return [text for text, _ in pairs], [topic for _, topic in pairs]


def train_classifier(quick: bool) -> dict[str, Any]:
    """The classifier of topics, as a folder; returns its accuracy."""
    torch.manual_seed(0)
    begin = time.process_time()
    tokenizer: Any = AutoTokenizer.from_pretrained(TRUNK)
    names = dict(enumerate(TOPICS))
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        TRUNK,
        num_labels=len(TOPICS),
        id2label=names,
        label2id={name: i for i, name in names.items()},
        ignore_mismatched_sizes=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)

    def logits(texts: list[str]) -> torch.Tensor:
        return model(**tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=LONGEST)).logits

    texts, topics = utterances("train")
    for _ in range(1 if quick else 5):
        order = torch.randperm(len(texts)).tolist()[: 64 if quick else None]
        for at in range(0, len(order), 64):
            some = order[at : at + 64]
            wanted = torch.tensor([topics[i] for i in some])
            torch.nn.functional.cross_entropy(logits([texts[i] for i in some]), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    texts, topics = utterances("test")
    with torch.no_grad():
        found = [int(i) for at in range(0, len(texts), 256) for i in logits(texts[at : at + 256]).argmax(1)]
    model.save_pretrained(CLASSIFIER)
    tokenizer.save_pretrained(CLASSIFIER)
    return {
        "player": "classifier",
        "seed": 0,
        "accuracy": statistics.mean(a == b for a, b in zip(found, topics, strict=True)),
        "majority": topics.count(statistics.mode(topics)) / len(topics),
        "utterances": len(topics),
        "seconds": time.process_time() - begin,
    }


def one(kind: str, seed: int, quick: bool) -> dict[str, Any]:
    """One row, in this process."""
    if kind == "classifier":
        return train_classifier(quick)
    begin = time.process_time()
    options: dict[str, Any] = {"recipe": "dialog", "tasks": str(RUNS / "train.jsonl"), "seed": seed, "threads": "1"}
    options |= {"form.target": "topic", "batch": 64, "probes": 0, "quiet": True, "out": RUNS / f"{kind}-{seed}"}
    if kind == "start":
        options |= {
            "algorithm": "sft",
            "data.max_length": 200,
            "steps": 2 if quick else 300,
            "lr": 3e-4,
            "policy": "builtin:reviews-lm",
        }
        export(train(**options).learner.policy, START)
        return {"player": kind, "seed": seed, "seconds": time.process_time() - begin}
    summed = resolve({f"intent:{CLASSIFIER}": 0.5, "rouge": 0.5})

    def shuffled(rollouts: list[Rollout]) -> list[float]:
        return in_another_order(rollouts, judge(summed, rollouts).scores)

    options |= {"policy": str(START), "steps": 1 if quick else 48, "lr": 1e-4, "evaluate": str(RUNS / "held-out.jsonl")}
    options |= {"evaluation": {"metrics": {"intent": {"model": str(CLASSIFIER)}, "rouge": {}, "distinct": {}}}}
    run = train(reward=summed if kind == "ppo" else shuffled, **options)
    whole(run)
    judged = json.loads((run.path / "evaluation.json").read_text(encoding="utf-8"))
    found = {when: judged[when]["metrics"] | {"kl": judged[when]["kl"]} for when in ("before", "after")}
    return {"player": kind, "seed": seed, **found, "seconds": time.process_time() - begin}


def place(row: dict[str, Any]) -> Path:
    return RUNS / f"{row['player']}-{row['seed']}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT / "../shared/data/dailydialog/dialogues_part.jsonl.gz")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    parser.add_argument("--quick", action="store_true", help="only check that it runs: tiny runs, no measurement")
    parser.add_argument("--one", nargs=2, metavar=("PLAYER", "SEED"), help="one row, in this process")
    given = parser.parse_args()
    RUNS.mkdir(parents=True, exist_ok=True)
    if given.one:
        found = one(given.one[0], int(given.one[1]), given.quick)
        place(found).write_text(json.dumps(found), encoding="utf-8")
        print(json.dumps(found), flush=True)
        return
    write_dialogues(given.data)
    rows = [json.loads(line) for line in (RUNS / "test.jsonl").open(encoding="utf-8")]
    one_each = [row | {"turns": row["turns"][: 2 + i % 4]} for i, row in enumerate(rows[: 8 if given.quick else 128])]
    (RUNS / "held-out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in one_each), encoding="utf-8")
    if given.keep:
        restore(RESULTS, place)
    players = [
        ("classifier", "0"),
        ("start", "1"),
        *((kind, seed) for seed in given.seeds.split(",") for kind in KINDS),
    ]
    for player, seed in players:
        made = {"classifier": CLASSIFIER, "start": START}.get(player, RUNS)  # a kept row has left no model
        if not (place({"player": player, "seed": seed}).is_file() and made.is_dir()):
            words = [sys.executable, "-m", "benchmarks.dialog_intents", "--one", player, seed]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            subprocess.run([*words, *(["--quick"] if given.quick else [])], cwd=ROOT, env=environment, check=True)
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*-*.json"))]
        result = {"command": "python -m benchmarks.dialog_intents", "machine": about(), "rows": found}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
