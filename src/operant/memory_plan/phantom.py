"""Tensors without memory, and a count of what they would hold: a run is measured before anything is loaded.

with phantoms() as memory:
    model = make_model()
    held = memory.now
    model(ids).loss.backward()
memory.most - held          # bytes at the peak
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(TorchDispatchMode):
    """Counts the bytes of every tensor that an operation makes, from its making until nobody holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._held: dict[int, weakref.ref] = {}

    def peak(self) -> "Memory":
        """Start a new peak."""
        self.most = self.now
        return self

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for thing in tree_leaves(out):
            if isinstance(thing, Tensor):
                self._see(thing.untyped_storage())
        return out

    def _see(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._held:  # a view, or written in place
            return
        self._held[key] = weakref.ref(storage, lambda _: self._forget(key, size))
        self.now += size
        self.most = max(self.most, self.now)

    def _forget(self, key: int, size: int) -> None:
        del self._held[key]
        self.now -= size


@contextmanager
def phantoms() -> Iterator[Memory]:
    """While this lasts, tensors have shapes and no contents, and what they would hold is counted."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), Memory() as memory:
        yield memory


def solid() -> Any:
    """While this lasts, tensors are as ever, also among phantoms."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()
