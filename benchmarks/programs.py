"""Reinforcement learning of programs, beside cross-entropy: `python -m benchmarks.programs`, hours on two cores.

`recipes/train_code_lm.py --work runs/code-1000 --rows 1000 --levels 2-3 --steps 1100` has trained the start on 1,000
references, 70 times each, until more steps taught it nothing. (A first start, on 4,000 references for 500 steps, was
not at its end: cross-entropy on the same references for four minutes more led from .25 to .65.) Protocol, fixed before
this start was measured:

- Problems: levels 2 and 3 of `operant.apps.code.generated`; those of training have another seed than the start's, and
  the 400 held-out ones have compositions of operations that training never has. The reward is `tests`.
- Every method gets `--minutes` of processor time, the programs' own included. `ppo`, `grpo` and `reinforce` are paid 1
  for a program that passes all tests. `critic-coderl`, `critic-group` and `critic-difference` are `reinforce`, paid
  token by token by a critic that has learnt offline from 4,000 samples of the start: CodeRL's return, and its
  corrected forms. `coderl` has the start's references as tasks, as CodeRL has, and mixes cross-entropy on them into
  each step.
- Controls: `sft`, cross-entropy that continues for the same time on the start's references; `shuffled`, `grpo` whose
  scores are those of other programs; and `sft-fresh`, cross-entropy on 20,000 new references, which the others do not
  have: what a teacher would be worth.
- `--only critic,critic-padded --seeds 0,1,2` trains the critic again, and one that pools over padding as CodeRL's did.
- Each is measured on the held-out problems: four samples of each (pass@1 and pass@4), and the greedy one; outcomes, and
  mean length. Differences to `sft` are paired by problem and seed.

A finished row is not repeated. Writes `benchmarks/results/programs.json`; `make docs` writes the table of docs/code.md.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.kept import places, restore, whole
from benchmarks.shuffled import in_another_order
from benchmarks.timed import spent, train_for
from operant import Learner, OperantError, Rollout, train
from operant.apps.code.generated import held_out, programs
from operant.data import load_tasks
from operant.machine import about
from operant.metrics.passes import pass_at_k
from operant.rewards import judge, resolve
from operant.runs.named_parts import form
from operant.tools.cli import main as command
from operant.types import OUTCOMES

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = places("bench-programs", "programs")
WORK = ROOT / "runs/code-1000"
START, CRITIC = WORK / "code-lm", RUNS / "critic"
PASSED: dict[str, Any] = {"reward": "tests", "reward.kind": "passed"}
KNOWN = {"tasks": str(WORK / "train.jsonl")}
BY_CRITIC: dict[str, Any] = {"reward": f"critic:{CRITIC}/export", "samples": 4, "kl.coef": 0.0, "advantage.gamma": 0.0}
METHODS: dict[str, dict[str, Any]] = {
    "sft": {"algorithm": "sft", "batch": 64, "lr": 3e-4, **KNOWN},
    "sft-fresh": {"algorithm": "sft", "batch": 64, "lr": 3e-4},
    "grpo": {"algorithm": "grpo", "samples": 8, **PASSED},
    "ppo": {"algorithm": "ppo", "samples": 4, "kl.coef": 0.02, "epochs": 2, "minibatch": 32, **PASSED},
    "reinforce": {"algorithm": "reinforce", "samples": 4, "kl.coef": 0.0, **PASSED},
    "critic-coderl": {"algorithm": "reinforce", **BY_CRITIC},
    "critic-group": {"algorithm": "reinforce", **BY_CRITIC, "reward.returns": "group"},
    "critic-difference": {"algorithm": "reinforce", **BY_CRITIC, "reward.returns": "difference"},
    "coderl": {**KNOWN, "algorithm": "coderl", "reward": f"critic:{CRITIC}/export", "lr": 1e-4, "samples": 1},
    "shuffled": {"algorithm": "grpo", "samples": 8},
}
SIZES = {"problems": 20_000, "held_out": 400, "sampled": 1100, "apart": 400, "steps": 250}
"""Problems to train on, held-out ones, those that the critic's samples are for, samples kept apart, its steps."""
QUICK = {"problems": 12, "held_out": 4, "sampled": 8, "apart": 8, "steps": 2}
COMMON: dict[str, Any] = {"batch": 64, "lr": 2e-4, "max_tokens": 100, "steps": 100_000, "form": "code"}
COMMON |= {"probes": 0, "quiet": True, "threads": "1"}


