"""Bytes and seconds of a checkpoint of GPT-2's shape: `python -m benchmarks.checkpoint_size`; into results/.

Three runs (all weights, preset `trunk`, LoRA of rank 16), each with a value head and one step of Adam behind it, save a
`resume` and a `light` checkpoint. For comparison, the same writer saves the whole policy, reference and Adam state.
Weights are random. Seconds are medians and include syncing every file to the disk.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import RESULTS, machine
from operant.storage.checkpoint import RunState, Saved
from operant.storage.checkpoint_store import Retention
from operant.training.learner import Learner

RUNS: dict[str, dict[str, Any]] = {"all weights": {}, "trunk": {"preset": "trunk"}, "LoRA, rank 16": {"lora.rank": 16}}
SHAPES = {"124M": {}, "tiny": {"vocab_size": 1000, "n_embd": 64, "n_layer": 4, "n_head": 4}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shape", choices=SHAPES, default="124M", help="tiny: only check that it runs, no results written"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write the checkpoints; they are deleted afterwards")
    args = parser.parse_args()
    rows, load = [], os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for name, options in RUNS.items():
            rows += measured(name, learner(args.shape, options), Path(folder), args.rounds)
            for row in (row for row in rows if row["run"] == name):
                print(
                    f"{row['run']:<14} {row['kind']:<20} {row['bytes'] / 1e6:9.2f} MB {row['seconds']:7.2f} s",
                    flush=True,
                )
    if args.shape == "124M":
        result = {"command": "python -m benchmarks.checkpoint_size", "machine": machine(), "rounds": args.rounds}
        result["load"] = load
        text = json.dumps(result | {"rows": rows}, indent=1) + "\n"
        (RESULTS / "checkpoint-size.json").write_text(text, encoding="utf-8")


def learner(shape: str, options: dict[str, Any]) -> Learner:
    """A learner whose Adam has taken one step, so that its moments exist."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SHAPES[shape])).eval()
    made = Learner(model, **options)
    for p in made.policy.trainable():
        p.grad = torch.randn_like(p)
    made.optimizer.step()
    made.optimizer.zero_grad()
    return made


def measured(name: str, made: Learner, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Save each kind of checkpoint in turn; one row for each kind."""
    own = RunState()
    for part, thing in made.parts().items():
        own.register(part, thing)
    ways = {"light": (own, "light"), "resume": (own, "resume")}
    if not RUNS[name]:
        ways["policy+reference+Adam"] = _whole(made), "resume"
    taken: dict[str, list[Saved]] = {way: [] for way in ways}
    for step in range(rounds):
        for way, (state, kind) in ways.items():
            place = folder / name / way
            taken[way].append(state.save(place, step, kind=kind, retention=Retention(keep=1)))
            time.sleep(0.5)  # so that writes still pending on the disk do not slow the next checkpoint
    return [
        {"run": name, "kind": way, "bytes": saved[-1].bytes, "seconds": statistics.median(s.seconds for s in saved)}
        for way, saved in taken.items()
    ]


def _whole(made: Learner) -> RunState:
    """A state of the whole policy, a whole reference and Adam."""
    state = RunState()
    state.register("policy", made.policy)
    state.register("reference", deepcopy(made.policy.model))
    state.register("optimizer", made.optimizer)
    return state


if __name__ == "__main__":
    main()
