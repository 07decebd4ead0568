"""Decoding with fixed shapes, so that a GPU replays each step as one captured graph.

The buffer of keys and values has all its columns from the start, and attention reads all of them through a mask. The
tensors that change from step to step (ids, the column, the starts of rows) stay at the same addresses. Later calls of a
similar shape reuse buffer and graphs, as long as the weights stay at their addresses, too.

    decoding = static(policy, rows=32, columns=72, moves=True)      # None if the model does not allow it
"""

import logging
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from operant.engines.native.capabilities import try_decoding
from operant.engines.native.decoding import Pooled, needed_layers
from operant.engines.native.kv_cache import Window, plain_layers
from operant.models.capabilities import FAILS
from operant.models.policy import Policy

log = logging.getLogger(__name__)
FEWER = 4
"""There is a graph for all rows, one for 1 / FEWER of them, and so on. Each is captured when it is first needed."""
ALIGN = 16
"""The number of columns is a multiple of this, for which attention kernels are fastest."""


class StaticWindow(Window):
    """A window that has all its columns from the start. The column of the next step is stored on the device."""

    grows = False

    def __init__(self, layers: int, rows: int, limit: int, moves: bool, device: torch.device):
        super().__init__(layers, rows, limit)
        columns = limit + limit // 4 if moves else limit
        self.columns = -(-columns // ALIGN) * ALIGN
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.begins = torch.zeros(rows, dtype=torch.long, device=device)
        self.ids = torch.zeros(rows, dtype=torch.long, device=device)
        self.known = self.starts.copy()
        """A copy of `begins` in the CPU's memory."""
        self.static = False
        """Whether the next call of the model is a step."""

    def clear(self) -> None:
        """Remove all rows. Their keys and values stay in the buffer, where later rows mask them."""
        self.live = self.first = self.end = 0
        self.static = False

    def reading(self, count: int, width: int, kept: Sequence[Tensor] = ()) -> None:
        self.static = False
        super().reading(count, width, kept)

    def stepping(self) -> None:
        super().stepping()
        self.static = True
        self.column.fill_(self.end)
        if not np.array_equal(self.known, self.starts):
            self.known = self.starts.copy()
            self.begins.copy_(torch.from_numpy(self.known), non_blocking=True)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if not self.static:
            return super().write(layer, keys, values)
        own = self.store[layer, :, : len(keys)]
        own[0].index_copy_(2, self.column, keys)
        own[1].index_copy_(2, self.column, values)
        return own[0], own[1]

    def seen(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The mask that is added to attention scores [rows, 1, 1, columns], and positions [rows, 1]."""
        begins = self.begins[:rows, None]
        columns = torch.arange(self.columns, device=begins.device)
        hidden = (columns < begins) | (columns > self.column)
        added = torch.zeros(hidden.shape, dtype=dtype, device=begins.device)
        # Unused rows are computed, too. Their positions are clamped to those that the model has.
        positions = (self.column - begins).clamp(0, self.limit - 1)
        return added.masked_fill_(hidden, torch.finfo(dtype).min)[:, None, None], positions

    def _buffer(self, like: Tensor, columns: int = 0) -> Tensor:
        shape = (len(self.layers), 2, self.rows, like.shape[1], self.columns, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)  # not empty: unused rows are computed, too


class GraphBuffer:
    """A buffer and the graphs that use it, by their number of rows. Later calls reuse both."""

    def __init__(self, policy: Policy, rows: int, columns: int, moves: bool):
        self.window = StaticWindow(needed_layers(policy, columns), rows, columns, moves, policy.device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor | None]] = {}
        self.weights = addresses(policy)

    def fits(self, policy: Policy, rows: int, columns: int, moves: bool) -> bool:
        """Whether a call can use it: large enough, at most twice as large as needed, weights at the same addresses."""
        window = self.window
        enough = rows <= window.rows <= 2 * rows and columns <= window.limit <= 2 * columns
        roomy = window.columns >= window.limit + window.limit // 4 if moves else True
        return enough and roomy and self.weights == addresses(policy)


class Static(Pooled):
    """Decodes as `Pooled`, but a step computes a fixed number of rows over all columns."""

    def __init__(self, policy: Policy, buffer: GraphBuffer, capture: bool):
        super().__init__(policy, 1, 1)
        self.buffer, self.capture = buffer, capture
        self.cache: StaticWindow = buffer.window
        self.cache.clear()

    def step(self, ids: Tensor) -> None:
        window, rows = self.cache, self.cache.rows
        while rows // FEWER >= max(self.live, 8):
            rows //= FEWER
        window.stepping()
        window.ids[: self.live].copy_(ids)
        if rows not in self.buffer.graphs and self.capture:
            self._capture(rows)
        if rows in self.buffer.graphs:
            graph, states, below = self.buffer.graphs[rows]
            graph.replay()
        else:
            states, below = self._compute(rows)
        window.stepped()
        self.states = states[: self.live]
        # The next replay overwrites both tensors. `states` is used before that, `below` is stored.
        self.below = below[: self.live].clone() if below is not None else None

    def _compute(self, rows: int) -> tuple[Tensor, Tensor | None]:
        """One step without a graph: the states, and the trunk states of the tokens that were fed."""
        window = self.cache
        mask, positions = window.seen(rows, self.policy.head.weight.dtype)
        feed = {"input_ids": window.ids[:rows, None], "attention_mask": mask, "position_ids": positions}
        states, _ = self.policy.last_states(**feed, past_key_values=window)
        return states, self._last_below()

    def _capture(self, rows: int) -> None:
        """Capture the step of this many rows. It writes the next column, which the replay overwrites."""
        try:
            side, now = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(now)
            with torch.cuda.stream(side):
                for _ in range(2):  # libraries choose their kernels and allocate memory before the capture
                    self._compute(rows)
            now.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                states, below = self._compute(rows)
            self.buffer.graphs[rows] = (graph, states, below)
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or ["no reason"])[0][:200]
            log.warning("decoding without graphs: %s cannot be captured (%s)", type(self.policy.model).__name__, reason)
            self.capture = False
            _unsupported[self.policy] = True


def static(policy: Policy, rows: int, columns: int, *, moves: bool, capture: bool = True) -> Static | None:
    """Static decoding of at most `rows` replies; None if the model does not allow it. The rest as in `decode`."""
    pooled = not _unsupported.setdefault(policy, False) and try_decoding(policy).pooled
    if not pooled or policy.packing.by_columns or plain_layers(policy, columns) is None:
        return None
    if policy not in _buffers and not agrees(policy):
        log.warning("decoding without graphs: %s gives other numbers over a fixed buffer", type(policy.model).__name__)
        _unsupported[policy] = True
        return None
    buffer = _buffers.get(policy)
    if buffer is None or not buffer.fits(policy, rows, columns, moves):
        _buffers.pop(policy, None)
        limit = -(-columns // ALIGN) * ALIGN
        if plain_layers(policy, limit) is None:  # a sliding window is longer than `columns`, but not than `limit`
            limit = columns
        buffer = GraphBuffer(policy, rows, min(limit, (policy.context or limit) + len(policy.virtual)), moves)
        _buffers[policy] = buffer
    return Static(policy, buffer, capture)


_buffers: WeakKeyDictionary[Policy, GraphBuffer] = WeakKeyDictionary()
_unsupported: WeakKeyDictionary[Policy, bool] = WeakKeyDictionary()


def agrees(policy: Policy) -> bool:
    """Whether static decoding of three short rows has the same states as decoding in a buffer that grows."""
    prompts = [[(3 + 5 * j) % policy.vocabulary for j in range(n)] for n in (4, 2, 1)]

    def states(decoding: Pooled) -> Tensor:
        decoding.admit(prompts[:1])
        decoding.step(torch.tensor([1], device=policy.device))
        decoding.admit(prompts[1:])
        decoding.step(torch.tensor([1, 1, 1], device=policy.device))
        return decoding.states

    try:
        grown = states(Pooled(policy, 3, 6))
        static_ones = states(Static(policy, GraphBuffer(policy, 3, 6, True), capture=False))
        return bool((grown - static_ones).abs().max() <= 2e-2 * grown.abs().max())
    except FAILS:
        return False


def addresses(policy: Policy) -> tuple[int, ...]:
    """Memory addresses of the weights, from which a graph reads them."""
    return tuple(p.data_ptr() for p in policy.model.parameters())