def shuffled(rollouts: list[Rollout]) -> list[Any]:
    """The scores of other programs."""
    return in_another_order(rollouts, judge(resolve("tests", {"kind": "passed"}), rollouts).scores)


def write_tasks() -> None:
    """Problems to train on, and held-out ones."""
    for name, rows in (
        ("train", lambda: programs(count=SIZES["problems"], levels="2-3", seed=77)),
        ("held-out", lambda: held_out(count=SIZES["held_out"], levels="2-3", seed=77)),
    ):
        if not (RUNS / f"{name}.jsonl").is_file():
            (RUNS / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")


def measured(policy: Any) -> dict[str, Any]:
    """What a policy writes for the held-out problems."""
    found = dict[str, Any]()
    reward = resolve("tests", {"kind": "passed"})
    for name, samples, sampling in (("sampled", 4, {}), ("greedy", 1, {"top_k": 1, "truncation": "stored"})):
        learner = Learner(policy, algorithm="rloo", max_tokens=100, seed=1234, threads="1", **sampling)
        tasks = load_tasks(str(RUNS / "held-out.jsonl"), learner.policy.tokenizer, form=form("code", {}))
        rollouts = learner.play([task for task in tasks for _ in range(samples)], stream="evaluate")
        judged = judge(reward, rollouts)
        passed = [value or 0.0 for value in judged.parts["passed"]]
        right = [int(sum(passed[i : i + samples])) for i in range(0, len(passed), samples)]
        outcomes = Counter(judged.remark(i).classes[0] for i in range(len(rollouts)))
        found[name] = {
            "pass@1": statistics.mean(count / samples for count in right),
            "right": right,
            "outcomes": {outcome: count / len(rollouts) for outcome, count in outcomes.items()},
            "tokens": statistics.mean(rollout.count for rollout in rollouts),
        }
        if samples > 1:
            found[name][f"pass@{samples}"] = statistics.mean(pass_at_k(samples, count, samples) for count in right)
    return found


def train_critic(kind: str, seed: int) -> dict[str, Any]:
    """CodeRL's critic, on samples of the start; `critic-padded` pools over the padding too, as CodeRL's code did."""
    begin, samples = spent(), RUNS / "samples.jsonl"
    few = RUNS / "few.jsonl"
    rows = (RUNS / "train.jsonl").read_text(encoding="utf-8").splitlines()[: SIZES["sampled"]]
    few.write_text("\n".join(rows) + "\n", encoding="utf-8")
    words = ["generate", str(START), "--tasks", str(few), "--form", "code", "--tests", "--all", "--samples", "4"]
    if not samples.is_file():
        command([*words, "--max-tokens", "100", "--out", str(samples)])
    found = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    for name, some in (("critic-train", found[: -SIZES["apart"]]), ("critic-test", found[-SIZES["apart"] :])):
        (RUNS / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    options: dict[str, Any] = {
        "recipe": "outcome-critic",
        "policy.trunk": str(START),
        "steps": SIZES["steps"],
        "threads": "1",
        "seed": seed,
    }
    options |= {"policy.pool_padding": 128} if kind == "critic-padded" else {}
    out = CRITIC if (kind, seed) == ("critic", 0) else RUNS / f"{kind}-{seed}"
    shutil.rmtree(out, ignore_errors=True)  # of a run that was stopped
    run = train(
        tasks=str(RUNS / "critic-train.jsonl"), evaluate=str(RUNS / "critic-test.jsonl"), out=out, quiet=True, **options
    )
    whole(run)
    judged = json.loads((run.path / "evaluation.json").read_text(encoding="utf-8"))
    seconds = spent() - begin
    known = judged["after"]["metrics"] | {
        "bag/accuracy": bag_of_tokens(found[: -SIZES["apart"]], found[-SIZES["apart"] :])
    }
    return {"method": kind, "seed": seed, "seconds": seconds, "samples": len(found), "metrics": known}


def bag_of_tokens(known: list[dict[str, Any]], held: list[dict[str, Any]]) -> float:
    """The share of held-out outcomes that a linear model of the counts of tokens in problem and program finds."""
    tokenizer = AutoTokenizer.from_pretrained(START)

    def counts(rows: list[dict[str, Any]]) -> torch.Tensor:
        made = torch.zeros(len(rows), 2, len(tokenizer))
        for i, row in enumerate(rows):
            for part, text in enumerate((row["prompt"], row["completion"])):
                made[i, part] = torch.bincount(
                    torch.tensor(tokenizer.encode(text), dtype=torch.long), minlength=len(tokenizer)
                )
        return made.flatten(1)

    torch.manual_seed(0)
    model = torch.nn.Linear(2 * len(tokenizer), len(OUTCOMES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    features, outcomes = counts(known), torch.tensor([OUTCOMES.index(row["outcome"]) for row in known])
    for _ in range(300):
        torch.nn.functional.cross_entropy(model(features), outcomes).backward()
        optimizer.step()
        optimizer.zero_grad()
    right = model(counts(held)).argmax(1) == torch.tensor([OUTCOMES.index(row["outcome"]) for row in held])
    return float(right.float().mean())


def one(method: str, seed: int, minutes: float) -> dict[str, Any]:
    """One row, in this process."""
    if method in ("critic", "critic-padded"):
        return train_critic(method, seed)
    if method == "start":
        return {"method": method, "seed": seed, "evaluation": measured(str(START))}
    options = {**COMMON, "policy": str(START), "tasks": str(RUNS / "train.jsonl"), **METHODS[method], "seed": seed}
    options |= {"reward": shuffled} if method == "shuffled" else {}
    found, policy = train_for(minutes, RUNS / f"{method}-{seed}", **options)
    return {"method": method, "seed": seed, **found, "evaluation": measured(policy)}


def place(row: dict[str, Any]) -> Path:
    return RUNS / f"{row['method']}-{row['seed']}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(METHODS), help="methods and controls, separated by commas")
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    parser.add_argument("--quick", action="store_true", help="only check that it runs: tiny, no measurement")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "SEED"), help="one row, in this process")
    given = parser.parse_args()
    RUNS.mkdir(parents=True, exist_ok=True)
    SIZES.update(QUICK if given.quick else {})
    if given.one:
        row = one(given.one[0], int(given.one[1]), given.minutes)
        place(row).write_text(json.dumps(row), encoding="utf-8")
        print(*given.one, json.dumps(row.get("evaluation") or row["metrics"])[:600], flush=True)
        return
    if not START.is_dir():
        raise OperantError(f"{START} does not exist: run recipes/train_code_lm.py as the docstring says")
    write_tasks()
    if given.keep:
        restore(RESULTS, place)
    methods = given.only.split(",")
    with_critic = any(f"critic:{CRITIC}" in METHODS.get(method, {}).get("reward", "") for method in methods)
    jobs = [("start", "1"), *([("critic", "0")] if with_critic else [])]
    jobs += [(method, seed) for seed in given.seeds.split(",") for method in methods]
    for method, seed in jobs:
        made = CRITIC / "export" if method == "critic" else RUNS  # a kept row has left no model
        if not (place({"method": method, "seed": seed}).is_file() and made.is_dir()):
            words = [sys.executable, "-m", "benchmarks.programs", "--one", method, seed]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            subprocess.run(
                [*words, "--minutes", str(given.minutes), *(["--quick"] if given.quick else [])],
                cwd=ROOT,
                env=environment,
                check=True,
            )
        rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*-?.json"))]
        result = {"command": "python -m benchmarks.programs", "machine": about(), "minutes": given.minutes}
        RESULTS.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
