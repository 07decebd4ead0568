"""The peak memory of a run, estimated before any weight is loaded: `operant doctor --plan RECIPE`.

Nothing here depends on an architecture. The model is built from its config.json with tensors that have no memory
(`fake_tensors.py`), and the largest micro-batch of an update, a forward pass of the reference and one batch of decoding
are run on it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from operant import machine
from operant.data import load_tasks
from operant.memory_plan.fake_tensors import fake_tensors
from operant.memory_plan.model import MemoryModel, config_of, tokenizer_of
from operant.rollouts.chat import encode_prompt
from operant.runs import named_parts
from operant.runs.config import Config
from operant.training.options import find_device
from operant.types import OperantError, shown

SAMPLED = 512
"""Number of tasks whose prompts are measured."""
PROGRAM = 0.08e9
"""Bytes that the program itself takes while it runs, beyond its imports."""
HEAP = 1.25
"""Memory that the C library's heap takes for activations, gaps included, as a multiple of their size."""
FULL = 0.9
"""Largest share of the memory that a run may take to fit: the system and the reward's models need some, too."""


@dataclass(frozen=True)
class Shape:
    """The sizes of the largest computations of a run."""

    prompt: int
    """Tokens of the longest prompt."""
    reply: int
    """Tokens of the longest reply."""
    batch: int
    """Replies per step."""
    rows: int
    """Rows of the largest micro-batch."""
    micro_batches: int
    """Micro-batches of the largest minibatch."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by what they are used for: during the whole run, and in addition in each phase of a step."""

    shape: Shape
    permanent: dict[str, float]
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    device: str = "cpu"
    limit: float | None = None
    """Bytes of memory that the device has; None if unknown."""
    loading: float = 0.0
    """Bytes while the weights are read, before anything else is allocated: the weights and the file they are in."""

    @property
    def peak(self) -> float:
        return max(self.loading, sum(self.permanent.values()) + max(sum(p.values()) for p in self.phases.values()))

    @property
    def fits(self) -> bool:
        return self.limit is None or self.peak < FULL * self.limit

    def remedy(self) -> str:
        """How to make the largest part smaller."""
        phase = max(self.phases.values(), key=lambda parts: sum(parts.values()))
        sizes = {name: size for name, size in (self.permanent | phase).items() if name in REMEDIES}
        return REMEDIES[max(sizes, key=lambda name: sizes[name])]


TRAIN_LESS = "train less of the model: --preset trunk, or --lora.rank 16; reference and optimizer then hold only that"
REMEDIES = {
    "weights": "take a smaller model, or --model.precision bfloat16",
    "reference": TRAIN_LESS,
    "optimizer": TRAIN_LESS,
    "gradients": TRAIN_LESS,
    "activations": "compute fewer tokens at once: --update.micro-tokens 2048; or --model.gradient-checkpointing true",
    "forward pass": "compute fewer tokens at once: --update.micro-tokens 2048",
    "cache": "decode fewer or shorter replies at once: --batch, --sampling.max-tokens",
    "cached hidden states": "--model.states-gb 0 computes them again in every pass",
}
"""The remedy for a part that is the largest."""


def plan(config: Config, *, tokenizer: Any = None) -> MemoryPlan:
    """Estimate the memory that a run of this configuration will take.

    Raises: OperantError for a model, tasks or options that the run would refuse, too.
    """
    if named_parts.is_object("policy", config.train.policy):
        raise OperantError(
            f"policy {shown(config.train.policy)} is made by a class or function, whose memory cannot be estimated "
            "before it runs: plan the model that it is built on with --policy"
        )
    model_config = config_of(config.train.policy)
    tokenizer = config.learner["model"].templated(tokenizer or tokenizer_of(config.train.policy))
    shape = _shape(config, model_config, tokenizer)
    device = find_device(config.learner["learner"].device)
    with fake_tensors() as memory:
        model = MemoryModel(model_config, config, memory)
        permanent, frozen = model.permanent(), 0.0
        if model.policy.trunk is not None:
            size = shape.batch * (shape.prompt + shape.reply) * model.bytes_of_state
            within = size <= config.learner["model"].states_gb * 1e9  # beyond the limit none is cached
            permanent["cached hidden states"] = size if within else 0.0
            frozen = permanent["weights"] - permanent["reference"]
        phases = {
            "generation": model.generation(min(shape.batch, 256), shape.prompt, shape.reply),
            "scoring": model.scoring(shape.rows, shape.prompt, shape.reply),
            "update": model.update(shape.rows, shape.prompt, shape.reply, accumulates=shape.micro_batches > 1),
        }
    permanent, loading = {name: size for name, size in permanent.items() if size}, 0.0
    if device.type == "cpu":
        permanent["program"] = PROGRAM
        phases["update"]["activations"] *= HEAP
        # A trunk computes one gradient of all its frozen weights, to find out which they are.
        loading = PROGRAM + permanent["weights"] + max(permanent["weights"], HEAP * frozen)
    on_gpu = device.type == "cuda"
    size = torch.cuda.get_device_properties(device).total_memory if on_gpu else machine.size_gb() * 1e9
    return MemoryPlan(shape, permanent, phases, str(device), size, loading)


def _shape(config: Config, model_config: Any, tokenizer: Any) -> Shape:
    train, update, reply = config.train, config.learner["update"], config.learner["sampling"].max_tokens
    limited = replace(config.data, limit=min(config.data.limit or SAMPLED, SAMPLED))
    source = named_parts.source(train.tasks, config.parts.get("tasks", {}))
    tasks = load_tasks(source, tokenizer, limited, config.learner["learner"].seed, max_new=reply)
    prompt = max(len(encode_prompt(tokenizer, task.prompt)) for task in tasks)
    minibatch = min(getattr(update, "minibatch", None) or train.batch, train.batch)
    rows = min(minibatch, max(1, update.micro_tokens // (prompt + reply)))
    return Shape(prompt, reply, train.batch, rows, -(-minibatch // rows))


def lines(memory: MemoryPlan) -> Iterator[str]:
    """Yield the lines of the table that `operant doctor --plan` prints."""
    shape = memory.shape
    yield (
        f"prompts of up to {shape.prompt} tokens, replies of {shape.reply}; {shape.batch} replies per step, "
        f"{shape.rows} rows in the largest micro-batch"
    )
    for name, size in memory.permanent.items():
        yield _line(name, size)
    for phase, parts in memory.phases.items():
        note = ", ".join(f"{name} {_gb(size)}" for name, size in parts.items())
        yield _line(f"during {phase}", sum(parts.values()), note)
    if memory.loading:
        yield _line("while loading", memory.loading)
    limit = f"{memory.device} has {_gb(memory.limit)} GB" if memory.limit else memory.device
    yield _line("at the peak", memory.peak, limit)
    if not memory.fits:
        yield f"  this does not fit: {memory.remedy()}"


def _line(name: str, size: float, note: str = "") -> str:
    return f"  {name:28} {_gb(size):>8} GB   {note}".rstrip()


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"
