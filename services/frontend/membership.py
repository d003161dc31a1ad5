"""Which workers there are: the controller's word, or a fixed list."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from pdserve.core.events import Role
from pdserve.rpc.v1.cluster_pb2 import Membership as MembershipMessage
from pdserve.wire.cluster_client import ClusterClient
from services.frontend.workers import Worker

# A newer controller may know more: workers that are of no use to this frontend.
_ROLES: frozenset[int] = frozenset(Role)


@dataclass(frozen=True, slots=True)
class Member:
    """Where a worker's sessions are, and what it is taken for. One that was replaced at its address is another member."""

    address: str
    role: Role | None = None
    epoch: int = 0


class Membership:
    """Keeps a session to every member, for as long as it is one. Without the controller the last known ones stay.

    Args:
        make_worker: a Worker, not yet started, for an address and role.
    """

    def __init__(self, make_worker: Callable[[str, Role | None], Worker]) -> None:
        self._make_worker = make_worker
        self._workers: dict[Member, Worker] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def set_members(self, members: Iterable[Member]) -> None:
        """Open sessions to new members, close those of the ones that are gone."""
        wanted = dict.fromkeys(members)
        for member in [member for member in self._workers if member not in wanted]:
            self._close(self._workers.pop(member))
        for member in wanted:
            if member not in self._workers:
                worker = self._workers[member] = self._make_worker(member.address, member.role)
                worker.start()

    async def follow(self, controller: ClusterClient) -> None:
        """Take every membership that the controller publishes, for ever."""
        async for message in controller.watch():
            self.set_members(_members(message))

    async def close(self) -> None:
        self.set_members(())
        if self._closing:
            await asyncio.wait(self._closing)

    def _close(self, worker: Worker) -> None:
        task = asyncio.get_running_loop().create_task(worker.close(), name=f"close {worker.address}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _members(message: MembershipMessage) -> Iterator[Member]:
    for member in message.members:
        if member.session_address and member.role in _ROLES:
            yield Member(member.session_address, Role(member.role), member.epoch)
