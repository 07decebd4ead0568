"""The workloads of the comparison, in bfloat16 on this device: operant, and the plain loop in torch beside it.

Works as in the CPU benchmark: W1 in full, W2 with a trunk, W3 ragged, W4 small, W5 groups; `-1b` is the 1B shape.
"""

import random
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from benchmarks.gpu import peak
from benchmarks.gpu.place import Place, queries, scores
from benchmarks.gpu.plain import Plain
from benchmarks.peers.ragged import Forced
from operant import Task
from operant.sampling import task_key


@dataclass(frozen=True)
class Work:
    """A training step of fixed size."""

    model: str = "gpt2"
    prompts: int = 32
    prompt: int = 8
    tokens: int = 24
    epochs: int = 4
    minibatch: int = 8
    samples: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    algorithm: str = "ppo"
    lengths: tuple[int, int] | None = None
    """Replies end at lengths drawn from here, the same in every step; None: all have `tokens`."""


TRUNK = {"model.train_layers": "auto"}
GROUPS = Work(prompts=8, samples=8, epochs=1, minibatch=64, options={"kl.coef": 0.0})
ROWS = {
    "W1": Work(),
    "W2": Work(options=TRUNK),
    "W1-1b": Work("llama-1b"),
    "W2-1b": Work("llama-1b", options=TRUNK),
    "W3": Work(prompts=128, tokens=64, lengths=(4, 64)),
    "W4": Work("small", 256, minibatch=32),
    "W4t": Work("small", 256, minibatch=32, options=TRUNK),
    "W5b-grpo": replace(GROUPS, algorithm="grpo"),
    "W5b-rloo": replace(GROUPS, algorithm="rloo"),
}


def main(place: Place, report: Any) -> None:
    found: dict[str, Any] = {}
    good = True
    for name, work in ROWS.items():
        work = place.sized(work, replace(work, prompts=4, tokens=4, minibatch=4 * work.samples // 2))
        try:
            found |= {f"{name}/{k}": v for k, v in ours(place, work).items()}
            twin = next((n for n, w in ROWS.items() if w.model == work.model), name)
            if work.lengths is not None:
                report(**found, good=good)
                continue  # the plain loop cannot generate such replies
            if work.algorithm == "ppo" and twin == name:
                found |= {f"{name}/plain_{k}": v for k, v in plain(place, work).items()}
            if work.algorithm == "ppo":
                found[f"{name}/speed_ratio"] = found[f"{twin}/plain_seconds"] / found[f"{name}/seconds"]
                found[f"{name}/memory_ratio"] = found[f"{name}/gb"] / max(found[f"{twin}/plain_gb"], 1e-9)
        except Exception as error:
            found[f"{name}/error"], good = f"{type(error).__name__}: {error}"[:300], False
        report(**found, good=good)


def ours(place: Place, work: Work) -> dict[str, float]:
    """Median seconds of a step and its phases after two warm-up steps, and the peak memory above that before."""
    before = peak.reset()
    options = {"max_tokens": work.tokens, "sampling.fixed_length": work.lengths is None, "update.epochs": work.epochs}
    learner = place.learner(
        work.model, algorithm=work.algorithm, **options, **{"minibatch": work.minibatch}, **work.options
    )
    prompts = [q for q in queries(work.prompts, work.prompt) for _ in range(work.samples)]
    times: dict[str, list[float]] = {}

    def step() -> None:
        replies = _ragged(learner, work) if work.lengths is not None else learner.generate(prompts)
        metrics = learner.step(replies, scores(replies))
        for phase in ("generate", "observe", "update"):
            times.setdefault(phase, []).append(metrics[f"time/{phase}"])

    seconds = _timed(place, step)
    phases = {f"{name}_seconds": median(values[-len(seconds) :]) for name, values in times.items()}
    return {"seconds": median(seconds), "spread": max(seconds) - min(seconds), "gb": peak.most() - before, **phases}


def _ragged(learner: Any, work: Work) -> Any:
    """Replies of drawn lengths, which only the sampling of a token can see."""
    tasks = [Task(f"{i}", ids) for i, ids in enumerate(queries(work.prompts, work.prompt))]
    keys = [task_key(learner.own.seed, "train", learner.progress.step, task.id) for task in tasks]
    draw, (least, most) = random.Random(0), work.lengths or (1, 1)
    lengths = [min(draw.randint(least, most), work.tokens) for _ in tasks]
    return learner.play(tasks, sampling=Forced(**vars(learner.sampling)).prepare(keys, lengths))


def plain(place: Place, work: Work) -> dict[str, float]:
    """Median seconds of a step of the plain loop, and its peak memory."""
    before = peak.reset()
    loop = Plain(place.model(work.model, "float32"), place.sized("bfloat16", "float32"))
    prompts = queries(work.prompts, work.prompt)
    seconds = _timed(place, lambda: loop.step(prompts, work.tokens, epochs=work.epochs, minibatch=work.minibatch))
    return {"seconds": median(seconds), "spread": max(seconds) - min(seconds), "gb": peak.most() - before}


def _timed(place: Place, step: Any) -> list[float]:
    for _ in range(place.sized(2, 1)):
        step()
    return [place.seconds(step) for _ in range(place.sized(5, 1))]
