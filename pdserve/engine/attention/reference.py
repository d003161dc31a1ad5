"""The backend that is obviously right: gather each sequence's cache, then torch's own attention. Any device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pdserve.engine.attention.base import CacheWriter, PagedCache
from pdserve.engine.work import SequenceSlice


@dataclass(frozen=True, slots=True)
class GatheredSequence:
    """One sequence's rows of a step, and where its context lies.

    Attributes:
        rows: its tokens among the step's.
        length: tokens in the cache when these have been written.
        blocks: [blocks of `length` tokens]
        mask: [tokens, length] True where a token may look; None where it may look everywhere.
    """

    rows: slice
    length: int
    blocks: Tensor
    mask: Tensor | None

    def attend(self, cache: PagedCache, layer: int, query: Tensor, scaling: float) -> Tensor:
        """[tokens, heads, head_dim] of these rows; `query` is of these rows too."""
        key = gather(cache.keys[layer], self.blocks, self.length).to(query.dtype)
        value = gather(cache.values[layer], self.blocks, self.length).to(query.dtype)
        attended = scaled_dot_product_attention(
            query.transpose(0, 1)[None], key[None], value[None], self.mask, scale=scaling, enable_gqa=True
        )
        return attended[0].transpose(0, 1)


class ReferenceStep:
    """See `StepAttention`."""

    def __init__(self, cache: PagedCache, slices: Sequence[SequenceSlice]) -> None:
        self._cache = cache
        self._writer = CacheWriter(cache, slices)
        self._sequences = gathered_sequences(cache, slices)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self._writer.write(layer, key, value)
        out = torch.empty_like(query)
        for sequence in self._sequences:
            out[sequence.rows] = sequence.attend(self._cache, layer, query[sequence.rows], scaling)
        return out


class ReferenceBackend:
    """See `AttentionBackend`."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def plan_step(self, slices: Sequence[SequenceSlice]) -> ReferenceStep:
        return ReferenceStep(self._cache, slices)


def gathered_sequences(cache: PagedCache, slices: Sequence[SequenceSlice]) -> list[GatheredSequence]:
    """One entry a slice, in order."""
    sequences = []
    row = 0
    for part in slices:
        tokens = len(part.token_ids)
        num_blocks = -(-part.end // cache.block_size)
        sequences.append(
            GatheredSequence(
                rows=slice(row, row + tokens),
                length=part.end,
                blocks=torch.tensor(part.block_ids[:num_blocks], device=cache.keys.device),
                mask=causal_mask(part.start, tokens, cache.keys.device) if tokens > 1 else None,
            )
        )
        row += tokens
    return sequences


def causal_mask(start: int, tokens: int, device: torch.device) -> Tensor:
    """[tokens, start + tokens] a token at position p looks at positions 0 … p."""
    return torch.ones(tokens, start + tokens, dtype=torch.bool, device=device).tril(start)


def gather(store: Tensor, blocks: Tensor, length: int) -> Tensor:
    """[kv_heads, length, head_dim] of one layer's store [blocks, kv_heads, block_size, head_dim]."""
    chosen = store.index_select(0, blocks).transpose(0, 1)
    return chosen.reshape(chosen.shape[0], -1, chosen.shape[3])[:, :length]
