"""Out of memory during an update: `update.micro_batch=auto` halves the micro-batch, and the weights end up equal."""

from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.gpu import peak
from benchmarks.gpu.place import Place, queries


def main(place: Place, report: Any) -> None:
    free, needed, base = updated(place, None)
    report(free_gb=needed, held_gb=base)
    allowed = base + 0.6 * (needed - base)
    tight, used, _ = updated(place, allowed)
    gap = float((tight - free).norm() / free.norm())
    report(allowed_gb=allowed, tight_gb=used, weights_gap=gap, good=gap < 1e-4)


def updated(place: Place, allowed: float | None) -> tuple[torch.Tensor, float, float]:
    """The change of the weights by one update, its peak memory, and the memory in use before (GB)."""
    rows, half = place.sized((64, 256), (8, 8))
    options = {"micro_tokens": rows * 2 * half, "epochs": 1, "kl.coef": 0.0, "max_tokens": half, "watch_every": 0}
    # With so large an eps the movement is the gradient, and rounding of gradients of 0 does not show.
    options |= {"optimizer.eps": 1.0, "optimizer.lr": 1e-2, "update.micro_batch": "auto"}
    peak.reset()
    learner = place.learner("gpt2", reference=None, precision="float32", **options)
    before_gb = peak.reset()
    before = [p.detach().clone() for p in learner.policy.trainable()]
    prompts, replies = queries(rows, half), [q[::-1] for q in queries(rows, half)]
    with _limited(place, learner.policy, allowed, rows * half):
        learner.step(prompts, replies, [float(i % 3) for i in range(rows)])
    moved = [(p.detach() - b).flatten() for p, b in zip(learner.policy.trainable(), before, strict=True)]
    return torch.cat(moved).cpu(), peak.most(), before_gb


@contextmanager
def _limited(place: Place, policy: Any, allowed: float | None, tokens: int):
    """Limit the GPU's memory to `allowed` GB; without a GPU, let the model raise out of memory above `tokens`."""
    if allowed is None:
        yield
    elif place.device == "cuda":
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed * 1e9 / whole))
        yield
        torch.cuda.set_per_process_memory_fraction(1.0)
    else:
        handle = policy.model.register_forward_pre_hook(_refuse(tokens), with_kwargs=True)
        yield
        handle.remove()


def _refuse(most: int) -> Any:
    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        inputs = kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        if torch.is_grad_enabled() and inputs is not None and inputs.numel() > most:
            raise torch.OutOfMemoryError(f"{inputs.numel()} tokens, more than {most}")

    return hook
