"""A small run that is killed and resumed, in forks of a process that has already imported everything.

prepare(folder), job_of(folder)       write a model and tasks; the options of a run on them
preload(work, folder)                 import in this process whatever `work` imports
fork(work, log), wait(child)          run `work` in a child; its exit status, or kill it after some seconds
play(job, out)                        start the run in `out`, or resume it there, and play to the end
"""

import importlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS = 5
SENTENCE = 3
"""The exit status of a run that ended with an error message of one sentence; 1 means a traceback."""


@dataclass(frozen=True)
class Job:
    """The run of all trials."""

    options: dict[str, Any] = field(default_factory=dict)
    """Options of `operant.train`; only names and plain data, so that a resume needs nothing but the run folder."""


def prepare(folder: Path) -> None:
    """Write a model of two layers with dropout, a tokenizer of letters and six tasks, the same every time."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    prompts = ("ab", "cde", "fg", "h e", "ijk", "lm")
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"text": p}) + "\n" for p in prompts), encoding="utf-8")
    pieces = ["<pad>", "<s>", "</s>", *" abcdefghijklmnopqrstuvwxyz.!"]
    core = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<pad>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": len(pieces)}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    GPT2LMHeadModel(GPT2Config(**shape, **ids)).save_pretrained(folder / "model")


def job_of(folder: Path, steps: int = STEPS, **more: Any) -> Job:
    """A run on the files of `prepare` that writes everything a run can, with both kinds of checkpoint at every step."""
    tasks = str(folder / "tasks.jsonl")
    names = {"policy": str(folder / "model"), "tasks": tasks, "evaluate": tasks, "reward": "letters:e"}
    evaluation = {"evaluate_every": 2, "probes": 3, "probe_every": 2, "best": "episodes", "score.normalise": True}
    small = {"steps": steps, "batch": 8, "max_tokens": 8, "minibatch": 4, "update.epochs": 2, "optimizer.lr": 1e-3}
    return Job(names | evaluation | small | {"kl.control": "adaptive"} | _checkpoints() | more)


def _checkpoints() -> dict[str, Any]:
    from dataclasses import fields

    from operant.runs.config import TrainOptions

    known = {f.name for f in fields(TrainOptions)}
    wanted = {"checkpoint": "both", "checkpoint_every": 1, "checkpoint_minutes": 1e6, "keep": 2}
    return {k: v for k, v in wanted.items() if k in known} if "checkpoint" in known else {"checkpoint_minutes": 0.0}


# --- children ---------------------------------------------------------------------------------------------------------


def fork(work: Callable[[], Any], log: Path | None = None) -> int:
    """Fork a child that does `work` and ends; returns its pid. Its output goes to the file `log`, if there is one."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        if log is not None:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
        work()
        status = 0
    except Exception as error:
        status = SENTENCE if type(error).__name__ == "OperantError" else 1
        print(error) if status == SENTENCE else traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(status)


def wait(child: int, seconds: float = 600.0) -> int:
    """The exit status of a child; it is killed after `seconds`, which gives -9."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def preload(work: Callable[[], Any], folder: Path) -> None:
    """Import whatever `work` imports. A child finds out which modules, so that no thread starts here."""
    names = folder / "modules.json"

    def list_modules() -> None:
        work()
        names.write_text(json.dumps(list(sys.modules)), encoding="utf-8")

    if wait(fork(list_modules, folder / "preload.txt")):
        raise RuntimeError((folder / "preload.txt").read_text(encoding="utf-8"))
    for name in json.loads(names.read_text(encoding="utf-8")):
        with suppress(Exception):
            importlib.import_module(name)


# --- the run ----------------------------------------------------------------------------------------------------------


def play(job: Job, out: Path) -> None:
    """Start the run in `out`, or resume it there, and play to its end."""
    for _ in playing(job, out):
        pass


def playing(job: Job, out: Path) -> Iterator[Any]:
    """As `play`, but yields the run before the first step, after every step, and when it is finished."""
    from operant.api import runs

    begun = run_in(out)
    if begun is None:
        yield from runs(out, **job.options)
    else:
        yield from runs(begun, resume=True)


def run_in(out: Path) -> Path | None:
    """The run folder that was created for `out`: a new run takes another name if a kill left a folder without a run."""
    made = [path for path in sorted(out.parent.glob(f"{out.name}*")) if (path / "config.yaml").exists()]
    return made[-1] if made else None


def resumed_from(out: Path) -> list[int]:
    """The step from which each resume continued; 0 is a fresh start."""
    log = (run_in(out) or out) / "log.txt"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    # A line that was torn goes on with the next one.
    return [int(found[1]) for line in lines if (found := re.search(r"going on after step (\d+)\b(?!-)", line))]
