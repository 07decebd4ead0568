"""Runs from the command line, by one process or by several."""

import os
import subprocess
import sys
from pathlib import Path

from toys import letters, lm, on_disk

TASKS = ["ab", "cde", "fg", "h", "ijk", "lm", "no"]
OPTIONS = """
steps: 3
batch: 8
samples: 2
probes: 2
evaluate_every: 2
max_tokens: 6
minibatch: 3
score: {scale: true}
reward: {"letters:a": 1.0, "length:3": 0.5}
kl: {control: adaptive, horizon: 50}
optimizer: {lr: 1.0e-3, eps: 1.0}
"""


def started(folder: Path, out: str, ranks: int, *more: str) -> subprocess.CompletedProcess:
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(several if ranks > 1 else []), "-m", "operant", "train"]
    given = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words = more or (str(folder / "recipe.yaml"), "--out", str(folder / out))
    how = {"capture_output": True, "text": True, "timeout": 300}
    return subprocess.run([*command, *words], cwd=folder, env=given, **how)


def write_job(path: Path, more: str = "") -> Path:
    on_disk(path / "model", lm("gpt2", vocab=len(letters()), spread=0.3))
    (path / "tasks.txt").write_text("\n".join(TASKS), encoding="utf-8")
    text = f"policy: {path / 'model'}\ntasks: {path / 'tasks.txt'}\nevaluate: {path / 'tasks.txt'}\n{OPTIONS}{more}"
    (path / "recipe.yaml").write_text(text, encoding="utf-8")
    return path
