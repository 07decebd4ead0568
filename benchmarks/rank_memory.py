"""The plan of a rank's memory against ranks of this machine: `python -m benchmarks.rank_memory`.

Each command is planned for each number of ranks, then run by as many processes over gloo, which this program starts as
torchrun would. A rank's peak is the largest resident set of its process, imports included (`ru_maxrss`). Ways to divide
a run that this operant has no option for are left out. Writes results/rank-memory.json; rows of earlier times stay.

In the row `30M, returned` the C library gives freed memory back, as its command says.
"""

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.memory_plan import OWN, ROOT, environment, python, read

RESULTS = ROOT / "benchmarks/results/rank-memory.json"
LONGER = OWN.replace("--batch 16", "--batch 32")
COMMANDS = {
    "30M, full": f"--policy {{folder}}/small {LONGER}",
    "30M, returned": f"--policy {{folder}}/small {LONGER} --keep-memory false",
    "30M, LoRA": f"--policy {{folder}}/small {LONGER} --lora.rank 16",
    "30M, bfloat16": f"--policy {{folder}}/small {LONGER} --model.precision bfloat16",
}
"""The words after `operant train`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of commands, separated by semicolons")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks")
    parser.add_argument("--kinds", default="ddp,fsdp", help="ways to divide a run")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--make", type=Path, help="only make the model in this folder")
    parser.add_argument("--plan", nargs=3, metavar=("WORDS", "RANKS", "KIND"), help="only print the plan, in bytes")
    args = parser.parse_args()
    if args.make:
        make(args.make)
        return
    if args.plan:
        print(planned(args.plan[0], int(args.plan[1]), args.plan[2]))
        return
    with tempfile.TemporaryDirectory() as folder:
        python("-m", "benchmarks.rank_memory", "--make", folder)
        for name in [name for name in args.only.split(";") if name] or COMMANDS:
            for kind in args.kinds.split(","):
                for ranks in map(int, args.ranks.split(",")):
                    row = compared(COMMANDS[name].format(folder=folder), ranks, kind, Path(folder))
                    if row is not None:
                        print(f"{name}, {kind}, {ranks} ranks: {json.dumps(row)}", flush=True)
                        save(args.results, f"{name}, {kind}, {ranks} ranks", row)


def save(results: Path, name: str, row: dict[str, Any]) -> None:
    """Write the row beside those that the file has."""
    rows = read(results) | {name: row}
    about = python("-c", "from operant.machine import about; print(about())").strip()
    result = {"command": "python -m benchmarks.rank_memory", "machine": about}
    result |= {"worst": max(abs(row["error"]) for row in rows.values()), "rows": rows}
    results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def compared(words: str, ranks: int, kind: str, folder: Path) -> dict[str, Any] | None:
    """The planned and the largest measured peak of a rank in GB; None if operant has no such option."""
    words += " --steps 2" + (f" --parallel {kind}" if kind != "ddp" else "")
    peaks = measured(words, ranks, folder)
    if peaks is None:
        return None
    plan = float(python("-m", "benchmarks.rank_memory", "--plan", words, str(ranks), kind).splitlines()[-1]) / 1e9
    allocator = "".join(f"{name}={value} " for name, value in _allocator(words).items())
    row = {"command": f"{allocator}operant train {words.replace(str(folder), '.')}", "ranks": ranks}
    row["planned_gb"] = round(plan, 3)
    return row | {"measured_gb": peaks, "error": round(plan / max(peaks) - 1, 3)}


def _allocator(words: str) -> dict[str, str]:
    """How the C library is told to give freed memory back, for a run that does not keep it."""
    return {"MALLOC_MMAP_THRESHOLD_": "65536"} if "--keep-memory false" in words else {}


def measured(words: str, ranks: int, folder: Path) -> list[float] | None:
    """The peak of each rank of a run in GB; None if an option is unknown. Raises: SystemExit if it fails otherwise."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "operant", "train", *shlex.split(words), "--out", tempfile.mkdtemp(dir=folder)]
    started, peaks = [], []
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
        for rank in range(ranks):
            given = environment() | place | _allocator(words) | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(subprocess.Popen(command, env=given, stdout=printed, stderr=subprocess.STDOUT))
        for process in started:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            peaks.append(round(usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9, 3))
        printed.seek(0)
        text = printed.read()
    if any(process.returncode for process in started):
        if "'parallel' is unknown" in text:
            return None
        raise SystemExit(f"operant train {words}:\n{text[-2000:]}")
    return peaks


def planned(words: str, ranks: int, kind: str) -> float:
    """The planned peak of a rank on this machine, in bytes."""
    import pyarrow.parquet  # noqa: F401 - what a run imports is part of its memory

    import operant.api  # noqa: F401
    from operant.runs.config import configure
    from operant.tools.cli.arguments import parse
    from operant.tools.memory_plan import measure
    from operant.tools.memory_plan.ranks import on_ranks

    recipe, options = parse(shlex.split(words))
    config = configure(options, recipe[0] if recipe else None)
    return on_ranks(config, measure(config, ranks=ranks), ranks, kind, None).peak


def make(folder: Path) -> None:
    """Make a model folder with random weights and the demo's tokenizer."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from operant.models.safe_loading import load_tokenizer
    from operant.storage.hub import find_model

    torch.manual_seed(0)
    tokenizer = load_tokenizer(find_model("builtin:reviews-lm"))
    shape = {"vocab_size": len(tokenizer), "n_positions": 256, "n_embd": 512, "n_layer": 8, "n_head": 8}
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).save_pretrained(folder / "small")
    tokenizer.save_pretrained(folder / "small")


if __name__ == "__main__":
    main()
