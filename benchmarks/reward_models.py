"""Reward models on what real people preferred: `python -m benchmarks.reward_models --data ../shared/data`, an hour.

Protocol, fixed before anything was measured: the harmless test pairs of hh-rlhf and the majority of the three
annotators of PandaLM's test set (ties left out), in five folds by prompt, of which `--folds` are measured (2). Each is
scored by the length of the replies alone (the shorter or the longer one, whichever is better in the training folds),
by a Bradley-Terry model on words, and by a reward model with `builtin:reviews-lm` as trunk, which has read film reviews
and nothing else: one pass, the last 96 tokens of each text, one thread.
Writes `benchmarks/results/reward-models.json`.
"""

import argparse
import gzip
import hashlib
import json
import math
import re
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import operant
from benchmarks.kept import whole
from operant.data.replies import labelled_task

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = ROOT / "runs/bench-reward-models", ROOT / "benchmarks/results/reward-models.json"
FOLDS = 5


def rows_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def pairs(name: str, data: Path) -> list[dict[str, str]]:
    """Rows with prompt, chosen and rejected."""
    if name == "hh-rlhf, harmless":
        found = []
        for row in rows_of(data / "prefs_hh_harmless_test/harmless-base-test.jsonl.gz"):
            if row["chosen"] != row["rejected"]:
                try:
                    task = labelled_task(row, "", "")
                except operant.OperantError:  # one text is the beginning of the other
                    continue
                found.append({"prompt": task.prompt, "chosen": task.replies[0], "rejected": task.replies[1]})
        return found
    found = []
    for row in rows_of(data / "prefs_pandalm/testset-v1.jsonl.gz"):
        votes = Counter(str(row[f"annotator{number}"]) for number in (1, 2, 3)).most_common(1)[0]
        texts = isinstance(row["response1"], str) and isinstance(row["response2"], str)  # one row has a truth value
        if texts and votes[1] >= 2 and votes[0] in ("1", "2") and row["response1"] != row["response2"]:
            replies = [row["response1"], row["response2"]]
            best = int(votes[0]) - 1
            prompt = f"{row['instruction']}\n{row['input']}\n"
            found.append({"prompt": prompt, "chosen": replies[best], "rejected": replies[1 - best]})
    return found


def fold(row: dict[str, str]) -> int:
    return int(hashlib.sha256(row["prompt"].encode(errors="replace")).hexdigest(), 16) % FOLDS


def by_length(train: list[dict[str, str]], test: list[dict[str, str]]) -> float:
    def longer(rows: list[dict[str, str]]) -> float:
        gaps = [len(row["chosen"]) - len(row["rejected"]) for row in rows]
        return statistics.mean((gap > 0) + 0.5 * (gap == 0) for gap in gaps)

    return longer(test) if longer(train) > 0.5 else 1 - longer(test)


def by_words(train: list[dict[str, str]], test: list[dict[str, str]], decay: float = 3e-3) -> float:
    """Bradley-Terry on log(1 + count) of the words of the reply that at least three training replies have."""

    def words(text: str) -> Counter[str]:
        return Counter(re.findall(r"[a-z']+", text.lower()))

    known = Counter(word for row in train for side in ("chosen", "rejected") for word in words(row[side]))
    places = {word: i for i, word in enumerate(word for word, count in known.items() if count >= 3)}

    def gaps(rows: list[dict[str, str]]) -> torch.Tensor:
        whole = torch.zeros(len(rows), len(places))
        for number, row in enumerate(rows):
            for side, sign in (("chosen", 1.0), ("rejected", -1.0)):
                for word, count in words(row[side]).items():
                    if word in places:
                        whole[number, places[word]] += sign * math.log1p(count)
        return whole

    weights, seen = torch.zeros(len(places), requires_grad=True), gaps(train)
    optimizer = torch.optim.LBFGS([weights], max_iter=60)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.softplus(-seen @ weights).mean() + decay * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    scores = gaps(test) @ weights.detach()
    return float(((scores > 0).float() + 0.5 * (scores == 0).float()).mean())


def by_model(name: str, number: int, train: list[dict[str, str]], test: list[dict[str, str]]) -> dict[str, float]:
    begin = time.process_time()
    run = operant.train(
        recipe="reward-model",
        tasks=train,
        evaluate=test,
        loss={"kind": "pairwise"},
        steps=max(len(train) // 16, 1),
        data={"max_length": 96},
        quiet=True,
        threads="1",
        out=RUNS / f"{name.partition(',')[0]}-{number}",
    )
    whole(run)
    assert run.after is not None
    return {"minutes": (time.process_time() - begin) / 60, **run.after.chosen()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data")
    parser.add_argument("--folds", type=int, default=2)
    given = parser.parse_args()
    rows = []
    for name in ("PandaLM", "hh-rlhf, harmless"):
        known = pairs(name, given.data)
        for number in range(given.folds):
            train = [row for row in known if fold(row) != number]
            test = [row for row in known if fold(row) == number]
            row: dict[str, Any] = {"data": name, "fold": number, "train": len(train), "test": len(test)}
            row |= {"length": by_length(train, test), "words": by_words(train, test)}
            row["model"] = by_model(name, number, train, test)
            rows.append(row)
            print(json.dumps(row), flush=True)
            result = {"command": "python -m benchmarks.reward_models", "folds": given.folds, "rows": rows}
            RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
