"""Keys and values of all layers in one buffer that is written in place: rows leave it, and others step in.

Every live row ends at the same column, so that one call of the model appends to all of them; a row begins where its
own prompt does. What lies between the window's first column and that place is masked.

    cache = Window(layers, rows=32, limit=72)
    cache.reading(4, width=8)       # the next call of the model reads 4 prompts into free rows
    cache.read([8, 8, 7, 5])        # their lengths; the rows are live now
    cache.stepping()                # the next call appends one column to every live row
    cache.stepped()
    cache.keep(order)               # rows that ended are overwritten by live ones
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

START_WITH = 64
"""Columns for replies to begin with; a buffer that is full doubles them."""


def plain_layers(model: Any, columns: int) -> int | None:
    """How many layers of plain keys and values the model caches; None where its cache is of another kind.

    A sliding window is plain as long as rows of `columns` tokens fit into it.
    """
    try:
        layers = DynamicCache(config=model.config).layers
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    plain = layers and all(type(x) is DynamicLayer or _window_of(x) >= columns for x in layers)
    return len(layers) if plain and not getattr(model.config, "is_encoder_decoder", False) else None


def _window_of(layer: Any) -> int:
    return int(layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer else 0


class _Layer(CacheLayerMixin):
    """One layer's part of a window, as transformers asks for it."""

    is_sliding = False

    def __init__(self, window: "Window", index: int):
        super().__init__()
        self.window, self.index = window, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.window.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.window.at - self.window.begin

    def get_max_length(self) -> int:
        return -1


class Window(Cache):
    """[layers, 2, rows, heads, columns, width of a head]; made when the first keys come, and grown up to `limit`.

    `limit`: the most columns that a prompt and its reply can have.
    """

    grows = True
    """Whether a full buffer is replaced by a larger one."""

    def __init__(self, layers: int, rows: int, limit: int):
        super().__init__(layers=[_Layer(self, i) for i in range(layers)])
        self.rows, self.limit = rows, limit
        self.store: Tensor | None = None
        self.starts = np.zeros(rows, dtype=np.int64)
        """[rows] the column in which each row begins."""
        self.live = self.first = self.end = 0
        """Rows in use; the window's first column, and the one after its last."""
        self.view = slice(0, 0)
        self.begin = self.at = 0
        """Of the call to come: its rows, the first column that it sees, and the first that it writes."""

    # --- one call of the model ----------------------------------------------------------------------------------------

    def reading(self, count: int, width: int) -> None:
        """The next call reads `count` prompts, padded on the left to `width`, into free rows.

        Raises: ValueError for prompts that are wider than the window of live rows.
        """
        if not self.live:
            self.first, self.end = 0, width
            if self.store is not None and self.store.shape[4] < width:
                self.store = None
        if width > self.end:
            raise ValueError(
                f"a prompt of {width} tokens does not fit before column {self.end}: read the longest first"
            )
        self.view = slice(self.live, self.live + count)
        self.begin = self.at = self.end - width

    def read(self, lengths: list[int]) -> None:
        """The prompts were read; their rows are live, and what stands before them in the window is 0."""
        assert self.store is not None
        rows, begin = self.view, self.begin
        self.store[:, :, rows, :, self.first : begin] = 0  # masked, but no number there may be NaN
        self.starts[rows] = self.end - np.asarray(lengths)
        self.live = rows.stop
        self._narrow()

    def stepping(self) -> None:
        """The next call appends one column to every live row."""
        self._make_room()
        self.view, self.begin, self.at = slice(0, self.live), self.first, self.end

    def stepped(self) -> None:
        self.end += 1

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep [rows, heads, T, width] of one layer; all that the call may see of it."""
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
        """Mask [live, columns] and positions [live, 1] for the column to come; None where no row is padded."""
        starts = self.starts[: self.live]
        if not (starts != self.first).any():
            return None
        begins = torch.from_numpy(starts.copy()).to(device, non_blocking=True)[:, None]
        columns = torch.arange(self.first, self.end + 1, device=device)
        return (columns >= begins).long(), self.end - begins

    # --- rows that come and go ----------------------------------------------------------------------------------------

    def repeat(self, sources: list[int], begin: int) -> None:
        """The rows from `begin` on become copies of the `sources`, counted from `begin`: one prompt, many replies."""
        if sources == list(range(self.live - begin)):
            return
        assert self.store is not None
        picked = torch.tensor(sources, device=self.store.device) + begin
        columns = slice(self.first, self.end)
        rows = slice(begin, begin + len(sources))
        for layer in self.store:
            layer[:, rows, :, columns] = layer[:, picked, :, columns]
        self.starts[rows] = self.starts[begin + np.asarray(sources)]
        self.live = rows.stop

    def keep(self, order: np.ndarray) -> None:
        """Row i becomes what row order[i] was; those after them are free. Rows that stay cost nothing."""
        moved = np.flatnonzero(order != np.arange(len(order)))
        if len(moved) and self.store is not None:
            to, of = (torch.from_numpy(rows).to(self.store.device) for rows in (moved, order[moved]))
            columns = slice(self.first, self.end)
            for layer in self.store:
                layer[:, to, :, columns] = layer[:, of, :, columns]
        self.starts[: len(order)] = self.starts[order]
        self.live = len(order)
        self._narrow()

    def lift(self, row: int) -> Tensor:
        """[layers, 2, heads, columns, width] a copy of what one row holds."""
        assert self.store is not None
        return self.store[:, :, row, :, self.starts[row] : self.end].clone()

    def place(self, held: Tensor) -> None:
        """What was lifted from a row becomes a live row that ends at the current column."""
        assert self.store is not None
        width = held.shape[3]
        self.reading(1, width)
        self.store[:, :, self.live, :, self.at : self.end] = held
        self.read([width])

    def _narrow(self) -> None:
        """Columns before the first row's beginning are seen by nobody."""
        if self.live:
            self.first = int(self.starts[: self.live].min())

    # --- columns ------------------------------------------------------------------------------------------------------

    def _buffer(self, like: Tensor, columns: int = 0) -> Tensor:
        columns = columns or min(self.limit, max(self.end + START_WITH, self.limit * 2 // 3))
        shape = (len(self.layers), 2, self.rows, like.shape[1], max(columns, self.end), like.shape[3])
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def _make_room(self) -> None:
        """One more column: where dead columns stand in front, the window moves there, else the buffer doubles."""
        assert self.store is not None
        held, columns = self.end - self.first, self.store.shape[4]
        if self.end < columns:
            return
        seen, source = slice(self.first, self.end), self.store
        if self.grows and self.first < columns // 4:
            # A quarter more than can be needed at once, so that the window is moved only now and then.
            most = self.limit + self.limit // 4 + 1
            self.store = self._buffer(source[0, 0], max(columns + 1, min(2 * columns, most)))
        for new, old in zip(self.store, source, strict=True):
            rows = old[:, : self.live, :, seen]
            new[:, : self.live, :, :held] = rows.clone() if new.data_ptr() == old.data_ptr() else rows
        self.starts -= self.first
        self.first, self.end = 0, held
