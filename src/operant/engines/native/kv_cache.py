"""A key-value cache in one buffer that is written in place, from which finished rows are removed and others added.

All live rows end at the same column, so that one call of the model appends to all of them. A row begins at the column
where its prompt begins; the columns of the window before that are masked.

    cache = Window(layers, rows=32, limit=72)
    cache.end_at(width=8)           # rows end at column 8, if none is live
    cache.reading(4, width=8)       # before a call of the model that reads 4 prompts into free rows
    cache.read([8, 8, 7, 5])        # after it: the lengths of the prompts, whose rows are now live
    cache.stepping()                # before a call of the model that appends one column to every live row
    cache.stepped()                 # after it
    cache.keep(order)               # live rows overwrite finished ones
"""

import weakref
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from operant.models.hidden_states import HiddenStates

START_WITH = 64
"""Columns for replies in a new buffer. A full buffer is replaced by one with twice as many columns."""


def plain_layers(policy: HiddenStates, columns: int) -> int | None:
    """Number of layers, if the model caches plain keys and values; None if its cache is of another kind.

    A layer with a sliding window counts as plain if rows of `columns` tokens fit into the window.
    """
    try:
        layers = DynamicCache(config=policy.config).layers
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    if not layers or policy.encoder_decoder:
        return None
    for layer in layers:
        window = int(layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer else 0
        if type(layer) is not DynamicLayer and window < columns:
            return None
    return len(layers)


class _Layer(CacheLayerMixin):
    """One layer of a window, with the methods that transformers calls."""

    is_sliding = False

    def __init__(self, window: "Window", index: int):
        super().__init__()
        # A strong reference would be a cycle: the buffer would stay until Python's collector happens to run.
        self.window, self.index = cast("Window", weakref.proxy(window)), index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **how: object) -> tuple[Tensor, Tensor]:
        return self.window.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.at - self.window.begin + query_length, 0

    def get_seq_length(self) -> int:
        return self.window.at - self.window.begin

    def get_max_length(self) -> int:
        return -1


