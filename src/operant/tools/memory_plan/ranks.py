"""The memory of each of several ranks, on GPUs that need not be here: `operant doctor --plan --gpus 8 --gpu h200`.

With `learner.parallel=ddp` every rank has all of it, and a bucket for each gradient, which torch sums over the ranks.
With `fsdp` a rank has its rows of the weights, of the reference, of the gradients and of the optimizer's states. The
whole weights exist besides while replies are generated and scored, and some blocks at a time during an update.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from operant import machine
from operant.runs.config import Config
from operant.tools.memory_plan import FULL, HEAP, PROGRAM, RECORDS, MeasuredRun, MemoryPlan, shape_of

KINDS = {
    "ddp": ("ddp", "none"),
    "fsdp": ("fsdp", "none"),
    "+ reference": ("fsdp", "reference"),
    "+ optimizer": ("fsdp", "optimizer"),
    "+ both": ("fsdp", "both"),
}
"""The ways to divide a run over ranks, as `learner.parallel` and `learner.offload`."""
CONTEXT = 1.5e9
"""Bytes of a GPU that CUDA, the kernels and the buffers of NCCL take: an estimate, not measured here."""
GATHERED = 2
"""Blocks that are gathered at a time: one computes while the next one comes."""


@dataclass(frozen=True)
class Gpu:
    """A GPU by its maker's numbers, for a plan or a simulation."""

    name: str
    memory: float
    """Bytes."""
    rate: float
    """Dense bfloat16 operations a second."""
    bandwidth: float
    """Bytes a second that it reads of its memory."""


GPUS = {
    "a100-40": Gpu("A100 40 GB", 40e9, 312e12, 1.555e12),
    "a100-80": Gpu("A100 80 GB", 80e9, 312e12, 2.039e12),
    "h100": Gpu("H100 80 GB", 80e9, 989e12, 3.35e12),
    "h200": Gpu("H200 141 GB", 141e9, 989e12, 4.8e12),
    "l4": Gpu("L4 24 GB", 24e9, 121e12, 0.3e12),
    "l40s": Gpu("L40S 48 GB", 48e9, 362e12, 0.864e12),
    "rtx4090": Gpu("RTX 4090 24 GB", 24e9, 165e12, 1.008e12),
    "mi250x": Gpu("MI250X 64 GB, one die", 64e9, 191.5e12, 1.6e12),
    "mi300x": Gpu("MI300X 192 GB", 192e9, 1307e12, 5.3e12),
}
"""Memory, dense bfloat16 rate and memory bandwidth are the makers' numbers: NVIDIA's data sheets "A100 Tensor Core GPU"
(2021; SXM), "H100 Tensor Core GPU" (2023; SXM, half of the rate that is given with sparsity), "H200 Tensor Core GPU"
(2023; SXM), "L40S" (2023), "L4" (2023) and "Ada GPU architecture" (2022; RTX 4090, products with float32 sums); AMD's
data sheets "Instinct MI250X" (2021; one of its two dies, which torch sees as a GPU each) and "Instinct MI300X" (2023).
"""


def on_ranks(config: Config, measured: MeasuredRun, ranks: int, kind: str, gpu: Gpu | None) -> MemoryPlan:
    """The memory of one of so many ranks. gpu: None for processes of this machine, which share its memory.

    measured: by `measure` for another number of ranks, too. Phases of more rows are scaled up with them, which is more
    than they take; those of fewer rows are not scaled down.
    """
    parallel, offload = KINDS[kind] if ranks > 1 else KINDS["ddp"]  # one process divides nothing
    share = 1.0 if parallel == "ddp" else 1.0 / ranks
    old, lengths = measured.shape, (measured.shape.prompt, measured.shape.reply, 0)
    shape = replace(old, **vars(shape_of(config, lengths, ranks)) | {"held_out": old.held_out})
    rows = {"generation": shape.decoded / old.decoded, "scoring": shape.scored / old.scored}
    rows["update"] = shape.rows / old.rows
    phases = {name: {k: v * max(rows[name], 1.0) for k, v in parts.items()} for name, parts in measured.phases.items()}
    undivided, heap = ("reward models", "cached hidden states", "weight samples"), HEAP if gpu is None else 1.0
    permanent = {name: size * (1.0 if name in undivided else share) for name, size in measured.permanent.items()}
    if "cached hidden states" in permanent:
        permanent["cached hidden states"] *= max(shape.batch / old.batch, 1.0)
    if kept := phases["update"]["gradients"]:
        phases["update"]["gradients"] = measured.gradients * share
    phases["update"]["activations"] *= heap
    whole = measured.permanent["weights"] + measured.permanent["critic network"]
    host = measured.imports + PROGRAM + RECORDS * shape.tokens
    if parallel == "ddp" and ranks > 1:
        permanent["buckets of gradients"] = measured.gradients
    elif parallel == "fsdp":
        block, rest = measured.units
        phases["generation"]["gathered weights"] = whole
        phases["scoring"]["gathered weights"] = whole + measured.permanent["reference"]
        phases["update"]["gathered weights"] = rest + GATHERED * block
        # The gradients of what is gathered, before their sum, and that sum in float32.
        phases["update"]["gradients"] += 2.0 * min(1.0, measured.gradients / whole) * (rest + block) * bool(kept)
        away = {"optimizer": ("weights", "critic network", "optimizer"), "reference": ("reference", "other copies")}
        for part in (name for what in away if offload in (what, "both") for name in away[what]):
            if gpu is not None:
                host += permanent.pop(part)
    if gpu is None:
        permanent |= {"imports": measured.imports, "program": PROGRAM, "replies": RECORDS * shape.tokens}
        phases["generation and scoring"] = phases.pop("generation") | phases.pop("scoring")  # as in `plan`
        name, limit, host = "cpu", machine.size_gb() * 1e9 / ranks, None
    else:
        permanent["CUDA and NCCL"] = CONTEXT
        name, limit = gpu.name, gpu.memory
    permanent = {part: size for part, size in permanent.items() if size}
    return MemoryPlan(shape, permanent, phases, name, limit, host=host)


