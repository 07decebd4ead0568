"""Tensors without memory, and a count of the memory that they would take: a run is measured before anything is loaded.

with fake_tensors() as memory:
    model = make_model()
    before = memory.now
    model(ids).loss.backward()
memory.most - before        # bytes at the peak, beyond the model
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(TorchDispatchMode):
    """Counts the bytes of every tensor that an operation returns, until nothing refers to the tensor any more."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._counted: dict[int, weakref.ref] = {}

    def peak(self) -> "Memory":
        """Measure a new peak from now on."""
        self.most = self.now
        return self

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: object,
        args: Iterable[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Add the bytes of a storage, and subtract them once it is freed."""
        key, size = id(storage), storage.nbytes()
        if key in self._counted:  # the result is a view, or was written in place
            return

        def freed(_: object) -> None:
            del self._counted[key]
            self.now -= size

        self._counted[key] = weakref.ref(storage, freed)
        self.now += size
        self.most = max(self.most, self.now)


@contextmanager
def fake_tensors() -> Iterator[Memory]:
    """Within this block tensors have shapes but no contents, and the memory that they would take is counted."""
    with FakeTensorMode(allow_non_fake_inputs=True), Memory() as memory:
        yield memory
