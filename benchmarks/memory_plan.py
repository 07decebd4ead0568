"""`operant doctor --plan` against `operant train`: `python -m benchmarks.memory_plan`; writes results/memory-plan.json.

Each command is planned, then run as a user would type it, in a process of its own. Its peak is the largest resident set
of that process (`ru_maxrss`; what `top` shows as RES), imports and reward models included. Child processes, which only
isolated rewards and worlds have, are not in it. Rows of commands that are not measured this time stay.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/memory-plan.json"
OWN = "--tasks builtin:openings/train --reward letters:e --batch 16 --max-tokens 24"
COMMANDS = {
    "demo": "sentiment",
    "demo, trunk": "sentiment --preset trunk",
    "demo, LoRA": "sentiment --lora.rank 16",
    "demo, own critic": "sentiment --value.critic copy",
    "letters": "letters",
    "letters, GRPO": "letters --algorithm grpo --samples 8",
    "letters, long replies": "letters --batch 256 --max-tokens 60 --min-tokens 60",
    "sft": "sft --tasks {folder}/replies.jsonl",
    "GPT-2 124M": f"--policy {{folder}}/gpt2 {OWN}",
    "GPT-2 124M, trunk": f"--policy {{folder}}/gpt2 {OWN} --preset trunk",
    "GPT-2 124M, muon": f"--policy {{folder}}/gpt2 {OWN} --optimizer.kind muon",
    "GPT-2 124M, 8-bit states": f"--policy {{folder}}/gpt2 {OWN} --optimizer.states 8bit",
    "GPT-2 355M": f"--policy {{folder}}/medium {OWN}",
    "GPT-2 1.6B, trunk": f"--policy {{folder}}/xl {OWN} --preset trunk",
    "GPT-2 1.6B, LoRA, bfloat16": f"--policy {{folder}}/xl {OWN} --lora.rank 16 --model.precision bfloat16",
    "GPT-2 124M, bfloat16": f"--policy {{folder}}/gpt2 {OWN} --model.precision bfloat16",
    "Llama 112M, recomputed": f"--policy {{folder}}/llama {OWN} --model.gradient-checkpointing true",
    "T5 61M": f"--policy {{folder}}/t5 {OWN}",
}
"""The words after `operant train`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of commands, separated by semicolons")
    parser.add_argument("--steps", type=int, default=2, help="the first step and the second reach the peak")
    parser.add_argument("--planned", action="store_true", help="plan again; keep what was measured")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--make", type=Path, help="only make the models and data in this folder")
    args = parser.parse_args()
    names = [name for name in args.only.split(";") if name] or [*(read(args.results) if args.planned else COMMANDS)]
    if args.make:
        make(args.make, names)
        return
    with tempfile.TemporaryDirectory() as folder:
        python("-m", "benchmarks.memory_plan", "--make", folder, "--only", args.only)
        for name in names:
            measured = read(args.results)[name]["measured_gb"] if args.planned else None
            row = compared(COMMANDS[name], Path(folder), f" --steps {args.steps}", measured)
            print(
                f"{name:24} planned {row['planned_gb']:.2f} GB, measured {row['measured_gb']:.2f}: {row['error']:+.0%}"
            )
            rows = read(args.results) | {name: row}  # another process may have measured another command meanwhile
            rows = {name: rows[name] for name in COMMANDS if name in rows}
            worst = max(abs(row["error"]) for row in rows.values())
            about = python("-c", "from operant.machine import about; print(about())").strip()
            result = {"command": "python -m benchmarks.memory_plan", "machine": about, "worst": worst, "rows": rows}
            args.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def read(results: Path) -> dict[str, Any]:
    """The rows of a file of results; none if there is no file."""
    return json.loads(results.read_text(encoding="utf-8"))["rows"] if results.exists() else {}


def compared(words: str, folder: Path, more: str, measured: float | None = None) -> dict[str, Any]:
    """The planned and the measured peak of `operant train WORDS` in GB, and the share by which the plan is too high."""
    words = words.format(folder=folder) + more
    planned, _ = operant(f"doctor --plan {words}")
    if measured is None:
        _, measured = operant(f"train {words} --out {tempfile.mkdtemp(dir=folder)}/run")
    match = re.search(r"at the peak +([\d.]+) GB", planned)
    assert match is not None  # it is the line that the plan ends with
    peak = float(match[1])
    row = {"command": f"operant train {words.replace(str(folder), '.')}", "planned_gb": peak}
    return row | {"measured_gb": round(measured, 3), "error": round(peak / measured - 1, 3)}


def operant(words: str) -> tuple[str, float]:
    """Run a command; returns what it printed and its peak resident memory in GB. Raises: SystemExit if it fails."""
    command = [sys.executable, "-m", "operant", *shlex.split(words)]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
        process = subprocess.Popen(command, env=environment(), stdout=printed, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        printed.seek(0)
        text = printed.read()
    if process.returncode:
        raise SystemExit(f"operant {words}:\n{text[-2000:]}")
    # Linux keeps the peak of the process that started this one as its least value: that one imports no torch.
    return text, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def environment() -> dict[str, str]:
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }


def python(*words: str) -> str:
    """Run Python in a process of its own; returns what it printed."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment(), stdout=subprocess.PIPE, check=True)
    return done.stdout.decode()


def make(folder: Path, names: list[str]) -> None:
    """Make the model folders of these commands, with random weights and the demo's tokenizer, and a file of replies."""
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    from operant.models.safe_loading import load_tokenizer
    from operant.storage.hub import find_model

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    shape = {"vocab_size": 32_000, "hidden_size": 640, "intermediate_size": 1792}
    llama = LlamaConfig(**shape, num_hidden_layers=14, num_attention_heads=10)
    models = {"gpt2": lambda: GPT2LMHeadModel(GPT2Config()), "llama": lambda: LlamaForCausalLM(llama)}
    for name, width, layers in (("medium", 1024, 24), ("xl", 1600, 48)):
        config = GPT2Config(n_embd=width, n_layer=layers, n_head=width // 64)
        models[name] = lambda config=config: GPT2LMHeadModel(config)
    models["t5"] = lambda: T5ForConditionalGeneration(T5Config(decoder_start_token_id=0))
    for name, model in models.items():
        if not any(f"{{folder}}/{name}" in COMMANDS[each] for each in names):
            continue
        model().save_pretrained(folder / name)
        load_tokenizer(find_model("builtin:reviews-lm")).save_pretrained(folder / name)
    rows = [{"prompt": f"film number {i} was", "completion": " good and long and very much so" * 3} for i in range(64)]
    (folder / "replies.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