def least(config: Config, measured: MeasuredRun, kind: str, gpu: Gpu) -> int | None:
    """The smallest power of two of GPUs that the run fits on; None if 4,096 do not suffice, or prompts."""
    prompts = config.train.batch // config.train.samples
    counts = [2**k for k in range(13) if 2**k <= prompts]
    return next((n for n in counts if on_ranks(config, measured, n, kind, gpu).fits), None)


def table(config: Config, measured: MeasuredRun, ranks: int, gpu: Gpu, wanted: str) -> Iterator[str]:
    """Yield the lines that `operant doctor --plan --gpus N --gpu NAME` prints. wanted: the way that the run chooses."""
    plans = {kind: on_ranks(config, measured, ranks, kind, gpu) for kind in KINDS}
    shape = plans[wanted].shape
    yield (
        f"{ranks} x {gpu.name}; prompts of up to {shape.prompt} tokens, replies of {shape.reply}; {shape.batch} "
        f"replies a rank and step, {shape.rows} rows in its largest micro-batch; GB of each rank, with --parallel ddp, "
        "fsdp, and fsdp with --offload:"
    )
    yield _row("", KINDS)
    for name in dict.fromkeys(name for plan in plans.values() for name in plan.permanent):
        yield _row(name, (_gb(plan.permanent.get(name, 0.0)) for plan in plans.values()))
    for phase in ("generation", "scoring", "update"):
        yield _row(f"during {phase}", (_gb(sum(plan.phases[phase].values())) for plan in plans.values()))
        for name in dict.fromkeys(name for plan in plans.values() for name in plan.phases[phase]):
            yield _row(f"    {name}", (_gb(plan.phases[phase].get(name, 0.0)) for plan in plans.values()))
    yield _row("at the peak", (_gb(plan.peak) for plan in plans.values()))
    yield _row("in the CPU's memory", (_gb(plan.host or 0.0) for plan in plans.values()))
    yield _row(f"fits in {FULL:.0%} of {gpu.memory / 1e9:.0f} GB", ("yes" if p.fits else "no" for p in plans.values()))
    fewest = {kind: least(config, measured, kind, gpu) for kind in KINDS}
    yield _row("fewest GPUs that it fits on", (str(n or "none") for n in fewest.values()))
    if not plans[wanted].fits:
        here = [kind for kind, plan in plans.items() if plan.fits]
        enough = {kind: n for kind, n in fewest.items() if n is not None}
        ways = [f"{_words(here[0])} fits"] if here else []
        ways += [f"{n} GPUs with {_words(kind)}" for kind, n in [*enough.items()][:1] if not here]
        last = plans[wanted if enough else "+ both"]
        yield f"this does not fit with {_words(wanted)}: {'; or '.join([*ways, last.remedy()])}"


def _words(kind: str) -> str:
    """The options of a way to divide a run, as they are typed."""
    parallel, offload = KINDS[kind]
    return f"--parallel {parallel}" + (f" --offload {offload}" if offload != "none" else "")


def _row(name: str, cells: Iterable[str]) -> str:
    return f"  {name:28}" + "".join(f"{cell:>12}" for cell in cells).rstrip()


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f}" if size else ""
