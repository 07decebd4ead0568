"""Style transfer by a prompt of five tokens: `python -m benchmarks.style_transfer --masked-lm FOLDER`.

Protocol, fixed before anything was measured. Sentences: the clean Yelp sentences of RLPrompt, from negative to
positive: the first `--train` of a fixed random order of the dev file, and `--test` of the test file.
`builtin:reviews-lm`, a model of film reviews, rewrites them, and is the model behind the MLP that is trained; one
prompt serves all sentences.

- Reward: content by BERTScore of the states of `builtin:reviews-lm` (its baseline measured on pairs of sentences) and
  style by `builtin:sentiment`; 4 groups of 4 rewrites. `soft_q` with rewards standardised over the prompts of one
  sentence, `--steps` steps of 4 sentences x 4 prompts.
- Evaluation: 8 rewrites of each test sentence. Style is judged by another classifier and fluency by a classifier of
  acceptability, both trained here: the masked language model of `recipes/train_masked_lm.py` with a new head, fitted to
  `--rows` dev sentences. The first tells negative from positive; the second a sentence from the same one with words
  dropped, repeated or in another order. Their accuracy on sentences of the test file is in the results.
- Rows: no prompt, two prompts by hand, and the likeliest prompt of the policy before and after training; each of single
  rewrites, and of the best of 8 by the reward. `copy`: the sentence itself.

A finished row is kept in `runs/bench-style`. Writes `benchmarks/results/style-transfer.json`; `make docs` writes its
table.
"""

import argparse
import gzip
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from benchmarks.kept import restore, whole
from benchmarks.timed import spent
from operant import Rollout, Task
from operant.api import runs
from operant.apps.prompts.style_transfer import StyleTransfer, TransferQuality
from operant.machine import about
from operant.rewards.classifier import Classifier
from operant.tools.report.prompts import greedily

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = ROOT / "runs/bench-style", ROOT / "benchmarks/results/style-transfer.json"
REVIEWS, SAMPLES = "builtin:reviews-lm", 8
REWARD = {"model": REVIEWS, "content_model": REVIEWS, "baseline": None, "groups": 4, "samples": 4}
BY_HAND = {"none": "", "hand 1": "On the other hand, it was great:", "hand 2": "The same, but I loved it:"}
NAMES = ("copy", *BY_HAND, "soft_q")
JUDGES = {"style": ("negative", "positive"), "fluency": ("unacceptable", "acceptable")}
LONGEST = 48


def sentences(data: Path, split: str, label: int, count: int) -> list[str]:
    """Different sentences of a file in a fixed random order: lower case, five words or more."""
    path = data / "yelp_rlprompt/clean" / f"sentiment.{split}.{label}.clean.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found = [line.strip() for line in file if 4 < len(line.split()) <= 20]
    random.Random(0).shuffle(found)
    return list(dict.fromkeys(found))[:count]  # some stand in the file twice


def disturbed(text: str, chance: random.Random) -> str:
    """The sentence with a word dropped or repeated, or with three to six words in another order."""
    words = text.split()
    at, way = chance.randrange(len(words)), chance.randrange(4)
    if way == 0:
        del words[at]
    elif way == 1:
        words.insert(at, words[at])
    else:
        begin = chance.randrange(max(1, len(words) - 4))
        part = words[begin : begin + chance.randint(3, 6)]
        words[begin : begin + len(part)] = sorted(part, key=lambda _: chance.random())
    return " ".join(words) if " ".join(words) != text else f"{text} {words[0]}"


