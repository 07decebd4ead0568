"""The peak memory of a run, estimated before any weight is loaded: `operant doctor --plan RECIPE`.

Nothing here depends on an architecture. The model is built from its config.json with tensors that have no memory
(`fake_tensors.py`), and the largest micro-batch of an update, a forward pass of the reference and one batch of decoding
are run on it. What the imports take is not guessed: this process imports what the run does, and looks at itself.

Without a GPU, the peak is that of the whole process (`top`'s RES). Not in it: the processes of isolated rewards and
worlds, and what a reward, engine or environment of your own loads. On a GPU, it is the memory of the device, and the
process's own memory stands beside it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import psutil
import torch

from operant import machine
from operant.algorithms import find
from operant.data import load_tasks
from operant.data.demonstrations import Demonstrations
from operant.data.sources import share, split_off
from operant.rewards import NAMES as BUILT_IN
from operant.rewards import parts_of, resolve
from operant.rewards.classifier import Classifier
from operant.runs import named_parts
from operant.runs.config import Config
from operant.runs.evaluate import MICRO_TOKENS
from operant.sampling import encode_prompt
from operant.tools.memory_plan.fake_tensors import fake_tensors
from operant.tools.memory_plan.model import MemoryModel, bytes_of, classifier_memory, config_of, tokenizer_of
from operant.training.options import find_device
from operant.types import OperantError, Tokenizer, require, shown

SAMPLED = 512
"""Number of tasks whose prompts are measured."""
PROGRAM = 0.08e9
"""Bytes that the program itself takes while it runs, beyond its imports: code of kernels, records of the last steps."""
RECORDS = 600.0
"""Bytes per token of a step's replies: numbers in lists and in the batch, and the rows of the page."""
DECODED = 256
"""Rows that are decoded at a time, unless `engine.batch` says another number."""
HEAP = 1.25
"""Memory that the C library's heap takes for activations, gaps included, as a multiple of their size."""
FULL = 0.9
"""Largest share of the memory that a run may take to fit: the system needs some, too."""


@dataclass(frozen=True)
class Shape:
    """The sizes of the largest computations of a run."""

    prompt: int
    """Tokens of the longest prompt."""
    reply: int
    """Tokens of the longest reply."""
    batch: int
    """Replies per step."""
    held_out: int
    """Replies of an evaluation; 0: there is none."""
    rows: int
    """Rows of the largest micro-batch of an update."""
    scored: int
    """Rows of the largest micro-batch of a pass without gradients."""
    micro_batches: int
    """Micro-batches of the largest minibatch."""
    at_once: int
    """Rows that the engine decodes at a time."""

    @property
    def decoded(self) -> int:
        """Rows of the largest batch of decoding."""
        return min(max(self.batch, self.held_out), self.at_once)

    @property
    def tokens(self) -> int:
        """Tokens of all replies of a step, prompts included."""
        return self.batch * (self.prompt + self.reply)


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
    host: float | None = None
    """Bytes of the process itself where `permanent` and `phases` are of another device."""

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
    "replies": "generate fewer or shorter replies in a step: --batch, --sampling.max-tokens",
    "reward models": "take a smaller classifier, or one of its calls with fewer texts: --reward.batch 8",
    "cache": "decode fewer or shorter replies: --batch, --engine native --engine.batch 64, --sampling.max-tokens",
    "gathered weights": "each GPU has the whole weights while it generates and scores: take GPUs with more memory, a "
    "smaller model, or --model.precision bfloat16",
    "cached hidden states": "--model.states-gb 0 computes them again in every pass",
}
"""The remedy for a part that is the largest."""


@dataclass(frozen=True)
class MeasuredRun:
    """What a run of this configuration allocates, in bytes, wherever it runs; made by `measure`."""

    shape: Shape
    permanent: dict[str, float]
    phases: dict[str, dict[str, float]]
    gradients: float
    """Of all trained weights."""
    units: tuple[float, float]
    """Of the largest block, and of all weights that are in no block."""
    imports: float
    """Of this process, which has imported what a run imports."""


