"""AdamW with moments of 8 bits: ours beside torchao's and bitsandbytes', on one thread of a CPU.

    python -m benchmarks.eight_bit ours          # or: float32, torchao, bitsandbytes (to be installed for this)

Prints the time of a step of 8.4 million weights, the bytes of the state per weight, whether a saved state continues to
the bit, and what remains of a second moment after 1,000 steps in which it should fall to 0.999^1000 = 0.368 of itself.
"""

import io
import statistics
import sys
import time
from typing import Any

import torch

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def make(kind: str, params: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer of a package."""
    if kind == "float32":
        return torch.optim.AdamW(params, **SETTINGS, fused=True)
    if kind == "torchao":
        from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

        return AdamW8bit(params, **SETTINGS)
    if kind == "bitsandbytes":
        from bitsandbytes.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

        return AdamW8bit(params, **SETTINGS)
    from operant.training.eight_bit import EightBit

    return EightBit([{"params": params}], **SETTINGS)


def second_moment(kind: str, state: dict[str, Any]) -> torch.Tensor:
    """[N], as numbers."""
    if kind == "ours":
        from operant.training.eight_bit import unpack_second

        return unpack_second(state["second"], state["second_scale"]).flatten()
    if kind == "bitsandbytes":
        return (state["qmap2"][state["state2"].long()].view(-1, 256) * state["absmax2"][:, None]).flatten()
    moment = state["exp_avg_sq"]
    return moment.dequantize() if kind == "torchao" else moment


def main(kind: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    params = [torch.randn(1024, 1024).mul_(0.02).requires_grad_() for _ in range(8)]
    optimizer = make(kind, params)

    def step(seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = torch.randn(1024, 1024, generator=generator) * 1e-3
        start = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - start

    print(f"{kind}: first step {step(0):.2f} s, then {1e3 * statistics.median(map(step, range(1, 8))):.0f} ms")
    held = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    parts = [getattr(x, name) for x in held for name in ("codes", "scale", "qmap") if hasattr(x, name)]
    size = sum(x.nbytes for x in [*parts, *(x for x in held if not hasattr(x, "codes"))])
    print(f"{kind}: {size / sum(p.numel() for p in params):.2f} bytes per weight")

    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "params": [p.detach() for p in params]}, file)
    step(100)
    gone_on = [p.detach().clone() for p in params]
    file.seek(0)
    saved = torch.load(file, weights_only=False)  # our own file, of a moment ago
    params = [p.clone().requires_grad_() for p in saved["params"]]
    optimizer = make(kind, params)
    optimizer.load_state_dict(saved["optimizer"])
    step(100)
    print(f"{kind}: continues to the bit: {all(map(torch.equal, gone_on, params))}")

    p = torch.zeros(4096, requires_grad=True)
    optimizer, gradient = make(kind, [p]), torch.logspace(-2, 0, 256).repeat(16)
    p.grad = gradient.clone()
    optimizer.step()
    p.grad = torch.zeros(4096)
    p.grad[255::256] = 1e-3**0.5  # one that stays as it is keeps the scale, too
    for _ in range(1000):
        optimizer.step()
    ratio = second_moment(kind, optimizer.state[p]) / (1e-3 * gradient.square() * 0.999**1000)
    print(f"{kind}: second moment after 1,000 steps, as a multiple of the right one: {float(ratio.median()):.2f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "ours")
