"""The shape of a KV cache: what two workers must agree on before one writes into the other's."""

from dataclasses import dataclass, fields

ITEMSIZE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What a KV cache looks like.

    Attributes:
        model_fingerprint: hex digest of the model's configuration and weights.
        adapter: name of a weight adapter, "" for none.
        dtype: element type, a key of ITEMSIZE_BYTES.
        codec: how elements are encoded in a frame; "raw" is the only one so far.
        block_size: tokens a block.
    """

    model_fingerprint: str
    adapter: str
    dtype: str
    codec: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def itemsize_bytes(self) -> int:
        return ITEMSIZE_BYTES[self.dtype]

    @property
    def token_layer_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.itemsize_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.token_layer_bytes * self.num_layers * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def differences(self, other: "KVGeometry") -> list[str]:
        """Every field in which the two differ, as "field: mine / theirs"; empty if caches can be exchanged."""
        return [
            f"{f.name}: {getattr(self, f.name)} / {getattr(other, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(other, f.name)
        ]