class Window(Cache):
    """A buffer [layers, 2, rows, heads, columns, width of a head], and its rows in use.

    `limit`: most columns of a prompt and its reply. A full buffer is replaced by a larger one.
    """

    grows = True
    """Whether a full buffer is replaced by a larger one."""

    def __init__(self, layers: int, rows: int, limit: int):
        super().__init__(layers=[_Layer(self, i) for i in range(layers)])
        self.rows, self.limit = rows, limit
        self.store: Any = None
        """The buffer; None until the first keys are written."""
        self.starts = np.zeros(rows, dtype=np.int64)
        """[rows] the column in which each row begins."""
        self.live = self.first = self.end = 0
        """Number of rows in use; the window's first column, and the column after its last one."""
        self.view = slice(0, 0)
        """The rows of the next call of the model."""
        self.begin = self.at = 0
        """The first column that the next call reads, and the first that it writes."""

    def end_at(self, width: int) -> None:
        """Let rows end at column `width`, if none is live."""
        if not self.live:
            self.first, self.end = 0, width
            if self.store is not None and self.store.shape[4] < width:
                self.store = None

    def reading(self, count: int, width: int, kept: Sequence[Tensor] = ()) -> None:
        """Prepare a call that reads `count` prompts, padded on the left to `width`, into free rows.

        `kept`: the keys and values of the first tokens of each prompt, which are not read again: [layers, 2, heads, a
        prompt's number of tokens - the number that is read, width of a head], or no tokens for a shorter prompt.
        """
        assert width <= self.end, "read the longest first"
        self.view = slice(self.live, self.live + count)
        self.begin = self.at = self.end - width
        longest = max((x.shape[3] for x in kept), default=0)
        if not longest:
            return
        if self.store is None:
            self.store = self._buffer(kept[0][0])
        self.at += longest
        for row, x in enumerate(kept, self.live):
            begin = self.at - x.shape[3]
            self.store[:, :, row, :, self.begin : begin] = 0  # these are masked, but must not be NaN
            self.store[:, :, row, :, begin : self.at] = x

    def read(self, lengths: list[int]) -> None:
        """Make the rows of prompts that were read live, and set the columns of the window before them to 0."""
        rows, begin = self.view, self.begin
        self.store[:, :, rows, :, self.first : begin] = 0  # these are masked, but must not be NaN
        self.starts[rows] = self.end - np.asarray(lengths)
        self.live = rows.stop
        self._narrow()

    def stepping(self) -> None:
        """Prepare a call that appends one column to every live row.

        If the buffer is full, the window moves over unused columns before it, or the buffer is doubled.
        """
        width, columns = self.end - self.first, self.store.shape[4]
        if self.end >= columns:
            window, source = slice(self.first, self.end), self.store
            if self.grows and self.first < columns // 4:
                # A quarter more than a window can need, so that it is seldom moved.
                most = self.limit + self.limit // 4 + 1
                self.store = self._buffer(source[0, 0], max(columns + 1, min(2 * columns, most)))
            for new, old in zip(self.store, source, strict=True):
                rows = old[:, : self.live, :, window]
                new[:, : self.live, :, :width] = rows.clone() if new.data_ptr() == old.data_ptr() else rows
            self.starts -= self.first
            self.first, self.end = 0, width
        self.view, self.begin, self.at = slice(0, self.live), self.first, self.end

    def stepped(self) -> None:
        self.end += 1

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [rows, heads, T, width] of a layer; returns all that the call attends to."""
        if self.store is None:
            self.store = self._buffer(keys)
        own = self.store[layer, :, self.view]
        if keys.shape != values.shape or keys.shape[:2] != own.shape[1:3] or keys.shape[3] != own.shape[4]:
            raise ValueError(f"layer {layer} caches keys {list(keys.shape)} and values {list(values.shape)}")
        end = self.at + keys.shape[2]
        own[0, :, :, self.at : end].copy_(keys)
        own[1, :, :, self.at : end].copy_(values)
        if self.begin == self.at:
            return keys, values
        return own[0, :, :, self.begin : end], own[1, :, :, self.begin : end]

    def visible(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Mask [live, columns] and positions [live, 1] for the next column; None if no row is padded."""
        starts = self.starts[: self.live]
        if not (starts != self.first).any():
            return None
        begins = torch.from_numpy(starts.copy()).to(device, non_blocking=True)[:, None]
        columns = torch.arange(self.first, self.end + 1, device=device)
        return (columns >= begins).long(), self.end - begins

    def repeat(self, sources: list[int], begin: int) -> None:
        """Copy rows, for several replies to one prompt: row `begin` + i becomes row `begin` + sources[i]."""
        if sources == list(range(self.live - begin)):
            return
        picked = torch.tensor(sources, device=self.store.device) + begin
        columns = slice(self.first, self.end)
        rows = slice(begin, begin + len(sources))
        for layer in self.store:
            layer[:, rows, :, columns] = layer[:, picked, :, columns]
        self.starts[rows] = self.starts[begin + np.asarray(sources)]
        self.live = rows.stop

    def keep(self, order: np.ndarray) -> None:
        """Row i becomes the previous row order[i], and the rows after these are free. Only moving rows are copied."""
        moved = np.flatnonzero(order != np.arange(len(order)))
        if len(moved) and self.store is not None:
            to, of = (torch.from_numpy(rows).to(self.store.device) for rows in (moved, order[moved]))
            columns = slice(self.first, self.end)
            for layer in self.store:
                layer[:, to, :, columns] = layer[:, of, :, columns]
        self.starts[: len(order)] = self.starts[order]
        self.live = len(order)
        self._narrow()

    def lift(self, row: int, columns: int | None = None) -> Tensor:
        """[layers, 2, heads, columns, width] a view of the keys and values of one row, or of its first `columns`."""
        begin = int(self.starts[row])
        return self.store[:, :, row, :, begin : self.end if columns is None else begin + columns]

    def place(self, keys_and_values: Tensor) -> None:
        """Add a live row, which ends at the current column, with the result of `lift`."""
        width = keys_and_values.shape[3]
        self.reading(1, width)
        self.store[:, :, self.live, :, self.at : self.end] = keys_and_values
        self.read([width])

    def _narrow(self) -> None:
        if self.live:
            self.first = int(self.starts[: self.live].min())

    def _buffer(self, like: Tensor, columns: int = 0) -> Tensor:
        columns = columns or min(self.limit, max(self.end + START_WITH, self.limit * 2 // 3))
        shape = (len(self.layers), 2, self.rows, like.shape[1], max(columns, self.end), like.shape[3])
        return torch.empty(shape, dtype=like.dtype, device=like.device)
