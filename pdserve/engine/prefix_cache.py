"""Names for the content of full blocks: BLAKE2b-256 digests, each chained to the one before it.

A digest stands for every token from position 0 to the end of its block, and for everything else that its bytes depend on:
the root names model, adapter, codec, block size and who may share. Python's `hash` collides, and a collision here would
be another user's text.
"""

import hashlib

from pdserve.core.geometry import KVGeometry
from pdserve.engine.work import TokenIds

_DIGEST_BYTES = 32


def root_digest(geometry: KVGeometry, cache_scope: str) -> bytes:
    """The start of all chains of one model and scope."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in (
        geometry.model_fingerprint,
        geometry.adapter,
        geometry.dtype,
        geometry.codec,
        str(geometry.block_size),
        cache_scope,
    ):
        encoded = part.encode()
        # With its length in front, no part can end where another begins.
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def next_digest(previous: bytes, block_token_ids: TokenIds) -> bytes:
    """The digest of a full block, given the one before it. `block_token_ids`: [block_size]."""
    return hashlib.blake2b(
        block_token_ids.astype("<i4", copy=False).tobytes(), key=previous, digest_size=_DIGEST_BYTES
    ).digest()


def chain_digests(root: bytes, token_ids: TokenIds, block_size: int) -> list[bytes]:
    """The digests of all full blocks of `token_ids`, in order."""
    digests = []
    previous = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        previous = next_digest(previous, token_ids[start : start + block_size])
        digests.append(previous)
    return digests
