"""A small run that is killed and resumed, in children of a process that has imported everything already.

prepare(folder), job_of(folder)       a model and tasks; the options of a run over them
preload(work, folder)                 import here what `work` imports
fork(work, told), wait(child)         work in a child; its exit status, or kill it after some seconds
play(job, out)                        the run into `out`: begun, or resumed where one lies there
"""

import importlib
import json
import os
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
"""The exit status of a run that ended with a sentence, as the command line would print it; 1 is a traceback."""


@dataclass(frozen=True)
class Job:
    """A run that everything is done to."""

    options: dict[str, Any] = field(default_factory=dict)
    """As for `operant.train`; names and plain data alone, so that the run folder is all that a resume needs."""


def prepare(folder: Path) -> None:
    """A model of two layers with dropout, its tokenizer of letters and six tasks, the same every time."""
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
    """A run over what `prepare` made, which writes all that a run can: a checkpoint of both kinds after every step."""
    tasks = str(folder / "tasks.jsonl")
    names = {"policy": str(folder / "model"), "tasks": tasks, "evaluate": tasks, "reward": "letters:e"}
    looks = {"evaluate_every": 2, "probes": 3, "probe_every": 2, "best": "episodes", "score.normalise": True}
    small = {"steps": steps, "batch": 8, "max_tokens": 8, "minibatch": 4, "update.epochs": 2, "optimizer.lr": 1e-3}
    return Job(names | looks | small | {"kl.control": "adaptive"} | _checkpoints() | more)


def _checkpoints() -> dict[str, Any]:
    from dataclasses import fields

    from operant.runs.config import TrainOptions

    known = {f.name for f in fields(TrainOptions)}
    wanted = {"checkpoint": "both", "checkpoint_every": 1, "checkpoint_minutes": 1e6, "keep": 2}
    return {k: v for k, v in wanted.items() if k in known} if "checkpoint" in known else {"checkpoint_minutes": 0.0}


# --- children ---------------------------------------------------------------------------------------------------------


def fork(work: Callable[[], Any], told: Path | None = None) -> int:
    """The number of a child that does `work` and ends; what it prints goes to the file `told`, where one is named."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        if told is not None:
            descriptor = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
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
    """Its exit status; where it still works after `seconds` it is killed, and the status is -9."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def preload(work: Callable[[], Any], folder: Path) -> None:
    """Import here whatever `work` imports, which a child tries out: no thread begins in this process."""
    names = folder / "modules.json"

    def look() -> None:
        work()
        names.write_text(json.dumps(list(sys.modules)), encoding="utf-8")

    if wait(fork(look, folder / "preload.txt")):
        raise RuntimeError((folder / "preload.txt").read_text(encoding="utf-8"))
    for name in json.loads(names.read_text(encoding="utf-8")):
        with suppress(Exception):
            importlib.import_module(name)


# --- the run ----------------------------------------------------------------------------------------------------------


def play(job: Job, out: Path) -> None:
    """Begin the run in `out`, or go on with what lies there, to its end."""
    for _ in playing(job, out):
        pass


def playing(job: Job, out: Path) -> Iterator[Any]:
    """As `play`, handing out the run before the first step, after every step, and when it is done."""
    from operant.api import runs

    begun = run_in(out)
    if begun is None:
        yield from runs(out, **job.options)
    else:
        yield from runs(begun, resume=True)


def run_in(out: Path) -> Path | None:
    """The run folder that was made for `out`: a new one takes another name where a kill left a folder without a run."""
    made = [path for path in sorted(out.parent.glob(f"{out.name}*")) if (path / "config.yaml").exists()]
    return made[-1] if made else None


def resumed_from(out: Path) -> list[int]:
    """The step after which every resume went on; 0 is a fresh start."""
    log = (run_in(out) or out) / "log.txt"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [int(line.rpartition(" ")[2]) for line in lines if "going on after step" in line]
