"""The membership that a controller publishes: a version that grows with each change, and whoever waits for the next."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from pdserve.rpc.v1.cluster_pb2 import Member, Membership


class MembershipBoard:
    """Holds the current membership. A watcher that is slow skips to the newest one."""

    def __init__(self) -> None:
        self.current = Membership()
        self._changed = asyncio.Event()

    def publish(self, members: Iterable[Member], desired_prefill: int, desired_decode: int) -> None:
        """Take over what is known now; watchers hear of it only if it differs from what was known."""
        membership = Membership(
            version=self.current.version,
            members=sorted(members, key=lambda member: member.worker_id),
            desired_prefill=desired_prefill,
            desired_decode=desired_decode,
        )
        if membership == self.current and membership.version:
            return
        membership.version += 1
        self.current = membership
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch(self) -> AsyncIterator[Membership]:
        """The membership now, as soon as there is one, then each change, for ever."""
        seen = 0
        while True:
            changed = self._changed
            if self.current.version != seen:
                seen = self.current.version
                yield self.current
            else:
                await changed.wait()
