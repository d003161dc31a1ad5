"""GPU attention: torch's variable-length flash attention over block tables."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from pdserve.engine.attention.base import AttentionBackend, PagedCache, block_tables, token_slots, write_tokens
from pdserve.engine.attention.reference import ReferenceBackend
from pdserve.engine.work import SequenceSlice

# Flash attention 2 needs pages of a multiple of 256 tokens, and half precision.
BLOCK_SIZE = 256
_DTYPES = (torch.float16, torch.bfloat16)
_PROBE_TOLERANCE = 3e-2
_PROBE_BLOCKS = 6
_log = logging.getLogger(__name__)


class CudaBackend:
    """See `CapturableBackend`."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def plan_step(self, slices: Sequence[SequenceSlice]) -> "CudaStep":
        plan = _plan_on_host(slices, self._cache.block_size)
        return CudaStep(
            self._cache,
            blocks=self._upload(plan.blocks),
            offsets=self._upload(plan.offsets),
            query_starts=self._upload(plan.query_starts),
            key_starts=self._upload(plan.key_starts),
            lengths=self._upload(plan.lengths),
            tables=self._upload(plan.tables),
            longest_query=max(len(part.token_ids) for part in slices),
            longest=max(part.end for part in slices),
        )

    def reserve_decode(self, max_rows: int, max_blocks: int) -> "CudaDecodeBuffers":
        return CudaDecodeBuffers(self._cache, max_rows, max_blocks)

    def _upload(self, numbers: NDArray[Any]) -> Tensor:
        return torch.from_numpy(numbers).to(self._cache.keys.device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class CudaStep:
    """See `StepAttention`.

    Attributes:
        blocks, offsets: [tokens] int64, where each token goes in the cache.
        query_starts, key_starts: [slices + 1] int32, where each slice's tokens and each context would begin, packed.
        lengths: [slices] int32 tokens of each context, the step's own included.
        tables: [slices, width] int32 blocks of each context.
        longest_query: tokens of the longest slice.
        longest: at least the tokens of the longest context.
    """

    cache: PagedCache
    blocks: Tensor
    offsets: Tensor
    query_starts: Tensor
    key_starts: Tensor
    lengths: Tensor
    tables: Tensor
    longest_query: int
    longest: int

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        write_tokens(self.cache, layer, self.blocks, self.offsets, key, value)
        attended = varlen_attn(
            query.contiguous(),
            self.cache.keys[layer].transpose(1, 2),
            self.cache.values[layer].transpose(1, 2),
            self.query_starts,
            self.key_starts,
            self.longest_query,
            self.longest,
            scale=scaling,
            # A single query sees its whole context. Without a window the kernel reads each key once for all query
            # heads that share it, instead of once for each.
            window_size=(-1, -1) if self.longest_query == 1 else (-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
            seqused_k=self.lengths,
            block_table=self.tables,
            # Splitting along the keys has open defects with block tables, and makes results depend on the batch.
            num_splits=1,
        )
        return cast(Tensor, attended)


class CudaDecodeBuffers:
    """See `DecodeBuffers`."""

    def __init__(self, cache: PagedCache, max_rows: int, max_blocks: int) -> None:
        device = cache.keys.device
        self._cache = cache
        self._blocks, self._offsets = (torch.zeros(max_rows, dtype=torch.int64, device=device) for _ in range(2))
        self._query_starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._key_starts = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)

    def fill_step(self, slices: Sequence[SequenceSlice]) -> None:
        plan = _plan_on_host(slices, self._cache.block_size)
        rows, width = plan.tables.shape
        for buffer, numbers in (
            (self._blocks[:rows], plan.blocks),
            (self._offsets[:rows], plan.offsets),
            (self._key_starts[: rows + 1], plan.key_starts),
            (self._lengths[:rows], plan.lengths),
            # Entries beyond a context's length are never looked at.
            (self._tables[:rows, :width], plan.tables),
        ):
            buffer.copy_(torch.from_numpy(numbers), non_blocking=True)

    def first(self, rows: int) -> CudaStep:
        return CudaStep(
            self._cache,
            self._blocks[:rows],
            self._offsets[:rows],
            self._query_starts[: rows + 1],
            self._key_starts[: rows + 1],
            self._lengths[:rows],
            self._tables[:rows],
            longest_query=1,
            longest=self._tables.shape[1] * self._cache.block_size,
        )


def choose_backend(cache: PagedCache, num_heads: int) -> AttentionBackend:
    """The flash backend if it agrees with the reference on this device, else the reference."""
    _, _, num_kv_heads, block_size, head_dim = cache.keys.shape
    if cache.keys.dtype not in _DTYPES or block_size % BLOCK_SIZE:
        return ReferenceBackend(cache)
    # Small, and ordered in memory as the pool is.
    shape = (1, _PROBE_BLOCKS, block_size, num_kv_heads, head_dim)
    keys, values = (
        torch.zeros(shape, dtype=cache.keys.dtype, device=cache.keys.device).transpose(2, 3) for _ in range(2)
    )
    probe = PagedCache(keys, values)
    try:
        error = largest_error(CudaBackend(probe), probe, num_heads)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as problem:
        _log.warning("paged flash attention does not run here (%s): using gather and SDPA", problem)
        return ReferenceBackend(cache)
    # False for NaN, too.
    if not error <= _PROBE_TOLERANCE:
        _log.warning("paged flash attention is off by %.3g here: using gather and SDPA", error)
        return ReferenceBackend(cache)
    return CudaBackend(cache)


@torch.inference_mode()
def largest_error(backend: AttentionBackend, cache: PagedCache, num_heads: int) -> float:
    """A backend's largest relative error over batches whose slices start, end and cross at a block's edge.

    Compared with the reference in float32; NaN if there is one in any output. The cache needs six blocks, of which it
    overwrites the first layer.
    """
    size = cache.block_size
    _, _, num_kv_heads, _, head_dim = cache.keys.shape
    generator = torch.Generator(cache.keys.device).manual_seed(0)
    tables = ((5, 0), (2, 4), (1, 3))
    errors = []
    # Prompts; a decode step; a chunk beside decode rows; a decode step again.
    for ranges in (
        ((0, size + 1), (0, 1), (0, size - 1)),
        ((size + 1, size + 2), (1, 2), (size - 1, size)),
        ((size + 2, size + 9), (2, 3), (size, size + 1)),
        ((size + 9, size + 10), (3, 4), (size + 1, size + 2)),
    ):
        slices = [
            SequenceSlice(np.zeros(end - start, np.int32), start, blocks)
            for (start, end), blocks in zip(ranges, tables, strict=True)
        ]
        query, key, value = (
            torch.randn(
                (sum(end - start for start, end in ranges), heads, head_dim),
                generator=generator,
                dtype=cache.keys.dtype,
                device=cache.keys.device,
            )
            for heads in (num_heads, num_kv_heads, num_kv_heads)
        )
        expected = ReferenceBackend(cache).plan_step(slices).attend(0, query.float(), key, value, head_dim**-0.5)
        actual = backend.plan_step(slices).attend(0, query, key, value, head_dim**-0.5)
        errors.append(((actual.float() - expected).abs() / (1 + expected.abs())).max())
    # Python's max would lose a NaN.
    return float(torch.stack(errors).max())


class _HostPlan(NamedTuple):
    """See `CudaStep`."""

    blocks: NDArray[np.int64]
    offsets: NDArray[np.int64]
    query_starts: NDArray[np.int32]
    key_starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    tables: NDArray[np.int32]


def _plan_on_host(slices: Sequence[SequenceSlice], block_size: int) -> _HostPlan:
    lengths = [part.end for part in slices]
    return _HostPlan(
        *token_slots(slices, block_size),
        query_starts=_starts([len(part.token_ids) for part in slices]),
        key_starts=_starts(lengths),
        lengths=np.array(lengths, np.int32),
        tables=block_tables(slices, block_size),
    )


def _starts(lengths: Sequence[int]) -> NDArray[np.int32]:
    """[lengths + 1] where each begins when all are packed, and where the last ends."""
    return np.cumsum([0, *lengths], dtype=np.int32)
