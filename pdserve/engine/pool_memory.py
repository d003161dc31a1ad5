"""Whether there is memory for a KV pool."""

from dataclasses import dataclass
from typing import Self

import psutil

from pdserve.core.errors import StartupError
from pdserve.core.geometry import KVGeometry


@dataclass(frozen=True, slots=True)
class Memory:
    """What a pool is to be put into.

    Attributes:
        owner: for a person.
        free_bytes: of `total_bytes`, what nobody uses.
    """

    owner: str
    total_bytes: int
    free_bytes: int

    @classmethod
    def of_host(cls) -> Self:
        memory = psutil.virtual_memory()
        return cls("this machine", memory.total, memory.available)

    def check(self, geometry: KVGeometry, num_blocks: int) -> None:
        """Raises StartupError if a pool of so many blocks is larger than all of it."""
        if num_blocks * geometry.block_bytes > self.total_bytes:
            raise self.refusal(geometry, num_blocks)

    def refusal(self, geometry: KVGeometry, num_blocks: int) -> StartupError:
        """Says what is too large, and what fits."""
        return StartupError(
            f"no memory for a KV cache of {num_blocks} blocks, {_gib(num_blocks * geometry.block_bytes)}: {self.owner} has "
            f"{_gib(self.total_bytes)}, and {self.free_bytes // geometry.block_bytes} blocks fit into the "
            f"{_gib(self.free_bytes)} that are free; lower engine.num_blocks or engine.kv_memory_bytes"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
