"""How much memory a run will take at its peak, before any weight is loaded: `operant doctor --plan RECIPE`.

Nothing is written down about architectures. The model is made from its config.json with tensors that have no memory
(`phantom.py`), and the largest micro-batch of an update, the reference's pass and one batch of decoding are run on it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from operant import machine
from operant.data import load_tasks
from operant.memory_plan.model import Sketch, config_of, tokenizer_of
from operant.memory_plan.phantom import phantoms
from operant.rollouts.chat import encode_prompt
from operant.runs.config import Config
from operant.training.options import find_device

SAMPLED = 512
"""Tasks whose prompts are measured."""
PROGRAM = 0.08e9
"""Bytes that the program itself takes while it runs, beyond its imports."""
HEAP = 1.25
"""Times the memory of activations that the C library's heap takes for them, with the holes between."""
FULL = 0.9
"""Share of the memory above which a run is told not to fit: the system and the reward's models want some, too."""


@dataclass(frozen=True)
class Shape:
    """The largest pieces that a run computes at once."""

    prompt: int
    reply: int
    batch: int
    """Replies a step."""
    rows: int
    """Rows of the largest micro-batch."""
    micro_batches: int
    """Of the largest minibatch."""


@dataclass(frozen=True)
class Plan:
    """Bytes by what holds them: for the whole run, and in each phase on top."""

    shape: Shape
    held: dict[str, float]
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    device: str = "cpu"
    limit: float | None = None
    """Bytes that the device has; None where nobody tells."""
    loading: float = 0.0
    """Bytes while the weights are read, before anything else is there: they stand beside the file that they are in."""

    @property
    def peak(self) -> float:
        return max(self.loading, sum(self.held.values()) + max(sum(p.values()) for p in self.phases.values()))

    @property
    def fits(self) -> bool:
        return self.limit is None or self.peak < FULL * self.limit

    def remedy(self) -> str:
        """What makes the largest part smaller."""
        parts = max(self.phases.values(), key=lambda parts: sum(parts.values()))
        known = {name: size for name, size in (self.held | parts).items() if name in REMEDIES}
        return REMEDIES[max(known, key=lambda name: known[name])]


TRAIN_LESS = "train less of the model: --preset trunk, or --lora.rank 16; reference and optimizer then hold only that"
REMEDIES = {
    "weights": "take a smaller model, or --model.precision bfloat16",
    "reference": TRAIN_LESS,
    "optimizer": TRAIN_LESS,
    "gradients": TRAIN_LESS,
    "activations": "compute fewer tokens at once: --update.micro-tokens 2048; or --model.gradient-checkpointing true",
    "a pass": "compute fewer tokens at once: --update.micro-tokens 2048",
    "cache": "decode fewer or shorter replies at once: --batch, --sampling.max-tokens",
    "trunk states": "--model.states-gb 0 computes them again in every pass",
}
"""What to do about a part that is the largest."""


def plan(config: Config, *, tokenizer: Any = None) -> Plan:
    """The memory that a run of this configuration will take.

    Raises: OperantError for a model, tasks or options that the run would refuse, too.
    """
    model_config = config_of(config.train.policy)
    shape = _shape(config, model_config, tokenizer or tokenizer_of(config.train.policy))
    device = find_device(config.learner["learner"].device)
    on_cpu = device.type == "cpu"
    with phantoms() as memory:
        sketch = Sketch(model_config, config, memory)
        held, frozen = sketch.held(), 0.0
        if sketch.policy.trunk is not None:
            held["trunk states"] = _states(config, sketch, shape)
            frozen = held["weights"] - held["reference"]
        phases = {
            "generation": sketch.generation(min(shape.batch, 256), shape.prompt, shape.reply),
            "observation": sketch.observation(shape.rows, shape.prompt, shape.reply),
            "update": sketch.update(shape.rows, shape.prompt, shape.reply, again=shape.micro_batches > 1),
        }
    held = {name: size for name, size in held.items() if size} | ({"the program": PROGRAM} if on_cpu else {})
    phases["update"]["activations"] *= HEAP if on_cpu else 1.0
    # A trunk finds out what lies below it by one gradient of all of that.
    beside = max(held["weights"], HEAP * frozen) if on_cpu else 0.0
    loading = PROGRAM + held["weights"] + beside if on_cpu else 0.0
    return Plan(shape, held, phases, str(device), _limit(device), loading)


def _shape(config: Config, model_config: Any, tokenizer: Any) -> Shape:
    train, update, reply = config.train, config.learner["update"], config.learner["sampling"].max_tokens
    limited = replace(config.data, limit=min(config.data.limit or SAMPLED, SAMPLED))
    tasks = load_tasks(train.tasks, tokenizer, limited, config.learner["learner"].seed, max_new=reply)
    prompt = max(len(encode_prompt(tokenizer, task.prompt)) for task in tasks)
    together = min(update.minibatch or train.batch, train.batch)
    rows = min(together, max(1, update.micro_tokens // (prompt + reply)))
    return Shape(prompt, reply, train.batch, rows, -(-together // rows))


def _states(config: Config, sketch: Sketch, shape: Shape) -> float:
    """Kept trunk states of a step; none where they are more than their budget."""
    size = shape.batch * (shape.prompt + shape.reply) * sketch.width
    return size if size <= config.learner["model"].states_gb * 1e9 else 0.0


def _limit(device: torch.device) -> float | None:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    size = machine.size_gb()
    return None if size is None else size * 1e9


def lines(made: Plan) -> Iterator[str]:
    """The table, as `operant doctor --plan` prints it."""
    s = made.shape
    yield (
        f"prompts of up to {s.prompt} tokens, replies of {s.reply}; {s.batch} replies a step, "
        f"{s.rows} rows in the largest micro-batch"
    )
    for name, size in made.held.items():
        yield _line(name, size)
    for phase, parts in made.phases.items():
        yield _line(f"while {phase} lasts", sum(parts.values()), ", ".join(f"{k} {_gb(v)}" for k, v in parts.items()))
    if made.loading:
        yield _line("loading, before all that", made.loading)
    yield _line("at the peak", made.peak, f"{made.device} has {_gb(made.limit)} GB" if made.limit else made.device)
    if not made.fits:
        yield f"  this does not fit: {made.remedy()}"


def _line(name: str, size: float, note: str = "") -> str:
    return f"  {name:28} {_gb(size):>8} GB   {note}".rstrip()


def _gb(size: float | None) -> str:
    return f"{(size or 0.0) / 1e9:.2f}"
