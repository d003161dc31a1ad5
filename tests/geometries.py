"""The shape of a KV cache, as small as a test wants it."""

from pdserve.core.geometry import KVGeometry


def geometry(
    *, dtype: str = "float32", num_layers: int = 1, num_kv_heads: int = 1, head_dim: int = 8, block_size: int = 4
) -> KVGeometry:
    return KVGeometry(
        model_fingerprint="f",
        adapter="",
        dtype=dtype,
        codec="raw",
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
