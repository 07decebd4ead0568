"""Labels of steps against labels of answers: `python -m benchmarks.process_rewards`, minutes a seed.

The set is generated: sums of five digits modulo 5, solved step by step, as in `3+4+1+1+0:` with the lines `3+4=2`,
`2+1=3`, `3+1=4`, `4+0=4`. In a drawn solution each step is wrong with probability 0.2, and the steps after a wrong
one go on from its result. A process reward model learns from the label of every step until the first wrong one, an
outcome reward model from one label of the whole solution. Both begin as the same small model, which was trained on
right solutions, see the same solutions, and read about the same number of tokens. Then each picks the best of eight
solutions of 400 problems that neither has seen. Writes `benchmarks/results/process-rewards.json`; `make docs` writes
the table.
"""

import argparse
import json
import random
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import operant
from benchmarks.kept import places, whole
from operant import Rollout, Task
from operant.apps.rlhf.reward_model_score import RewardModelScore

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = places("bench-process", "process-rewards")
BASE, DIGITS, WRONG, OF, PROBLEMS = 5, 5, 0.2, 8, 400
STEPS = 1200
"""Optimizer steps of the process reward model, of 32 solutions each."""


def trunk(folder: Path, steps: int = STEPS // 2) -> str:
    """A small model with one token for each character, trained on right solutions."""
    if (folder / "sft/export").is_dir():
        return str(folder / "sft/export")
    letters = ["<pad>", *"0123456789+=:\n"]
    plain = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    torch.manual_seed(0)
    size: Any = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 128}
    ends: Any = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    config = LlamaConfig(vocab_size=len(letters), max_position_embeddings=64, **ends, **size)
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<pad>").save_pretrained(folder)
    chance = random.Random("trunk")
    rows = [
        {"prompt": prompt(d), "completion": "\n".join(solution(d, chance, 0.0)[0])} for d in problems(20_000, chance)
    ]
    (folder / "right.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    plainly: dict[str, Any] = {"algorithm": "sft", "steps": steps, "batch": 32, "lr": 3e-3, "schedule": "linear"}
    shutil.rmtree(folder / "sft", ignore_errors=True)  # of a run that was stopped
    options = {"quiet": True, "threads": "1", "out": folder / "sft"} | plainly
    return str(whole(operant.train(str(folder), str(folder / "right.jsonl"), **options)).path / "export")


def solution(digits: list[int], chance: random.Random, wrong: float = WRONG) -> tuple[list[str], list[bool]]:
    """The steps of a drawn solution, and whether each is right."""
    steps, right, total = list[str](), list[bool](), digits[0]
    for digit in digits[1:]:
        found = (total + digit) % BASE
        is_right = chance.random() >= wrong
        found = found if is_right else chance.choice([other for other in range(BASE) if other != found])
        steps.append(f"{total}+{digit}={found}")
        right.append(is_right)
        total = found
    return steps, right


def problems(count: int, chance: random.Random) -> list[list[int]]:
    return [[chance.randrange(BASE) for _ in range(DIGITS)] for _ in range(count)]


def prompt(digits: list[int]) -> str:
    return "+".join(map(str, digits)) + ":\n"


def row(digits: list[int], chance: random.Random, by_step: bool) -> dict[str, Any]:
    steps, right = solution(digits, chance)
    if not by_step:
        return {"prompt": prompt(digits), "completion": "\n".join(steps), "label": all(right)}
    first = right.index(False) + 1 if not all(right) else len(right)
    labels = [*right[:first], *[None] * (len(right) - first)]
    return {"prompt": prompt(digits), "completions": steps, "labels": labels}


def picked(model: str, steps: str, seed: int) -> dict[str, float]:
    """How many of the solutions that a reward picks are right in every step, and whether its scores tell which are."""
    chance = random.Random(f"test/{seed}")
    reward, best, known = RewardModelScore(model, steps=steps), list[bool](), list[bool]()
    for digits in problems(PROBLEMS, chance):
        drawn = [solution(digits, chance) for _ in range(OF)]
        scores = reward(
            [Rollout(Task("", prompt(digits)), 0, [], ["\n".join(s)], query=prompt(digits)) for s, _ in drawn]
        )
        best.append(all(drawn[scores.index(max(scores))][1]))
        known += [(score > 0) == all(right) for score, (_, right) in zip(scores, drawn)]
    return {"best": statistics.mean(best), "knows": statistics.mean(known)}


def measured(count: int, seed: int, steps_made: int) -> dict[str, Any]:
    """One row: both models from so many labelled solutions."""
    found: dict[str, Any] = {"solutions": count, "seed": seed, "seconds": {}}
    for name, by_step in (("process", True), ("outcome", False)):
        folder, chance = RUNS / f"{name}-{count}-{seed}", random.Random(f"train/{seed}")
        folder.mkdir(parents=True, exist_ok=True)
        rows = [row(digits, chance, by_step) for digits in problems(count, chance)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        begin = time.process_time()
        run = operant.train(
            {"name": "reward_model", "trunk": trunk(RUNS / "trunk", steps_made // 2), "normalise": "none"},
            str(folder / "rows.jsonl"), algorithm="reward-model", loss={"kind": "good"}, batch=32,
            steps=steps_made if by_step else 2 * steps_made,  # by step, a solution is read about twice
            lr=1e-3, schedule="linear", warmup=0.05, probes=0, quiet=True, threads="1", seed=seed, out=folder / "run",
        )  # fmt: skip
        found["seconds"][name] = time.process_time() - begin
        for steps in ("min", "last") if by_step else ("none",):
            found[f"{name}, {steps}" if by_step else name] = picked(str(whole(run).path), steps, seed)
    chance = random.Random(f"test/{seed}")
    drawn = [[solution(digits, chance) for _ in range(OF)] for digits in problems(PROBLEMS, chance)]
    right = [any(all(marks) for _, marks in ones) for ones in drawn]
    # The right solutions of a problem are one text: a score that knows nothing prefers any of the texts.
    texts = [len({tuple(steps) for steps, _ in ones}) for ones in drawn]
    found["chance"] = statistics.mean(is_there / count for is_there, count in zip(right, texts))
    found["any"] = statistics.mean(right)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--solutions", default="4000")
    parser.add_argument("--quick", action="store_true", help="to try the program: two steps of each model")
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if given.keep else []
    for count in map(int, given.solutions.split(",")):
        for seed in map(int, given.seeds.split(",")):
            if any((row["solutions"], row["seed"]) == (count, seed) for row in rows):
                continue
            rows.append(measured(count, seed, 2 if given.quick else STEPS))
            print(json.dumps(rows[-1]), flush=True)
            result = {"command": "python -m benchmarks.process_rewards", "rows": rows}
            RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