def plan(config: Config) -> MemoryPlan:
    """Estimate the memory that a run of this configuration will take in one process on this machine.

    On a CPU the memory of this process now is part of it: see `cli/doctor.py`, which imports first what a run imports.

    Raises: OperantError for a model, tasks or options that the run would refuse, too.
    """
    device, measured = find_device(config.learner["learner"].device), measure(config)
    shape, permanent, phases = measured.shape, measured.permanent, measured.phases
    # The file, of float32 most likely, is mapped.
    itemsize = config.learner["model"].dtype.itemsize
    read = permanent["weights"] * (1 + 4 / itemsize)
    program = {"imports": measured.imports, "program": PROGRAM, "replies": RECORDS * shape.tokens}
    permanent = {name: size for name, size in permanent.items() if size}
    if device.type != "cpu":
        size = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        return MemoryPlan(shape, permanent, phases, str(device), size, host=sum(program.values()) + read)
    phases["update"]["activations"] *= HEAP
    # What generation has freed has other sizes than what scoring needs, so the heap grows by both.
    phases["generation and scoring"] = phases.pop("generation") | phases.pop("scoring")
    loading = measured.imports + PROGRAM + read
    return MemoryPlan(shape, permanent | program, phases, str(device), machine.size_gb() * 1e9, loading)


def measure(config: Config, *, ranks: int = 1, gpu: bool = False) -> MeasuredRun:
    """Measure one of so many ranks on tensors without memory.

    gpu: every classifier is on the device of the policy, and activations are measured beside all gradients, so that
    they can be scaled to another number of rows: for one micro-batch this is more than the peak.

    Raises: OperantError as `plan`.
    """
    if named_parts.is_object("policy", config.train.policy):
        why = "whose memory cannot be estimated before it runs: plan the model that it is built on with --policy"
        raise OperantError(f"policy {shown(config.train.policy)} is made by a class or function, {why}")
    model_config = config_of(config.train.policy)
    tokenizer = config.learner["model"].templated(tokenizer_of(config.train.policy))
    shape = shape_of(config, lengths_of(config, bool(model_config.is_encoder_decoder), tokenizer), ranks)
    device = find_device(config.learner["learner"].device)
    with explained(config.train.policy), fake_tensors() as memory:
        model = MemoryModel(model_config, config, memory)
        given = find(config.train.algorithm).rows["with_replies"]  # the longest reply may be to another prompt
        if not given and (why := model.policy.misfit(shape.prompt, shape.reply)) is not None:
            how = "plan others with --prompt-tokens or --sampling.max-tokens"
            raise OperantError(f"{shown(config.train.policy)}: the longest prompt {why}; {how}")
        classifiers = _classifiers(config.train.reward, config.parts.get("reward", {}))
        here = [c for c in classifiers if gpu or torch.device(c.device).type == device.type]
        judges = sum(classifier_memory(c, shape.prompt + shape.reply, memory) for c in here)
        # The classes of the models are imported by now, and by the command the tools of a run: the process is measured.
        imports = float(psutil.Process().memory_info().rss)
        permanent = model.permanent() | {"reward models": judges}
        if model.policy.trunk is not None:
            size = shape.batch * (shape.prompt + shape.reply) * model.bytes_of_state
            within = size <= config.learner["model"].states_gb * 1e9  # beyond the limit none is cached
            permanent["cached hidden states"] = size if within else 0.0
        prompt = shape.prompt + len(model.policy.virtual)
        phases = {
            "generation": model.generation(shape.decoded, prompt, shape.reply),
            "scoring": model.scoring(shape.scored, prompt, shape.reply),
            "update": model.update(shape.rows, prompt, shape.reply, accumulates=shape.micro_batches > 1 or gpu),
        }
        gradients, units = bytes_of(model.trained), model.units()
    return MeasuredRun(shape, permanent, phases, gradients, units, imports)


