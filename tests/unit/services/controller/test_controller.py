"""The controller over a cluster that is played: no Ray."""

import asyncio
from typing import Any

import pytest

from pdserve.cluster.lock import Counts
from pdserve.cluster.placement import Slot
from pdserve.cluster.ray_cluster import WorkerHandle
from pdserve.config import Settings
from pdserve.core.events import Role
from services.controller.controller import Controller

HANDLES = [WorkerHandle(Slot(Role.DECODE, index), f"decode-{index}.1", None) for index in range(3)]


class StuckWorkers:
    """Workers that never start and never stop; only a kill ends them."""

    def __init__(self) -> None:
        self.ends = {handle.name: asyncio.Event() for handle in HANDLES}

    async def list_workers(self) -> list[WorkerHandle]:
        return HANDLES

    async def started(self, handle: WorkerHandle) -> Any:
        await self.ends[handle.name].wait()
        return _Placed

    async def ended(self, handle: WorkerHandle) -> str:
        return "killed"

    async def stop(self, handle: WorkerHandle) -> None:
        await self.ends[handle.name].wait()

    async def kill(self, handle: WorkerHandle) -> None:
        self.ends[handle.name].set()
        # Its end is noticed before this returns.
        for _ in range(20):
            await asyncio.sleep(0)


class _Placed:
    admin_address, epoch, pid, log_path = "127.0.0.1:1", 1, 1, "log"
    session_address = kv_address = node = ""


@pytest.mark.asyncio
async def test_every_worker_that_does_not_stop_in_time_is_killed() -> None:
    cluster = StuckWorkers()
    controller = Controller(cluster, Settings(), Counts(0, 3))  # type: ignore[arg-type]
    await controller.adopt()
    await controller.stop_workers(0.01)
    assert all(end.is_set() for end in cluster.ends.values())
    await controller.close()
