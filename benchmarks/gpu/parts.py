"""The parts, in the order in which they matter, and how one is run: in a process of its own, until its time is up.

A part is `main(place, tell)` of its module. What it tells is kept, even where it fails afterwards.
"""

import importlib
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Part:
    """A module, and the seconds that it may take."""

    module: str
    seconds: float


PARTS = {
    "machine": Part("benchmarks.gpu.machine", 25),
    "correct": Part("benchmarks.gpu.correct", 60),
    "head": Part("benchmarks.gpu.head", 30),
    "decode": Part("benchmarks.gpu.decode", 75),
    "flops": Part("benchmarks.gpu.flops", 60),
    "packed": Part("benchmarks.gpu.packed", 60),
    "reviews": Part("benchmarks.gpu.reviews", 75),
    "work": Part("benchmarks.gpu.work", 90),
    "recovery": Part("benchmarks.gpu.recovery", 30),
    "large": Part("benchmarks.gpu.large", 120),
    "scale": Part("benchmarks.gpu.scale", 40),
    "peers": Part("benchmarks.gpu.peers", 120),
}
PRELOADED = [
    "operant.training.learner",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt_neo.modeling_gpt_neo",
    "transformers.models.gpt_neox.modeling_gpt_neox",
]


def run(name: str, tiny: bool, seconds: float) -> dict[str, Any]:
    """What the part told, its `seconds`, and the `error` where it failed or was stopped."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # imported once; the server itself never touches CUDA
    with tempfile.TemporaryDirectory() as folder:
        path, start = Path(folder) / "told.json", time.monotonic()
        process = context.Process(target=_work, args=(PARTS[name].module, tiny, str(path)))
        process.start()
        process.join(seconds)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        told = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if late:
        told["error"] = f"stopped after {seconds:.0f} s"
    elif process.exitcode and "error" not in told:
        told["error"] = f"the process ended with {process.exitcode}"
    return told | {"seconds": round(time.monotonic() - start, 1)}


def _work(module: str, tiny: bool, path: str) -> None:
    from benchmarks.gpu.place import Place

    told: dict[str, Any] = {}

    def tell(**more: Any) -> None:
        told.update(more)
        Path(f"{path}.new").write_text(json.dumps(told), encoding="utf-8")
        os.replace(f"{path}.new", path)  # whole or absent, whenever this process is stopped

    try:
        importlib.import_module(module).main(Place(tiny), tell)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}"[:400]
        tell(error=f"{text} ({Path(where.filename).name}:{where.lineno})")
