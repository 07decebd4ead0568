"""The machine, and its measured rates of copies and matrix products, which bound everything else."""

from typing import Any

import torch

from benchmarks.gpu.place import Place


def main(place: Place, report: Any) -> None:
    from operant.machine import about

    report(**about(), cuda=torch.cuda.is_available())
    report(copy_gb_per_s=copy_rate(place), product_tflops=product_rate(place))


def copy_rate(place: Place) -> float:
    """GB per second, read and written, of a copy that is too large for any cache."""
    source = torch.zeros(place.sized(1 << 30, 1 << 22), dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _best(place, lambda: target.copy_(source)) / 1e9


def product_rate(place: Place, dtype: torch.dtype = torch.bfloat16) -> float:
    """TFLOP/s of one large matrix product."""
    side = place.sized(8192, 64)
    a = torch.randn(side, side, device=place.device).to(dtype)
    return 2 * side**3 / _best(place, lambda: a @ a) / 1e12


def _best(place: Place, work: Any, times: int = 10, inner: int = 5) -> float:
    """Seconds of one call, in the fastest of several rounds."""
    work()
    return min(place.seconds(lambda: [work() for _ in range(inner)]) / inner for _ in range(times))
