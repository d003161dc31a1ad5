"""Decode attention over the paged cache, compiled by numba for one shape of cache."""

import math
import os
from collections.abc import Callable
from functools import cache

import numba
import numpy as np

from pdserve.model_folder import cache_dir

# Sums may be reordered (else they are not vectorised); infinities and NaN keep their meaning.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


@cache
def compile_decode_kernel(head_dim: int, block_size: int, bfloat16: bool) -> Callable[..., None]:
    """A kernel for single-token rows; it compiles (or comes from disk) when it is first called.

    The two passes over a block's rows are dense loops of constant length. bfloat16 is read as bit patterns: shifted
    up by 16 bits they are float32. Shapes:
        query, out: [tokens, heads, head_dim] float32
        keys, values: [blocks, kv_heads, block_size, head_dim] float32, or uint16 for bfloat16
        rows, lengths: [sequences] a sequence's row in `query`, and its tokens in the cache
        tables: [sequences, blocks]
        scores: [heads / kv_heads, at least the longest length] float32, scratch
    """
    log2_e = np.float32(np.log2(np.e))
    c0, c1, c2, c3, c4, c5, c6 = (np.float32(np.log(2) ** n / math.factorial(n)) for n in range(7))

    def attend_rows(query, keys, values, rows, lengths, tables, scaling, scores, out):  # type: ignore[no-untyped-def]
        num_kv_heads = keys.shape[1]
        group = query.shape[1] // num_kv_heads
        row_bits = np.empty(head_dim, np.uint32)
        row = row_bits.view(np.float32)
        asked = np.empty((group, head_dim), np.float32)
        total = np.empty((group, head_dim), np.float32)
        weight_bits = scores.view(np.int32)
        for sequence in range(rows.shape[0]):
            length = lengths[sequence]
            token = rows[sequence]
            num_blocks = (length + block_size - 1) // block_size
            for kv_head in range(num_kv_heads):
                first_head = kv_head * group
                for member in range(group):
                    for d in range(head_dim):
                        asked[member, d] = query[token, first_head + member, d] * scaling
                for index in range(num_blocks):
                    base = index * block_size
                    block = keys[tables[sequence, index], kv_head]
                    for offset in range(min(block_size, length - base)):
                        if bfloat16:
                            for d in range(head_dim):
                                row_bits[d] = np.uint32(block[offset, d]) << np.uint32(16)
                        else:
                            for d in range(head_dim):
                                row[d] = block[offset, d]
                        for member in range(group):
                            score = np.float32(0.0)
                            for d in range(head_dim):
                                score += asked[member, d] * row[d]
                            scores[member, base + offset] = score
                for member in range(group):
                    best = scores[member, 0]
                    for position in range(1, length):
                        best = max(best, scores[member, position])
                    # exp(x) = 2^n · 2^f with n whole and |f| ≤ 1/2; 2^f by its Taylor series, 2^n by exponent bits.
                    for position in range(length):
                        power = max((scores[member, position] - best) * log2_e, np.float32(-126.0))
                        whole = np.floor(power + np.float32(0.5))
                        f = power - whole
                        fraction = c0 + f * (c1 + f * (c2 + f * (c3 + f * (c4 + f * (c5 + f * c6)))))
                        weight_bits[member, position] = (np.int32(whole) + np.int32(127)) << np.int32(23)
                        scores[member, position] = scores[member, position] * fraction
                    weight_sum = np.float32(0.0)
                    for position in range(length):
                        weight_sum += scores[member, position]
                    scale = np.float32(1.0) / weight_sum
                    for position in range(length):
                        scores[member, position] *= scale
                total[:] = np.float32(0.0)
                for index in range(num_blocks):
                    base = index * block_size
                    block = values[tables[sequence, index], kv_head]
                    for offset in range(min(block_size, length - base)):
                        if bfloat16:
                            for d in range(head_dim):
                                row_bits[d] = np.uint32(block[offset, d]) << np.uint32(16)
                        else:
                            for d in range(head_dim):
                                row[d] = block[offset, d]
                        for member in range(group):
                            weight = scores[member, base + offset]
                            for d in range(head_dim):
                                total[member, d] += weight * row[d]
                for member in range(group):
                    for d in range(head_dim):
                        out[token, first_head + member, d] = total[member, d]

    folder = cache_dir() / "kernels"
    keep = _writable(folder)
    if keep:
        numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
    kernel: Callable[..., None] = numba.njit(cache=keep, nogil=True, fastmath=_FASTMATH)(attend_rows)
    return kernel


def _writable(folder: os.PathLike[str]) -> bool:
    """Without a place to keep it the kernel is compiled at each start."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
