"""Counter-based random numbers: a pure function of what is drawn for, so a replay draws the same ones."""

import hashlib
import struct

_PACK = struct.Struct("<QIQI").pack


def uniform(seed: int, sibling: int, position: int, draw: int = 0) -> float:
    """A number in [0, 1) with 53 random bits, fixed by its arguments.

    Args:
        seed: the request's, any integer; taken modulo 2**64.
        sibling: which of the n answers.
        position: absolute position of the token that is drawn.
        draw: which number of that position.
    """
    digest = hashlib.blake2b(_PACK(seed & (2**64 - 1), sibling, position, draw), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53
