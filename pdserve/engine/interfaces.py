"""The two seams of the engine: the pool that holds KV bytes, and the runner that computes with them."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdserve.core.geometry import KVGeometry
from pdserve.engine.work import BlockCopy, Sampled, SequenceSlice

Bytes = NDArray[np.uint8]


class KVPool(Protocol):
    """Paged memory for keys and values. Blocks are numbered from 0.

    `read` and `write` may run on other threads than the engine's: whoever calls them holds the blocks pinned, reads only
    what has been computed, and writes only to blocks that no step uses yet.
    A token's bytes are exchanged in the canonical order [layers, 2 (key, value), kv_heads, tokens, head_dim].
    """

    geometry: KVGeometry
    num_blocks: int

    def read(self, block_ids: Sequence[int], tokens: range, layers: range) -> Bytes:
        """[bytes] the tokens' cache in canonical order, contiguous. `block_ids` are those of positions 0 …"""
        ...

    def write(self, block_ids: Sequence[int], tokens: range, layers: range, data: Bytes) -> None:
        """The reverse of `read`; `data` has exactly the bytes of these tokens and layers."""
        ...


class ModelRunner(Protocol):
    """Runs one step. Called by the engine thread only."""

    geometry: KVGeometry
    vocab_size: int
    max_context_tokens: int

    @property
    def pool(self) -> KVPool: ...

    def run(
        self,
        slices: Sequence[SequenceSlice],
        copies: Sequence[BlockCopy],
        on_layers: Callable[[int], None] | None = None,
    ) -> list[list[Sampled]]:
        """Copy blocks, compute the slices' tokens into the pool, and sample.

        Args:
            on_layers: may be called on the way, with how many layers' keys and values of all slices are in the pool.
        Returns: for each slice, one Sampled for each of its scored tokens, then one for each of its samples.
        """
        ...
