"""A policy that learns to call `python`: `python -m benchmarks.tool_use`.

The task is `47*36+85=`, with the answer as the target. The start is a Llama of 0.3M weights, trained here from
nothing on generated problems. Seven in ten are answered at once, where a model of this size is hardly ever right; the
others by two calls of `python` (`<python>47*36</python>`, then the sum of its result) and the answer: an episode of
three turns. GRPO then trains it in the world `tools`, at most three calls, right or wrong as the reward. The controls:
verdicts that are shuffled within a step, and supervised training on the same data for as many seconds.

Writes `benchmarks/results/tool-use.json`; `make docs` writes the table of docs/agents.md. A finished row is not
repeated. An hour of processor time, of which most starts sandboxes.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import operant
from benchmarks.kept import places, whole
from benchmarks.shuffled import in_another_order
from benchmarks.timed import spent
from operant import Task
from operant.apps.maths.generated import Part, drawn
from operant.rewards import judge, resolve
from operant.runs.trainer import runs

ROOT = Path(__file__).parents[1]
QUICK = "--quick" in sys.argv
RUNS, RESULTS = places("bench-tool-use", "tool-use")
STEPS, EVERY, CALLED, FOLLOWED = 24, 4, 0.3, 0.6
ROWS = [*(("grpo", seed) for seed in (1, 2, 3)[: 1 if QUICK else None]), ("shuffled", 1), ("sft", 1)]
CALL, RESULT = "<python>{}</python>", "<result>{}</result>"


def problems(count: int, seed: int, part: Part = "train") -> list[tuple[str, str, str]]:
    """The product, the whole and the answer of each; one in five sets of numbers is held out."""
    chance, found = random.Random(seed), []
    for _ in range(count):
        a, b, c = drawn(lambda: [chance.randint(10, 99) for _ in range(3)], part)
        found.append((f"{a}*{b}", f"{a}*{b}+{c}", str(a * b + c)))
    return found


def demonstrations(count: int, seed: int) -> list[dict[str, str]]:
    """Rows of supervised training, a turn each: an answer at once or a call, and what comes behind two calls."""
    chance, rows = random.Random(seed), []
    for product, asked, answer in problems(count, seed):
        prompt, value = f"{asked}=", str(eval(product))
        first = CALL.format(product) if chance.random() < CALLED else answer
        rows.append({"prompt": prompt, "completion": first})
        if chance.random() > FOLLOWED:
            continue
        calls = [(product, value), (f"{value}+{asked.split('+')[1]}", answer)]
        for call, result in calls:
            if call != product:
                rows.append({"prompt": prompt, "completion": CALL.format(call)})
            prompt += CALL.format(call) + RESULT.format(result)
        rows.append({"prompt": prompt, "completion": answer})
    return rows


def write(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def start(quick: bool) -> str:
    """The model from which all rows begin, trained unless it is there."""
    out = RUNS / "start"
    if not (out / "export").is_dir():
        random_weights = RUNS / "random"
        tokenizer = operant.load_policy("builtin:maths-lm").tokenizer
        assert tokenizer is not None
        torch.manual_seed(1)
        size: Any = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
        size |= {"vocab_size": len(tokenizer), "max_position_embeddings": 256, "tie_word_embeddings": True}
        ends: Any = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_token_id)
        LlamaForCausalLM(LlamaConfig(**size, **ends)).save_pretrained(random_weights)
        tokenizer.save_pretrained(random_weights)
        rows = write(RUNS / "demonstrations.jsonl", demonstrations(200 if quick else 24_000, 1))
        options: Any = {"steps": 2 if quick else 2200, "batch": 128, "lr": 3e-3, "schedule": "cosine", "warmup": 0.03}
        options |= {"keep": 1, "probes": 0, "threads": "1"}
        operant.train(str(random_weights), rows, algorithm="sft", out=out, resume=out.is_dir(), **options)
    return str(out / "export")


def options_of(method: str, seed: int, quick: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"policy": start(quick), "seed": seed, "steps": 2 if quick else STEPS, "probes": 0}
    options |= {"threads": "1", "schedule": "constant", "lr": 3e-4, "evaluate": None, "warmup": 0.1}
    if method == "sft":
        return options | {"tasks": str(RUNS / "demonstrations.jsonl"), "algorithm": "sft", "batch": 128, "steps": 5000}
    options |= {
        "tasks": str(RUNS / "problems.jsonl"),
        "data.target_field": "target",
        "algorithm": "grpo",
        "env": "tools",
        "env.calls": 3,
    }
    options |= {"batch": 16 if quick else 128, "samples": 8, "update.minibatch": 32, "update.epochs": 1}
    options |= {"sampling.max_tokens": 32, "sampling.stop_strings": ["</python>"], "reference": "none"}
    return options | {"reward": "maths" if method == "grpo" else f"{__file__}:shuffled"}


def shuffled(rollouts: Any) -> list[float]:
    """The verdicts of a step in another order."""
    return in_another_order(rollouts, judge(resolve("maths"), rollouts).scores)


def one(method: str, seed: int, quick: bool) -> None:
    """One row, in this process: every few steps, what it solves of held-out problems and how often it calls."""
    options, place = options_of(method, seed, quick), RUNS / f"{method}-{seed}"
    held_out = [
        Task(f"held-out/{i}", f"{whole}=", target=answer)
        for i, (_, whole, answer) in enumerate(problems(16 if quick else 256, 3, "held-out"))
    ]
    players = operant.envs.ENVS.find("tools")("python", calls=3, characters=60)
    begin, apart, curve, most = 0.0, 0.0, list[list[float]](), seconds_of("grpo", 1) if method == "sft" else 1e9
    for run in runs(place / "run", **options):
        begin = begin or spent()
        step, seconds = len(run.metrics), spent() - begin - apart
        late = seconds > most or step >= options["steps"]
        if (step % (200 if method == "sft" else EVERY) and not late) or (curve and curve[-1][0] == step):
            continue
        policy = run.learner.policy
        players.tokenizer = policy.tokenizer
        sampling = operant.Sampling(max_tokens=32, stop_strings=("</python>",), stop_tokens=policy.stop_tokens)
        rollouts = run.learner.play(held_out, stream="evaluate", env=players, sampling=sampling)
        share = sum(score == 1 for score in judge(resolve("maths"), rollouts).scores) / len(held_out)
        calls = sum(len(r.turns) > 1 for r in rollouts) / len(held_out)
        curve.append([step, seconds, share, calls])
        print(method, seed, curve[-1], flush=True)
        apart = spent() - begin - seconds
        if late:
            break
    whole(run)
    row = {"method": method, "seed": seed, "curve": curve}
    (place / "row.json").write_text(json.dumps(row) + "\n", encoding="utf-8")


def seconds_of(method: str, seed: int) -> float:
    return json.loads((RUNS / f"{method}-{seed}" / "row.json").read_text(encoding="utf-8"))["curve"][-1][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="only check that it runs: tiny runs, no results written")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "SEED"), help="one row, in this process")
    given = parser.parse_args()
    if given.one:
        one(given.one[0], int(given.one[1]), given.quick)
        return
    RUNS.mkdir(parents=True, exist_ok=True)
    start(given.quick)
    write(RUNS / "problems.jsonl", [{"prompt": f"{q}=", "target": answer} for _, q, answer in problems(4000, 2)])

    def run(row: tuple[str, int]) -> None:
        if not (RUNS / f"{row[0]}-{row[1]}" / "row.json").is_file():
            words = [sys.executable, "-m", "benchmarks.tool_use", *(["--quick"] if given.quick else []), "--one"]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            subprocess.run([*words, *map(str, row)], cwd=ROOT, env=environment, check=True)

    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(run, ROWS[:-1]))
    run(ROWS[-1])
    rows = [json.loads((RUNS / f"{m}-{s}" / "row.json").read_text(encoding="utf-8")) for m, s in ROWS]
    if not QUICK:
        RESULTS.write_text(
            json.dumps({"command": "python -m benchmarks.tool_use", "rows": rows}, indent=1) + "\n", "utf-8"
        )


if __name__ == "__main__":
    main()