@contextmanager
def explained(policy: object) -> Iterator[None]:
    """Turn an exception inside this context, whose computations are those of a run, into a sentence on the model."""
    try:
        yield
    except OperantError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:200]
        raise OperantError(
            f"{shown(policy)} makes no language model that can be planned ({type(error).__name__}: {why}): are the "
            "sizes in its config.json right, and does it generate text?"
        ) from error


def lengths_of(config: Config, whole: bool, tokenizer: Tokenizer | None) -> tuple[int, int, int]:
    """Tokens of the longest prompt and reply, and replies of an evaluation. whole: for an encoder-decoder."""
    train, seed = config.train, config.learner["learner"].seed
    limited = replace(config.data, limit=min(config.data.limit or SAMPLED, SAMPLED))
    forms, reply = find(train.algorithm).rows, config.learner["sampling"].max_tokens
    require(train.replies is None, "replies: plan with --tasks of the same prompts, and their --sampling.max-tokens")
    parts = {kind: config.parts.get(kind, {}) for kind in ("tasks", "env", "form")}
    forms = forms | {"form": named_parts.form(train.form, parts["form"]), "cue": not whole}
    env = named_parts.make("env", train.env, parts["env"]) if train.tasks is None else None
    source, held_out_source = named_parts.sources(train, parts["tasks"], env)
    tasks = load_tasks(source, tokenizer, limited, seed, max_new=reply, **forms)
    if forms["with_replies"]:
        given = Demonstrations(tokenizer, None, config.data.loss_on == "all", config.data.max_length, whole)
        turns = [turn for rollout in given.rollouts(tasks) for turn in rollout.turns]
        prompt, reply = max(len(turn.prompt) for turn in turns), 1 + max(len(turn.action) for turn in turns)
    else:
        prompt = max(len(encode_prompt(tokenizer, task.prompt)) for task in tasks)
    held_out = 0
    if held_out_source:
        rows = load_tasks(held_out_source, tokenizer, config.data, seed, max_new=reply, **forms)
        rows = rows if (part := share(train.evaluate)) is None else split_off(rows, part, seed)[1]
        held_out = len(rows) * config.evaluation.samples * max(1, len(config.evaluation.seeds))
    return prompt, reply, held_out


def shape_of(config: Config, lengths: tuple[int, int, int], ranks: int = 1) -> Shape:
    """The sizes on one of so many ranks. lengths: of prompts and replies, and the replies of an evaluation."""
    (prompt, reply, held_out), update = lengths, config.learner["update"]
    minibatch = min(getattr(update, "minibatch", None) or config.train.batch, config.train.batch)
    batch, minibatch, held_out = (-(-count // ranks) for count in (config.train.batch, minibatch, held_out))
    whole = prompt + reply
    rows = min(minibatch, max(1, update.micro_tokens // whole))
    scored = max(min(batch, update.micro_tokens // whole), min(held_out, MICRO_TOKENS // whole), 1)
    at_once = config.parts.get("engine", {}).get("batch", DECODED)
    return Shape(prompt, reply, batch, held_out, rows, scored, -(-minibatch // rows), at_once)


def _classifiers(spec: object, options: Mapping[str, object]) -> list[Classifier]:
    """The classifiers of a reward. A class or function of your own is not called: it may load something."""
    if isinstance(spec, Mapping):
        return [c for part, own in spec.items() for c in _classifiers(part, own if isinstance(own, Mapping) else {})]
    if isinstance(spec, str) and spec.strip().partition(":")[0] in BUILT_IN:
        spec = resolve(spec, {name: value for name, value in options.items() if name != "weight"})
    return parts_of(spec, Classifier)


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
    if memory.host is not None:
        yield _line("of the process itself", memory.host, "not on the device")
    limit = f"{memory.device} has {_gb(memory.limit)} GB" if memory.limit else memory.device
    yield _line("at the peak", memory.peak, limit)
    if not memory.fits:
        yield f"  this does not fit: {memory.remedy()}"


def _line(name: str, size: float, note: str = "") -> str:
    return f"  {name:28} {_gb(size):>8} GB   {note}".rstrip()


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f}"
