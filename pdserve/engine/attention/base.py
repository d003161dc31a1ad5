"""What every attention backend does: write a step's keys and values into the paged cache, then attend to it.

To add one: write a class with `plan_step`, and add it to the backends of tests/unit/engine/attention. With
`reserve_decode` beside it, its decode steps run as CUDA graphs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.work import SequenceSlice


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The pool's memory as tensors, in whatever order of strides the pool keeps it.

    Attributes:
        keys, values: [layers, blocks, kv_heads, block_size, head_dim]
    """

    keys: Tensor
    values: Tensor

    @property
    def block_size(self) -> int:
        return self.keys.shape[3]


class StepAttention(Protocol):
    """Attention of one step: everything that is the same in all layers has been worked out."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Write the new keys and values into the cache, then attend causally within each sequence.

        Args:
            query: [tokens, heads, head_dim], the slices' tokens one after another.
            key, value: [tokens, kv_heads, head_dim]
        Returns: [tokens, heads, head_dim], of the query's dtype.
        """
        ...


class LayerTeller:
    """A `StepAttention` that says after each layer how many are in the cache. Layers come in order."""

    def __init__(self, step: StepAttention, on_layers: Callable[[int], None]) -> None:
        self._step = step
        self._on_layers = on_layers

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        attended = self._step.attend(layer, query, key, value, scaling)
        self._on_layers(layer + 1)
        return attended


class AttentionBackend(Protocol):
    """One way to compute paged attention. Of the blocks that a slice names, those behind its end are never read."""

    def plan_step(self, slices: Sequence[SequenceSlice]) -> StepAttention: ...


class DecodeBuffers(Protocol):
    """The plan of a decode step in memory that stays where it is, for a captured graph reads it there."""

    def fill_step(self, slices: Sequence[SequenceSlice]) -> None:
        """Put in the plan of these slices, one token each and no more of them than rows."""
        ...

    def first(self, rows: int) -> StepAttention:
        """The step over the first `rows` rows: it attends by what `fill_step` put in last."""
        ...


@runtime_checkable
class CapturableBackend(AttentionBackend, Protocol):
    """A backend whose decode steps can be captured: what it launches depends on the number of rows alone."""

    def reserve_decode(self, max_rows: int, max_blocks: int) -> DecodeBuffers:
        """Buffers for decode steps of up to `max_rows` sequences of up to `max_blocks` blocks each."""
        ...


class CacheWriter:
    """Where a step's tokens go in the cache."""

    def __init__(self, cache: PagedCache, slices: Sequence[SequenceSlice]) -> None:
        self._cache = cache
        blocks, offsets = token_slots(slices, cache.block_size)
        device = cache.keys.device
        self._blocks = torch.from_numpy(blocks).to(device, non_blocking=True)
        self._offsets = torch.from_numpy(offsets).to(device, non_blocking=True)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store keys and values, [tokens, kv_heads, head_dim], rounded to the cache's dtype."""
        write_tokens(self._cache, layer, self._blocks, self._offsets, key, value)


def write_tokens(cache: PagedCache, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor) -> None:
    """Store keys and values, [tokens, kv_heads, head_dim], in these [tokens] blocks and offsets of a layer."""
    for store, fresh in ((cache.keys, key), (cache.values, value)):
        store[layer][blocks, :, offsets] = fresh.to(store.dtype)


def token_slots(slices: Sequence[SequenceSlice], block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[tokens] the block, and [tokens] the offset in it, of every token of a step."""
    positions = token_positions(slices)
    return np.concatenate([_token_blocks(part, block_size) for part in slices]), positions % block_size


def _token_blocks(part: SequenceSlice, block_size: int) -> NDArray[np.int64]:
    """[tokens] the block of every token of a slice."""
    first, last = part.start // block_size, -(-part.end // block_size)
    return np.asarray(part.block_ids[first:last], np.int64)[np.arange(part.start, part.end) // block_size - first]


def token_positions(slices: Sequence[SequenceSlice]) -> NDArray[np.int64]:
    """[tokens] each token's position in its own sequence."""
    return np.concatenate([np.arange(part.start, part.end) for part in slices])


def block_tables(slices: Sequence[SequenceSlice], block_size: int) -> NDArray[np.int32]:
    """[slices, most blocks of any] the blocks that hold positions 0 … end - 1 of each slice, then zeros."""
    counts = [-(-part.end // block_size) for part in slices]
    tables = np.zeros((len(slices), max(counts, default=0)), np.int32)
    for row, part, count in zip(tables, slices, counts, strict=True):
        row[:count] = part.block_ids[:count]
    return tables
