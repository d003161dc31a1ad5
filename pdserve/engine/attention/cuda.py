"""GPU attention: torch's variable-length flash attention over block tables."""

import logging
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from pdserve.engine.attention.base import AttentionBackend, CacheWriter, PagedCache, block_tables
from pdserve.engine.attention.reference import ReferenceBackend
from pdserve.engine.work import SequenceSlice

# Flash attention 2 needs pages of a multiple of 256 tokens, and half precision.
BLOCK_SIZE = 256
_DTYPES = (torch.float16, torch.bfloat16)
_PROBE_TOLERANCE = 3e-2
_log = logging.getLogger(__name__)


class CudaBackend:
    """See `AttentionBackend`."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def plan_step(self, slices: Sequence[SequenceSlice]) -> "CudaStep":
        return CudaStep(self._cache, slices)


class CudaStep:
    """See `StepAttention`."""

    def __init__(self, cache: PagedCache, slices: Sequence[SequenceSlice]) -> None:
        device = cache.keys.device
        query_lengths = [len(part.token_ids) for part in slices]
        lengths = [part.end for part in slices]
        self._cache = cache
        self._writer = CacheWriter(cache, slices)
        self._query_starts = _on_device([0, *np.cumsum(query_lengths)], device)
        self._key_starts = _on_device([0, *np.cumsum(lengths)], device)
        self._lengths = _on_device(lengths, device)
        self._tables = torch.from_numpy(block_tables(slices, cache.block_size)).to(device, non_blocking=True)
        self._longest_query = max(query_lengths)
        self._longest = max(lengths)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self._writer.write(layer, key, value)
        attended = varlen_attn(
            query.contiguous(),
            self._cache.keys[layer].transpose(1, 2),
            self._cache.values[layer].transpose(1, 2),
            self._query_starts,
            self._key_starts,
            self._longest_query,
            self._longest,
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
            seqused_k=self._lengths,
            block_table=self._tables,
            # Splitting along the keys has open defects with block tables, and makes results depend on the batch.
            num_splits=1,
        )
        return cast(Tensor, attended)


def choose_backend(cache: PagedCache, num_heads: int) -> AttentionBackend:
    """The flash backend if it agrees with the reference on this device, else the reference.

    Overwrites the cache's first blocks: call it before they are used.
    """
    reference = ReferenceBackend(cache)
    if cache.keys.dtype not in _DTYPES or cache.block_size % BLOCK_SIZE or cache.keys.shape[1] < 2:
        return reference
    flash = CudaBackend(cache)
    try:
        difference = largest_difference(flash, reference, cache, num_heads)
    except RuntimeError as error:
        _log.warning("paged flash attention does not run here (%s): using gather and SDPA", error)
        return reference
    if not difference <= _PROBE_TOLERANCE:
        _log.warning("paged flash attention is off by %.3g here: using gather and SDPA", difference)
        return reference
    return flash


@torch.inference_mode()
def largest_difference(
    backend: AttentionBackend, reference: AttentionBackend, cache: PagedCache, num_heads: int
) -> float:
    """The largest difference of two backends over slices that start, end and cross at a block's edge.

    The cache needs two blocks; both are overwritten.
    """
    size = cache.block_size
    _, _, num_kv_heads, _, head_dim = cache.keys.shape
    generator = torch.Generator(cache.keys.device).manual_seed(0)
    worst = 0.0
    for start, end in ((0, size + 1), (0, 1), (size - 1, size), (size, size + 1), (size - 2, size + 7)):
        part = SequenceSlice(np.zeros(end - start, np.int32), start, (1, 0))
        query, key, value = (
            torch.randn(
                (end - start, heads, head_dim), generator=generator, dtype=cache.keys.dtype, device=cache.keys.device
            )
            for heads in (num_heads, num_kv_heads, num_kv_heads)
        )
        expected = reference.plan_step([part]).attend(0, query, key, value, head_dim**-0.5)
        actual = backend.plan_step([part]).attend(0, query, key, value, head_dim**-0.5)
        worst = max(worst, float((actual.float() - expected.float()).abs().max()))
    return worst


def _on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)
