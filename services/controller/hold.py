"""A controller's hold on the lock. It acts only while nobody else can have the lock."""

import asyncio
import logging

from pdserve.cluster.ray_cluster import RayCluster
from pdserve.core.errors import PdserveError, StartupError

_log = logging.getLogger(__name__)


class Hold:
    """Taken once, then renewed for as long as the controller acts.

    Args:
        owner: this controller.
        lease_s: how long the lock stays with whoever renewed it last.
    """

    def __init__(self, cluster: RayCluster, owner: str, lease_s: float) -> None:
        self.owner = owner
        self._cluster = cluster
        self._lease_s = lease_s
        self._until_s = 0.0

    async def take(self) -> str:
        """Take the lock unless another has it. Returns: who has it. Raises PdserveError: it does not answer."""
        # The lease began after this moment, so it ends after what is reckoned from it.
        asked_s = asyncio.get_running_loop().time()
        holder = await self._cluster.acquire_lock(self.owner, self._lease_s)
        if holder == self.owner:
            self._until_s = asked_s + self._lease_s
        return holder

    async def confirm(self) -> None:
        """Renew the lock before acting, however long that takes. Raises StartupError: another controller has taken it."""
        if await self.take() != self.owner:
            raise StartupError("another controller has taken the lock; this one ends")

    async def renew(self) -> None:
        """Renew the lock while acting.

        Raises:
            StartupError: another controller has taken it, or may have: the lease has ended without an answer.
        """
        try:
            async with asyncio.timeout_at(self._until_s):
                await self.confirm()
        except TimeoutError:
            message = "the lock has not answered before its lease ended; another controller may act, so this one ends"
            raise StartupError(message) from None

    async def release(self) -> None:
        """Let the next controller in at once; without an answer it has to wait until the lease ends."""
        try:
            async with asyncio.timeout(self._lease_s):
                await self._cluster.release_lock(self.owner)
        except (TimeoutError, PdserveError) as error:
            _log.warning("the lock was not released: %s", str(error) or "no answer")
