"""Paged flash attention in plain torch, for machines without a GPU: it refuses whatever the kernel would refuse."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

PAGE_TOKENS = 256


def plain_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int,
) -> Tensor:
    """What `torch.nn.attention.varlen.varlen_attn` computes over a paged cache, one sequence after another.

    Args:
        query: [tokens, heads, head_dim]
        key, value: [pages, page size, kv_heads, head_dim]
        cu_seq_q, cu_seq_k: [sequences + 1] int32
        seqused_k: [sequences] int32
        block_table: [sequences, width] int32
    """
    sequences = len(seqused_k)
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert key.shape == value.shape
    assert key.shape[1] % PAGE_TOKENS == 0
    assert query.dtype == key.dtype == value.dtype
    for numbers in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert numbers.dtype == torch.int32
        assert numbers.is_contiguous()
    assert cu_seq_q.shape == cu_seq_k.shape == (sequences + 1,)
    assert block_table.shape[0] == sequences
    assert type(max_q) is int
    assert type(max_k) is int
    assert num_splits == 1
    assert enable_gqa == (query.shape[1] != key.shape[2])
    counts = cu_seq_q.diff()
    assert cu_seq_q[0] == 0
    assert cu_seq_q[-1] == len(query)
    assert counts.max() <= max_q
    assert seqused_k.max() <= max_k
    # Without a window the kernel packs the heads of a group into one query, and needs one query a sequence for that.
    assert window_size == ((-1, -1) if max_q == 1 else (-1, 0))
    assert max_q > 1 or bool((counts == 1).all())
    out = torch.empty_like(query)
    for index in range(sequences):
        rows, length = slice(int(cu_seq_q[index]), int(cu_seq_q[index + 1])), int(seqused_k[index])
        pages = block_table[index, : -(-length // key.shape[1])].long()
        context_keys, context_values = (store[pages].flatten(0, 1)[:length] for store in (key, value))
        new = rows.stop - rows.start
        mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        out[rows] = scaled_dot_product_attention(
            query[rows].transpose(0, 1)[None],
            context_keys.transpose(0, 1)[None],
            context_values.transpose(0, 1)[None],
            mask,
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return out
