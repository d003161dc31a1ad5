"""CPU attention: decode reads the paged cache in place by a compiled kernel; longer slices are gathered."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdserve.engine.attention.base import CacheWriter, PagedCache, block_tables
from pdserve.engine.attention.cpu_kernel import compile_decode_kernel
from pdserve.engine.attention.reference import gathered_sequences
from pdserve.engine.work import SequenceSlice

BLOCK_SIZE = 16


class CpuBackend:
    """See `AttentionBackend`. Caches of float32 and bfloat16; queries of any dtype.

    The kernel is compiled for a shape when the first step with it runs, and kept on disk.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        bits = {torch.float32: torch.float32, torch.bfloat16: torch.uint16}[cache.keys.dtype]
        self._keys = cache.keys.view(bits).numpy()
        self._values = cache.values.view(bits).numpy()
        self._kernel = compile_decode_kernel(cache.keys.shape[4], cache.block_size, bits == torch.uint16)

    def plan_step(self, slices: Sequence[SequenceSlice]) -> "CpuStep":
        return CpuStep(self, slices)

    def attend_decode(self, layer: int, query: Tensor, step: "CpuStep", scaling: float, out: Tensor) -> None:
        """Rows of single tokens; `query` and `out` are [tokens, heads, head_dim] float32, contiguous."""
        self._kernel(
            query.numpy(),
            self._keys[layer],
            self._values[layer],
            step.decode_rows,
            step.decode_lengths,
            step.decode_tables,
            np.float32(scaling),
            np.empty((query.shape[1] // self._keys.shape[2], step.longest), np.float32),
            out.numpy(),
        )


class CpuStep:
    """See `StepAttention`."""

    def __init__(self, backend: CpuBackend, slices: Sequence[SequenceSlice]) -> None:
        cache = backend._cache
        self._backend = backend
        self._cache = cache
        self._writer = CacheWriter(cache, slices)
        first_rows = np.cumsum([0, *(len(part.token_ids) for part in slices)])
        decode = [index for index, part in enumerate(slices) if len(part.token_ids) == 1]
        decode_slices = [slices[index] for index in decode]
        self.decode_rows = first_rows[decode].astype(np.int64)
        self.decode_lengths = np.array([part.end for part in decode_slices], np.int64)
        self.decode_tables = block_tables(decode_slices, cache.block_size)
        self.longest = max((part.end for part in decode_slices), default=0)
        self._gathered = [
            sequence for sequence in gathered_sequences(cache, slices) if sequence.rows.stop - sequence.rows.start > 1
        ]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self._writer.write(layer, key, value)
        if not self._gathered:
            return self._attend_decode(layer, query, scaling).to(query.dtype)
        out = torch.empty(query.shape, dtype=query.dtype)
        if len(self.decode_rows):
            out.copy_(self._attend_decode(layer, query, scaling))
        for sequence in self._gathered:
            out[sequence.rows] = sequence.attend(self._cache, layer, query[sequence.rows], scaling)
        return out

    def _attend_decode(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """[tokens, heads, head_dim] float32; rows of longer slices are left as they are."""
        out = torch.empty(query.shape, dtype=torch.float32)
        self._backend.attend_decode(layer, query.float().contiguous(), self, scaling, out)
        return out
