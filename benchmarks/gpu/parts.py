"""The parts in order of importance, and `run`, which runs one in a process of its own with a time limit.

A part is `main(place, report)` of its module. Results that it has reported are saved even if it fails afterwards.
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
    """A module and its time limit in seconds."""

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
    """The results that the part reported, its `seconds`, and an `error` if it failed or was stopped."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # imported once; the server itself never initialises CUDA
    with tempfile.TemporaryDirectory() as folder:
        path, start = Path(folder) / "results.json", time.monotonic()
        process = context.Process(target=_work, args=(PARTS[name].module, tiny, str(path)))
        process.start()
        process.join(seconds)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if late:
        results["error"] = f"stopped after {seconds:.0f} s"
    elif process.exitcode and "error" not in results:
        results["error"] = f"the process ended with {process.exitcode}"
    return results | {"seconds": round(time.monotonic() - start, 1)}


def _work(module: str, tiny: bool, path: str) -> None:
    from benchmarks.gpu.place import Place

    results: dict[str, Any] = {}

    def report(**more: Any) -> None:
        results.update(more)
        Path(f"{path}.new").write_text(json.dumps(results), encoding="utf-8")
        os.replace(f"{path}.new", path)  # atomic: this process may be stopped at any time

    try:
        importlib.import_module(module).main(Place(tiny), report)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}"[:400]
        report(error=f"{text} ({Path(where.filename).name}:{where.lineno})")