def labelled(data: Path, split: str, rows: int, judge: str) -> list[tuple[str, int]]:
    """Sentences with the label that a judge has to find."""
    found = [(text, label) for label in (0, 1) for text in sentences(data, split, label, rows // 2)]
    chance = random.Random(1)
    if judge == "fluency":
        found = [(disturbed(text, chance), 0) if i % 2 else (text, 1) for i, (text, _) in enumerate(found)]
    chance.shuffle(found)
    return found


def train_judge(judge: str, given: argparse.Namespace) -> dict[str, Any]:
    """Fit a classifier for evaluation; its accuracy on sentences of the test file."""
    folder, begin = RUNS / judge, spent()
    names = dict(enumerate(JUDGES[judge]))
    torch.manual_seed(0)
    logging.set_verbosity_error()  # that the head is new is as it should be
    tokenizer = AutoTokenizer.from_pretrained(given.masked_lm)
    model = AutoModelForSequenceClassification.from_pretrained(
        given.masked_lm, id2label=names, label2id={name: i for i, name in names.items()}, dtype=torch.float32
    )
    rows = labelled(given.data, "dev", given.rows, judge)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    steps = [rows[i : i + 32] for i in range(0, len(rows), 32)]
    for step, some in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * min(1.0, (step + 1) / 20) * (1 - step / len(steps))
        texts = tokenizer(
            [text for text, _ in some], truncation=True, max_length=LONGEST, padding=True, return_tensors="pt"
        )
        cross_entropy(model(**texts).logits, torch.tensor([label for _, label in some])).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    held_out = labelled(given.data, "test", 2 * given.test, judge)
    found = Classifier(str(folder), label=names[1]).of_labels([text for text, _ in held_out])
    right = [scores.index(max(scores)) == label for scores, (_, label) in zip(found, held_out, strict=True)]
    return {"name": judge, "seed": 0, "accuracy": sum(right) / len(right), "seconds": spent() - begin}


def quality(prompt: str, tasks: list[Task]) -> dict[str, float]:
    """What a prompt is worth on the test sentences: single rewrites, and under `selected/` the best ones."""
    reward = StyleTransfer(**REWARD)
    judged = {"style_judge": str(RUNS / "style"), "fluency_model": str(RUNS / "fluency")}
    metric = TransferQuality(reward, samples=SAMPLES, **judged, perplexity_model=REVIEWS)
    metric.check()
    metric.read_tasks(tasks)
    if prompt == "copy":  # the sentence in place of every rewrite
        reward.rewriter = lambda pairs, count, stream: [[sentence] * count for _, sentence in pairs]  # type: ignore
    found = metric([Rollout(task, i, [], [prompt]) for i, task in enumerate(tasks)])
    return {name: sum(x) / len(x) if isinstance(x, list) else x for name, x in found.items()}


def one(name: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """One row, in this process."""
    if name in JUDGES:
        return train_judge(name, given)
    begin = spent()
    tasks = [
        Task(text, text, target={"sentence": text, "style": "positive"})
        for text in sentences(given.data, "test", 0, given.test)
    ]
    if name != "soft_q":
        prompt = BY_HAND.get(name, name)
        return {
            "name": name,
            "seed": seed,
            "prompt": prompt,
            "after": quality(prompt, tasks),
            "seconds": spent() - begin,
        }
    texts = sentences(given.data, "dev", 0, given.train)
    learnt = [Task(text, "Prompt:", target={"sentence": text, "style": "positive"}) for text in texts]
    shutil.rmtree(RUNS / f"run-{seed}", ignore_errors=True)  # of a row that was stopped
    options: dict[str, Any] = {
        "algorithm": "soft_q",
        "reward": {"style_transfer": REWARD},
        "output_mlp": {"width": 1024},
        "sampling": {"max_tokens": 5, "fixed_length": True, "top_k": 50, "truncation": "stored"},
        "advantage": {"standardise": "group", "shape": [0, 1, 0, 5]},
        "lr": 3e-4,
    }
    scores, asked = list[float](), [Task("prompt", "Prompt:")]
    for run in runs(
        RUNS / f"run-{seed}", policy=REVIEWS, tasks=learnt, steps=given.steps, batch=16, samples=4, seed=seed,
        threads="1", probes=0, **options,
    ):  # fmt: skip
        if not run.metrics:
            before = run.learner.play(asked, sampling=greedily(run), stream="evaluate")[0].reply
        scores = [m["reward/mean"] for m in run.metrics]
    whole(run)
    after = run.learner.play(asked, sampling=greedily(run), stream="evaluate")[0].reply
    row = {"name": name, "seed": seed, "steps": given.steps, "seconds": spent() - begin, "prompt": after}
    row |= {"prompt_before": before, "curve": scores}
    return row | {"before": quality(before, tasks), "after": quality(after, tasks)}


def place(row: dict[str, Any]) -> Path:
    return RUNS / f"{row['name'].replace(' ', '-')}-{row['seed']}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT / "../shared/data/style_transfer")
    parser.add_argument("--masked-lm", type=Path, default=ROOT / "runs/masked-lm/masked-lm")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--train", type=int, default=400)
    parser.add_argument("--test", type=int, default=100)
    parser.add_argument("--rows", type=int, default=16_000, help="sentences that each judge is fitted to")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--only", default=",".join(NAMES), help="rows, separated by commas")
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SEED"), help="one row, in this process")
    given = parser.parse_args()
    RUNS.mkdir(parents=True, exist_ok=True)
    if given.one:
        row = one(given.one[0], int(given.one[1]), given)
        place(row).write_text(json.dumps(row), encoding="utf-8")
        print({name: value for name, value in row.items() if name != "curve"}, flush=True)
        return
    if given.keep:
        restore(RESULTS, place)
    asked = [(name, "0") for name in (*JUDGES, *given.only.split(",")) if name != "soft_q"]
    asked += [("soft_q", seed) for seed in given.seeds.split(",") if "soft_q" in given.only.split(",")]
    for name, seed in asked:
        made = RUNS / name if name in JUDGES else RUNS  # a kept row has left no model
        if not (place({"name": name, "seed": seed}).is_file() and made.is_dir()):
            words = [sys.executable, "-m", "benchmarks.style_transfer", "--one", name, seed]
            for option in ("data", "masked_lm", "steps", "train", "test", "rows"):
                words += [f"--{option.replace('_', '-')}", str(getattr(given, option))]
            subprocess.run(words, cwd=ROOT, check=True)
        rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*-?.json"))]
        result = {
            "command": "python -m benchmarks.style_transfer",
            "machine": about(),
            "test": given.test,
            "rows": rows,
        }
        RESULTS.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
