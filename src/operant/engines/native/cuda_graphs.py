"""Decoding whose shapes never change, so that a GPU replays each step as one captured graph.

The buffer of keys and values has all its columns from the start, attention looks at all of them through a mask, and
what changes from step to step (ids, the column, where rows begin) stands in tensors that stay where they are. Buffer
and graphs are kept for the next call of the same shape, as long as the weights lie where they did.

    decoding = static(policy, rows=32, columns=72)      # None where the model cannot be decoded so
"""

import logging
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from operant.engines.native.capabilities import try_decoding
from operant.engines.native.decoding import Pooled
from operant.engines.native.kv_cache import Window, plain_layers
from operant.models.policy import Policy

log = logging.getLogger(__name__)
FEWER = 4
"""A graph for all rows, one for a quarter of them, and so on: each is captured when it is first needed."""
ALIGN = 16
"""Columns come in multiples of this, as attention kernels like them."""


class StaticWindow(Window):
    """A window with all its columns from the start, that steps at a column which the device knows."""

    grows = False

    def __init__(self, layers: int, rows: int, limit: int, moves: bool, device: torch.device):
        super().__init__(layers, rows, limit)
        columns = limit + limit // 4 if moves else limit
        self.columns = -(-columns // ALIGN) * ALIGN
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.begins = torch.zeros(rows, dtype=torch.long, device=device)
        self.ids = torch.zeros(rows, dtype=torch.long, device=device)
        self.known = self.starts.copy()
        """What `begins` holds."""
        self.static = False
        """Whether the call to come is a step."""

    def clear(self) -> None:
        """No row is live; what they held is masked for whoever comes."""
        self.live = self.first = self.end = 0
        self.static = False

    def reading(self, count: int, width: int) -> None:
        self.static = False
        super().reading(count, width)

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
        assert self.store is not None
        own = self.store[layer, :, : len(keys)]
        own[0].index_copy_(2, self.column, keys)
        own[1].index_copy_(2, self.column, values)
        return own[0], own[1]

    def seen(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What is added to the scores of attention [rows, 1, 1, columns], and positions [rows, 1]."""
        begins = self.begins[:rows, None]
        columns = torch.arange(self.columns, device=begins.device)
        hidden = (columns < begins) | (columns > self.column)
        added = torch.zeros(hidden.shape, dtype=dtype, device=begins.device)
        # Rows that nobody uses are computed along: wherever they begin, their position is one that the model has.
        positions = (self.column - begins).clamp(0, self.limit - 1)
        return added.masked_fill_(hidden, torch.finfo(dtype).min)[:, None, None], positions

    def _buffer(self, like: Tensor, columns: int = 0) -> Tensor:
        shape = (len(self.layers), 2, self.rows, like.shape[1], self.columns, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)  # rows that nobody uses are computed along


class Kept:
    """What outlives a call: the buffer and the graphs that read and write it, by their number of rows."""

    def __init__(self, policy: Policy, rows: int, columns: int, moves: bool):
        layers = plain_layers(policy.model, columns)
        if layers is None:
            raise ValueError(f"{type(policy.model).__name__} keeps more than keys and values")
        self.window = StaticWindow(layers, rows, columns, moves, policy.device)
        self.graphs: dict[int, tuple[Any, Tensor, Tensor | None]] = {}
        self.weights = addresses(policy)

    def fits(self, policy: Policy, rows: int, columns: int, moves: bool) -> bool:
        """Whether a call can use it: no larger than needed by much, and with the weights where they were."""
        window = self.window
        enough = rows <= window.rows <= 2 * rows and columns <= window.limit <= 2 * columns
        roomy = window.columns >= window.limit + window.limit // 4 if moves else True
        return enough and roomy and self.weights == addresses(policy)


class Static(Pooled):
    """Rows of one buffer, as `Pooled`; a step computes a fixed number of rows over all columns."""

    def __init__(self, policy: Policy, kept: Kept, capture: bool):
        super().__init__(policy, 1, 1)
        self.kept, self.capture = kept, capture
        self.cache: StaticWindow = kept.window
        self.cache.clear()

    def step(self, ids: Tensor) -> None:
        window, rows = self.cache, self._rows()
        window.stepping()
        window.ids[: self.live].copy_(ids)
        if rows not in self.kept.graphs and self.capture:
            self._capture(rows)
        if rows in self.kept.graphs:
            graph, states, below = self.kept.graphs[rows]
            graph.replay()
            self.calls += 1
        else:
            states, below = self._compute(rows)
        window.stepped()
        self.states = states[: self.live]
        # A replay writes over what the last one gave: states are read before, but these are kept.
        self.below = below[: self.live].clone() if below is not None else None

    def _rows(self) -> int:
        """As many rows as a graph computes for those that are live."""
        rows = self.cache.rows
        while rows // FEWER >= max(self.live, 8):
            rows //= FEWER
        return rows

    def _compute(self, rows: int) -> tuple[Tensor, Tensor | None]:
        window = self.cache
        mask, positions = window.seen(rows, self.policy.head.weight.dtype)
        feed = {"input_ids": window.ids[:rows, None], "attention_mask": mask, "position_ids": positions}
        states, _ = self._call(**feed, past_key_values=window)
        return states, self.trunk.last[:, -1] if self.trunk is not None else None

    def _capture(self, rows: int) -> None:
        """Record the step of so many rows. It writes the column to come, which the replay writes again."""
        try:
            side, now = torch.cuda.Stream(), torch.cuda.current_stream()
            side.wait_stream(now)
            with torch.cuda.stream(side):
                for _ in range(2):  # libraries choose and make room for their kernels outside of the capture
                    self._compute(rows)
            now.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                states, below = self._compute(rows)
            self.kept.graphs[rows] = (graph, states, below)
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or ["no reason"])[0][:200]
            log.warning("decoding without graphs: %s cannot be captured (%s)", type(self.policy.model).__name__, reason)
            self.capture = False
            _not_at_all[self.policy] = True


def static(policy: Policy, rows: int, columns: int, *, moves: bool, capture: bool = True) -> Static | None:
    """Static decoding of at most `rows` replies of `columns` tokens; None where the model cannot be decoded so.

    `moves`: prompts will step in, so that the window travels.
    """
    if (
        _not_at_all.setdefault(policy, False)
        or not try_decoding(policy).pooled
        or plain_layers(policy.model, columns) is None
    ):
        return None
    if policy not in _kept and not agrees(policy):
        log.warning("decoding without graphs: %s gives other numbers over a fixed buffer", type(policy.model).__name__)
        _not_at_all[policy] = True
        return None
    kept = _kept.get(policy)
    if kept is None or not kept.fits(policy, rows, columns, moves):
        _kept.pop(policy, None)
        limit = -(-columns // ALIGN) * ALIGN
        if plain_layers(policy.model, limit) is None:  # a sliding window between the two
            limit = columns
        kept = Kept(policy, rows, min(limit, policy.context or limit), moves)
        _kept[policy] = kept
    return Static(policy, kept, capture)


_kept: WeakKeyDictionary[Policy, Kept] = WeakKeyDictionary()
_not_at_all: WeakKeyDictionary[Policy, bool] = WeakKeyDictionary()


def agrees(policy: Policy) -> bool:
    """Hold three rows, of which two step in, against decoding in a buffer that grows."""
    prompts = [[(3 + 5 * j) % policy.vocabulary for j in range(n)] for n in (4, 2, 1)]
    said = []
    for decoding in (Pooled(policy, 3, 6), Static(policy, Kept(policy, 3, 6, True), capture=False)):
        try:
            decoding.admit(prompts[:1])
            decoding.step(torch.tensor([1], device=policy.device))
            decoding.admit(prompts[1:])
            decoding.step(torch.tensor([1, 1, 1], device=policy.device))
            said.append(decoding.states)
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
            return False
    return bool((said[0] - said[1]).abs().max() <= 2e-2 * said[0].abs().max())


def addresses(policy: Policy) -> tuple[int, ...]:
    """Where the weights lie: a graph reads them there."""
    return tuple(p.data_ptr() for p in policy.model.parameters())
