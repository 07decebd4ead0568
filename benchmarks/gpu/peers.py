"""W1 at GPT-2's shape beside TRL 0.11.4, in turn on this device: A B A B. Left out if TRL is not available.

TRL comes from wheels in the folder that OPERANT_PEER_WHEELS names (`pip download trl==0.11.4 ...`, see REQUIRED) and is
installed in an environment that shares this one's torch; or from the environment that `make bench` creates.
"""

import json
import os
import subprocess
import tempfile
import venv
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.place import Place, queries, scores
from benchmarks.gpu.work import ROWS

ROOT = Path(__file__).parents[2]
REQUIRED = ["trl==0.11.4", "transformers==4.46.3", "accelerate<1.2", "datasets<4", "numpy<2"]
MADE = ROOT / ".venv-trl/bin/python"


def main(place: Place, report: Any) -> None:
    wheels = os.environ.get("OPERANT_PEER_WHEELS")
    if wheels is None and not MADE.exists():
        report(left_out="OPERANT_PEER_WHEELS names no folder with wheels of TRL 0.11.4")
        return
    with tempfile.TemporaryDirectory() as folder:
        python = MADE if wheels is None else installed(Path(folder), Path(wheels))
        for precision in place.sized(("bfloat16", "float32"), ("float32",)):
            report(**{f"{precision}/{k}": v for k, v in turns(place, str(python), precision).items()})


def installed(folder: Path, wheels: Path) -> Path:
    """Install TRL from wheels in a new environment that shares this one's torch; returns its Python."""
    venv.create(folder, with_pip=True, system_site_packages=True)
    python = folder / "bin/python"
    command = [python, "-m", "pip", "install", "-q", "--no-index", "--find-links", wheels, *REQUIRED]
    subprocess.run(command, check=True, capture_output=True)
    return python


def turns(place: Place, python: str, precision: str) -> dict[str, float]:
    """Median seconds of a step of each side, in turn, after two warm-up steps."""
    work = ROWS["W1"]
    prompts, tokens, minibatch = place.sized((32, 24, 8), (4, 4, 2))
    options = {"max_tokens": tokens, "sampling.fixed_length": True, "epochs": work.epochs, "minibatch": minibatch}
    learner = place.learner("gpt2", precision=precision, **options)
    spec = {"prompts": queries(prompts, work.prompt), "tokens": tokens, "minibatch": minibatch, "epochs": work.epochs}
    spec |= {"precision": precision, "device": place.device, "shape": learner.policy.config.to_dict()}
    shape = {name: spec["shape"][name] for name in ("vocab_size", "n_layer", "n_embd", "n_head")}
    spec["shape"] = shape
    side = subprocess.Popen(
        [python, str(Path(__file__).with_name("trl_side.py"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def theirs(line: str) -> dict[str, float]:
        side.stdin.write(line + "\n")
        side.stdin.flush()
        answer = side.stdout.readline()
        if not answer:
            raise RuntimeError("TRL's side has ended; see its output above")
        return json.loads(answer)

    def ours() -> None:
        replies = learner.generate(spec["prompts"])
        learner.step(replies, scores(replies))

    seconds: dict[str, list[float]] = {"ours": [], "trl": []}
    try:
        about = theirs(json.dumps(spec))
        for _ in range(place.sized(7, 2)):
            seconds["ours"].append(place.seconds(ours))
            answer = theirs("step")
            seconds["trl"].append(answer["seconds"])
    finally:
        side.kill()
        side.wait()
    mine, other = (median(values[2:] or values[1:]) for values in seconds.values())
    found = {"seconds": mine, "trl_seconds": other, "speed_ratio": other / mine, "trl_gb": answer["gb"]}
    return found | about
