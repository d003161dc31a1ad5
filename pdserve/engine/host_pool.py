"""The KV pool in this process's own memory."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdserve.core.geometry import KVGeometry
from pdserve.engine.interfaces import Bytes
from pdserve.engine.pool_memory import Memory


class HostKVPool:
    """Paged keys and values as bytes; attention backends look at `memory` through typed views.

    Attributes:
        memory: [layers, 2 (key, value), blocks, kv_heads, block_size, head_dim * itemsize] uint8. Each head's block is
            contiguous, so attention reads whole blocks in a row, and a token range of whole blocks is a gather of
            such rows that is already in canonical order.
    Raises:
        StartupError: this machine has no memory for it.
    """

    def __init__(self, geometry: KVGeometry, num_blocks: int) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        self._token_bytes = geometry.head_dim * geometry.itemsize_bytes
        shape = (geometry.num_layers, 2, num_blocks, geometry.num_kv_heads, geometry.block_size, self._token_bytes)
        memory = Memory.of_host()
        memory.check(geometry, num_blocks)
        try:
            # Zeros, for masked attention reads what no one wrote; the system gives such pages when they are first touched.
            self.memory: Bytes = np.zeros(shape, np.uint8)
        except MemoryError as error:
            raise memory.refusal(geometry, num_blocks) from error
        self._rows = self.memory.reshape(-1, geometry.block_size * self._token_bytes)

    def read(self, block_ids: Sequence[int], tokens: range, layers: range) -> Bytes:
        """[bytes] of the tokens in order [layers, 2, kv_heads, tokens, head_dim]; `block_ids` start at position 0."""
        size = self.geometry.block_size
        blocks = self._blocks(block_ids, tokens)
        shape = (len(layers), 2, self.geometry.num_kv_heads)
        covered = np.empty((*shape, len(blocks), size * self._token_bytes), np.uint8)
        for out, layer in zip(covered, layers, strict=True):
            # "clip" makes numpy write straight into `out`; ids in range are what the block manager hands out.
            np.take(self._rows, self._row_indices(blocks, layer), axis=0, out=out, mode="clip")
        first = tokens.start % size if tokens else 0
        wanted = covered.reshape(*shape, len(blocks) * size, self._token_bytes)[:, :, :, first : first + len(tokens)]
        return np.ascontiguousarray(wanted).reshape(-1)

    def write(self, block_ids: Sequence[int], tokens: range, layers: range, data: Bytes) -> None:
        """The reverse of `read`. Raises ValueError when `data` has not exactly the bytes of these tokens and layers."""
        size = self.geometry.block_size
        source = data.reshape(len(layers), 2, self.geometry.num_kv_heads, len(tokens), self._token_bytes)
        whole = range(-(-tokens.start // size) * size, tokens.stop // size * size)
        if not whole:
            self._write_inside_blocks(block_ids, tokens, layers, source)
            return
        head = range(tokens.start, whole.start)
        tail = range(whole.stop, tokens.stop)
        self._write_inside_blocks(block_ids, head, layers, source[:, :, :, : len(head)])
        self._write_inside_blocks(block_ids, tail, layers, source[:, :, :, len(tokens) - len(tail) :])
        blocks = self._blocks(block_ids, whole)
        middle = source[:, :, :, len(head) : len(head) + len(whole)]
        for rows, layer in zip(middle, layers, strict=True):
            self._rows[self._row_indices(blocks, layer)] = rows.reshape(2, self.geometry.num_kv_heads, len(blocks), -1)

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block over all layers."""
        self.memory[:, :, target] = self.memory[:, :, source]

    def _blocks(self, block_ids: Sequence[int], tokens: range) -> NDArray[np.int64]:
        size = self.geometry.block_size
        return np.asarray(block_ids[tokens.start // size : -(-tokens.stop // size)] if tokens else (), np.int64)

    def _row_indices(self, blocks: NDArray[np.int64], layer: int) -> NDArray[np.int64]:
        """[2, kv_heads, blocks] rows of `_rows`."""
        heads = np.arange(self.geometry.num_kv_heads)[None, :, None]
        halves = (layer * 2 + np.arange(2))[:, None, None] * self.num_blocks
        return (halves + blocks) * self.geometry.num_kv_heads + heads

    def _write_inside_blocks(self, block_ids: Sequence[int], tokens: range, layers: range, source: Bytes) -> None:
        """Writes ranges that share blocks with other tokens; `source` is [layers, 2, kv_heads, tokens, bytes]."""
        size = self.geometry.block_size
        done = 0
        while done < len(tokens):
            position = tokens.start + done
            offset = position % size
            count = min(size - offset, len(tokens) - done)
            target = self.memory[layers.start : layers.stop, :, block_ids[position // size], :, offset : offset + count]
            target[...] = source[:, :, :, done : done + count]
            done += count
