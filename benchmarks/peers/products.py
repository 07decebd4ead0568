"""The matrix products and other kernels of an update, recorded while it runs and replayed alone.

Recorded: from the first forward pass with gradients on, every matrix product (forward, input gradient, weight gradient)
and the other kernels of the model: attention, GELU, norms and softmax, each with its gradient. Of each the shapes,
strides and types of its operands are kept, and of the optimizer the tensors that it moves. Replayed: the same products
in the same order, on preallocated tensors, and a fused AdamW pass over as many tensors of the same sizes for every
optimizer step; and once more with the other kernels between the products. Operands other than weights come from a small
pool, so they are warmer in the cache than in the update, which makes the limit harder to reach. Where an update
computes two halves side by side, the operations of each half are replayed by a thread of its own, as they were made.
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
KERNELS = {
    str(kernel): kernel
    for kernel in (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten.gelu.default,
        aten.gelu_backward.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten._softmax.default,
        aten._safe_softmax.default,
        aten._softmax_backward_data.default,
        aten._log_softmax.default,
        aten._log_softmax_backward_data.default,
        aten.exp.default,  # the probabilities, of which the gradient of log-softmax consists
    )
}
"""What a model of these works computes beside its products, whoever trains it."""
POOL = 3


class Recorder(TorchDispatchMode):
    """Records the products and kernels that run inside its block, in the thread that has entered it."""

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
        if self.products or torch.is_grad_enabled():
            if func in RECORDED:
                self.products.append([RECORDED[func], [self._description(x) for x in args], self._description(out)])
            elif str(func) in KERNELS:
                named = {name: self._description(x) for name, x in (kwargs or {}).items()}
                self.products.append([str(func), [self._description(x) for x in args], named])
        return out

    def _description(self, x) -> object:
        if not isinstance(x, torch.Tensor):
            return {"dtype": str(x).removeprefix("torch.")} if isinstance(x, torch.dtype) else {"value": x}
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
        self.all = [[self._call(*call) for call in content[half]] for half in ("products", "beside")]
        self.products = [
            [call for call, (name, *_) in zip(calls, content[half], strict=True) if name not in KERNELS]
            for calls, half in zip(self.all, ("products", "beside"), strict=True)
        ]
        made = [call for half in ("products", "beside") for call in content[half] if call[0] not in KERNELS]
        self.flops = sum(map(_flops, made))
        moved = [torch.zeros(shape, dtype=getattr(torch, kind)) for shape, kind in content["moved"]]
        for tensor in moved:
            tensor.grad = torch.full_like(tensor, 1e-3)
        self.optimizer = torch.optim.AdamW(moved, lr=1e-6, weight_decay=0.0, fused=True)
        self.steps = content["steps"]

    def _call(self, name: str, operands: list, rest):
        inputs = [self._operand(x) for x in operands]
        if name in KERNELS:
            return KERNELS[name], inputs, {key: self._operand(x) for key, x in rest.items()}
        return getattr(torch, name), inputs, {"out": self._operand(rest)}

    def _operand(self, description):
        if isinstance(description, dict):
            return description["value"] if "value" in description else getattr(torch, description["dtype"])
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
        """Run everything; returns the seconds of the products, of products with kernels, and of the optimizer."""
        seconds = {"products": _timed(self.products), "kernels": _timed(self.all)}
        start = time.perf_counter()
        for _ in range(self.steps):
            self.optimizer.step()
        return seconds | {"optimizer": time.perf_counter() - start}


def _timed(halves: list[list]) -> float:
    """Seconds of the calls of both halves: side by side if the second one has any."""
    (first, second), start, threads = halves, time.perf_counter(), torch.get_num_threads()
    if not second:
        _run(first)
        return time.perf_counter() - start
    half = max(threads // 2, 1)
    torch.set_num_threads(half)
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(half,)) as thread:
        other = thread.submit(_run, second)
        _run(first)
        other.result()
    torch.set_num_threads(threads)
    return time.perf_counter() - start


@torch.no_grad()
def _run(calls: list) -> None:
    for function, operands, named in calls:
        function(*operands, **named)


def _noise(size: int, kind: str) -> torch.Tensor:
    if kind == "bool":  # a mask that hides nothing
        return torch.ones(size, dtype=torch.bool)
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
            if product[0] in KERNELS:
                continue
            count[product[1][-1][2]] += _flops(product)
    return max(count, key=lambda kind: count[kind])
