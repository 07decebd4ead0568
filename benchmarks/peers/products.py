"""The matrix products of an update, recorded while it runs and replayed alone.

Recorded: every matrix product from the first forward pass with gradients on (forward, input gradient, weight gradient),
with the shapes, strides and types of its operands, and the tensors that the optimizer moves. Replayed: the same
products in the same order, on preallocated tensors, and a fused AdamW pass over as many tensors of the same sizes for
every optimizer step. Fused attention is left out, and operands other than weights come from a small pool, so they are
warmer in the cache than in the update: both make the limit harder to reach. Where an update computes two halves side by
side, the products of each half are replayed by a thread of its own, as they were made.
"""

import json
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from math import prod

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
RECORDED = {
    aten.mm.default: "mm",
    aten.addmm.default: "addmm",
    aten.bmm.default: "bmm",
    aten.baddbmm.default: "baddbmm",
}
POOL = 3


class Recorder(TorchDispatchMode):
    """Records the matrix products that run inside its block, in the thread that has entered it."""

    def __init__(self, weights):
        super().__init__()
        self.weights = {p.untyped_storage().data_ptr() for p in weights}
        self.products: list[list] = []
        self.other: Recorder | None = None
        """Has recorded what ran beside."""

    def pool(self, *args) -> ThreadPoolExecutor:
        """A pool of threads, the products of which are recorded too: dispatch modes are those of a thread."""
        self.other = self.other or Recorder([])
        self.other.weights, recorder = self.weights, self.other

        class Recorded(ThreadPoolExecutor):
            def submit(self, function, /, *args):
                def recorded():
                    with recorder:
                        return function(*args)

                return super().submit(recorded)

        return Recorded(*args)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in RECORDED and (self.products or torch.is_grad_enabled()):
            self.products.append([RECORDED[func], [self._description(x) for x in args], self._description(out)])
        return out

    def _description(self, x: torch.Tensor) -> list:
        layout = [list(x.shape), list(x.stride()), str(x.dtype).removeprefix("torch.")]
        place = x.untyped_storage().data_ptr()
        if place not in self.weights:
            return layout
        # A weight occupies the same memory every time, also when it is transposed.
        return [*layout, place, x.untyped_storage().nbytes() // x.element_size(), x.storage_offset()]


def write(path: str, recorder: Recorder, optimizer: torch.optim.Optimizer, steps: int) -> None:
    moved = [[list(p.shape), str(p.dtype).removeprefix("torch.")] for g in optimizer.param_groups for p in g["params"]]
    beside = recorder.other.products if recorder.other else []
    content = {"products": recorder.products, "beside": beside, "moved": moved, "steps": steps}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)


class Replay:
    """Replays the recorded products and the optimizer passes."""

    def __init__(self, path: str):
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        self.weights: dict[int, torch.Tensor] = {}
        self.pools: dict[str, cycle] = {}
        self.work, self.beside = (
            [self._product(*product) for product in content[half]] for half in ("products", "beside")
        )
        self.flops = sum(_flops(product) for half in ("products", "beside") for product in content[half])
        moved = [torch.zeros(shape, dtype=getattr(torch, kind)) for shape, kind in content["moved"]]
        for tensor in moved:
            tensor.grad = torch.full_like(tensor, 1e-3)
        self.optimizer = torch.optim.AdamW(moved, lr=1e-6, weight_decay=0.0, fused=True)
        self.steps = content["steps"]

    def _product(self, name: str, operands: list, out: list):
        return getattr(torch, name), [self._tensor(x) for x in operands], self._tensor(out)

    def _tensor(self, description: list) -> torch.Tensor:
        shape, stride, kind, *weight = description
        if weight:
            place, size, offset = weight
            if place not in self.weights:
                self.weights[place] = _noise(size, kind)
            return self.weights[place].as_strided(shape, stride, offset)
        key = json.dumps(description)
        if key not in self.pools:
            last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
            self.pools[key] = cycle([_noise(last + 1, kind).as_strided(shape, stride) for _ in range(POOL)])
        return next(self.pools[key])

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """Run everything once; returns the seconds of the products and of the optimizer's passes."""
        start, threads = time.perf_counter(), torch.get_num_threads()
        if self.beside:
            half = max(threads // 2, 1)
            torch.set_num_threads(half)
            with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(half,)) as thread:
                other = thread.submit(_run, self.beside)
                _run(self.work)
                other.result()
            torch.set_num_threads(threads)
        else:
            _run(self.work)
        middle = time.perf_counter()
        for _ in range(self.steps):
            self.optimizer.step()
        return {"products": middle - start, "optimizer": time.perf_counter() - middle}


@torch.no_grad()
def _run(products: list) -> None:
    for product, operands, out in products:
        product(*operands, out=out)


def _noise(size: int, kind: str) -> torch.Tensor:
    return (torch.rand(size) * 0.02 - 0.01).to(getattr(torch, kind))


def _flops(product: list) -> float:
    first, second = product[1][-2:]
    return 2.0 * prod(first[0]) * second[0][-1]


def square_rate(kind: str, size: int = 1024, seconds: float = 0.5) -> float:
    """FLOP/s of a product of two square matrices, repeated for `seconds`."""
    a, b = (torch.rand(size, size).to(getattr(torch, kind)) for _ in range(2))
    out, count, start = torch.empty_like(a), 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        torch.mm(a, b, out=out)
        count += 1
    return count * 2.0 * size**3 / (time.perf_counter() - start)


def kinds(path: str) -> str:
    """The type in which most products are computed."""
    with open(path, encoding="utf-8") as file:
        count: dict[str, float] = defaultdict(float)
        for product in json.load(file)["products"]:
            count[product[1][-1][2]] += _flops(product)
    return max(count, key=lambda kind: count[kind])
