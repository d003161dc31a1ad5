"""What is placed on a cluster, in words that need no Ray."""

import re
from dataclasses import dataclass
from typing import Self

from pdserve.core.events import Role


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """A worker's place. What replaces a worker takes its slot, and with it its worker id, but has an epoch of its own."""

    role: Role
    index: int

    @property
    def worker_id(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def core_index(self) -> int:
        """Roles alternate, so that the first prefill and the first decode engine never share a core of two."""
        return 2 * self.index + (self.role is Role.DECODE)

    @classmethod
    def parse(cls, worker_id: str) -> Self | None:
        match = re.fullmatch(r"(prefill|decode)-(\d+)", worker_id)
        return cls(Role[match[1].upper()], int(match[2])) if match else None


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker that runs in an actor.

    Attributes:
        session_address, kv_address, admin_address: host:port as others reach them.
        node: id of the node that it runs on.
        log_path: where its process writes its log, on that node.
    """

    slot: Slot
    epoch: int
    session_address: str
    kv_address: str
    admin_address: str
    pid: int
    node: str
    log_path: str


class PlacementError(Exception):
    """A worker could not be started, or has died. The message says why, in one line."""
