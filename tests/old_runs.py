"""Run folders that an older version has written, which every later one resumes bit-identically.

    python tests/old_runs.py         # writes those that are missing into tests/old; a folder that is there stays

Each run stopped after two of four steps. `expected.json` beside it holds what that same version made of it when it went
on: every number of the last two steps, and a digest of the weights. A later version may only add folders.
"""

import json
import platform
import shutil
import sys
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from rigs import on_ranks
from toys import letters
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration
from worlds import Turns

from operant import Step, train

OLD, TASKS = Path(__file__).parent / "old", "builtin:openings/held-out"
STOPPED, STEPS = 2, 4
USUAL = {"batch": 8, "sampling.max_tokens": 6, "update.epochs": 2, "update.minibatch": 4, "optimizer.lr": 1e-3}
USUAL |= {"probes": 2, "probe_every": 2, "watch_every": 2, "samples_every": 0, "keep": 1, "reward": "letters:a"}
USUAL |= {"tasks": TASKS, "data.limit": 6, "data.query_tokens": "2-5"}
GROUPED = {"samples": 4, "update.minibatch": None}
CASES: dict[str, dict[str, Any]] = {
    "ppo": {"kl.control": "adaptive", "score.scale": True, "evaluate_every": 1},
    "grpo": {"algorithm": "grpo", **GROUPED},
    "rloo": {"algorithm": "rloo", **GROUPED},
    "lora": {"lora.rank": 2},
    "critic": {"value.critic": "copy"},
    "light": {"checkpoint": "light"},
    "trunk": {"model.train_layers": 1},
    "t5": {"kind": "t5"},
    "world": {"reward": None, "env": True},
    "ranks": {},
}
"""By folder: what is not usual about the run."""
HERE = ("kind", "env")
"""What this file reads, and `train` does not."""


class Corridor(Turns):
    """Two turns, the second a choice; each pays by the length of the reply."""

    def answer(self, slot, reply):
        paid = len(str(reply)) / 4
        if self.turn[slot] == 1:
            return Step("en", reward=paid, options=["go", "stay here"])
        return Step(reward=paid, terminated=True)


def prepared(case: str, place: Path) -> dict[str, Any]:
    """The arguments of `train`, with the model in a folder, which is gone when the run goes on."""
    given = USUAL | {k: v for k, v in CASES[case].items() if k not in HERE}
    tokenizer, folder = letters(), place / "model"
    tiny(CASES[case].get("kind", "gpt2"), len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"policy": str(folder), **given, **({"evaluate": TASKS} if "evaluate_every" in given else {})}


def tiny(kind: str, vocab: int) -> torch.nn.Module:
    torch.manual_seed(0)
    ids = {"vocab_size": vocab, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind == "gpt2":
        shape = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 32, "initializer_range": 0.1}
        return GPT2LMHeadModel(GPT2Config(**shape, **ids)).eval()
    shape = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "tie_word_embeddings": False}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, initializer_factor=0.1, **shape, **ids)).eval()


def environment(case: str) -> dict[str, Any]:
    return {"env": Corridor()} if CASES[case].get("env") else {}


def begin(case: str, out: Path, given: dict[str, Any]) -> None:
    train(out=out, steps=STOPPED, **given, **environment(case))


def go_on(case: str, out: Path) -> dict[str, Any]:
    more = {"fresh_optimizer": True} if case == "light" else {}
    run = train(out=out, resume=True, steps=STEPS, **more, **environment(case))
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()][STOPPED:]
    clock = ("time/", "memory/", "tokens/", "at", "seconds")
    metrics = [{k: v for k, v in step.items() if not k.startswith(clock)} for step in steps]
    return {"metrics": metrics, "weights": digest(run.policy)}


def digest(policy: torch.nn.Module) -> str:
    found = blake2b(digest_size=16)
    for name, p in sorted(policy.state_dict().items()):
        found.update(name.encode())
        found.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def machine() -> str:
    """What bits depend on: libraries choose their kernels by the processor's model and its instructions."""
    cpus = Path("/proc/cpuinfo")
    kept = ("vendor_id", "cpu family", "model", "stepping", "flags")
    lines = cpus.read_text().split("\n\n")[0].splitlines() if cpus.is_file() else [platform.processor()]
    told = sorted(line for line in lines if line.partition("\t")[0] in kept)
    processor = blake2b("\n".join(told or lines).encode(), digest_size=6).hexdigest()
    return f"{platform.machine()} {processor} {torch.__version__}"


def slim(out: Path) -> None:
    """Without what no resume reads."""
    for name in ("report.html", "export", "best", "log.txt"):
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def write(case: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        run, given = Path(place) / "run", prepared(case, Path(place))
        if case == "ranks":
            on_ranks(ranked, 2, run, given)
        else:
            begin(case, run, given)
        slim(run)
        shutil.copytree(run, OLD / case / "run")
        expected = resumed(case, Path(place) / "again")
    expected["machine"] = machine()
    (OLD / case / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def resumed(case: str, place: Path) -> dict[str, Any]:
    """What this version makes of the folder, on a copy of it."""
    shutil.copytree(OLD / case / "run", place)
    return on_ranks(ranked, 2, place, None)[0] if case == "ranks" else go_on(case, place)


def ranked(rank: int, world: int, run: Path, given: dict[str, Any] | None) -> Any:
    """On one of two ranks: begin the run, or without arguments, go on with it."""
    return go_on("ranks", run) if given is None else begin("ranks", run, given)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[1:] or CASES:
        if not (OLD / case).exists():
            write(case)
            print(case, flush=True)
