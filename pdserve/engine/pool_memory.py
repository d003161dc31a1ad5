"""Whether there is memory for a KV pool."""

from dataclasses import dataclass
from pathlib import Path
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
    def of_host(cls, cgroup: Path = Path("/sys/fs/cgroup")) -> Self:
        """What this process may take: the machine's, or that of its container where this is less.

        Args:
            cgroup: where the limit of the container is (cgroup version 2); there is none on a machine's own system.
        """
        memory = psutil.virtual_memory()
        try:
            limit_bytes = int((cgroup / "memory.max").read_text())
            used_bytes = int((cgroup / "memory.current").read_text()) - _reclaimable_bytes(cgroup / "memory.stat")
        except (OSError, ValueError):
            # No such file, or "max".
            return cls("this machine", memory.total, memory.available)
        if limit_bytes >= memory.total:
            return cls("this machine", memory.total, memory.available)
        return cls("this container", limit_bytes, max(0, min(limit_bytes - used_bytes, memory.available)))

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


def _reclaimable_bytes(stat: Path) -> int:
    """Of what a container uses, the pages of files that were read once: the system gives them up first."""
    fields = dict(line.split() for line in stat.read_text().splitlines())
    return int(fields.get("inactive_file", 0))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
