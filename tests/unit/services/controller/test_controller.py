"""The controller over a cluster that is played: no Ray."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from pdserve.cluster.lock import Counts
from pdserve.cluster.placement import Slot
from pdserve.cluster.ray_cluster import WorkerHandle
from pdserve.config import ClusterConfig, Settings
from pdserve.core.errors import PdserveError
from pdserve.core.events import Role
from pdserve.rpc.v1.cluster_pb2 import MEMBER_STATE_STARTING
from services.controller.controller import Controller

HANDLES = [WorkerHandle(Slot(Role.DECODE, index), f"decode-{index}.1", None) for index in range(3)]


class StuckWorkers:
    """Workers that never start and never stop; only a kill ends them.

    Attributes:
        start_s: after which they have started after all; None never comes.
    """

    def __init__(self, start_s: float | None = None) -> None:
        self.start_s = start_s
        self.ends = {handle.name: asyncio.Event() for handle in HANDLES}

    async def list_workers(self) -> list[WorkerHandle]:
        return HANDLES

    async def started(self, handle: WorkerHandle) -> Any:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.ends[handle.name].wait(), self.start_s)
        return _Placed

    async def ended(self, handle: WorkerHandle) -> str:
        await self.ends[handle.name].wait()
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
    session_address, kv_address, node = "127.0.0.1:2", "", "here"


@pytest.mark.asyncio
async def test_every_worker_that_does_not_stop_in_time_is_killed() -> None:
    cluster = StuckWorkers()
    controller = Controller(cluster, Settings(), Counts(0, 3))  # type: ignore[arg-type]
    await controller.adopt()
    await controller.stop_workers(0.01)
    assert all(end.is_set() for end in cluster.ends.values())
    await controller.close()


@pytest.mark.asyncio
async def test_a_worker_that_is_starting_is_a_member_without_addresses_and_cannot_be_drained_yet() -> None:
    settings = Settings(cluster=ClusterConfig(watch_s=0.01))
    controller = Controller(StuckWorkers(), settings, Counts(0, 3))  # type: ignore[arg-type]
    await controller.adopt()
    members = list(controller.board.current.members)
    assert [(m.worker_id, m.state, m.session_address, m.pid) for m in members] == [
        (f"decode-{index}", MEMBER_STATE_STARTING, "", 0) for index in range(3)
    ]
    with pytest.raises(PdserveError, match="decode-1 is still starting"):
        await controller.drain("decode-1", None)
    with pytest.raises(PdserveError, match="there is no worker 'decode-7'; there are: decode-0, decode-1, decode-2"):
        await controller.drain("decode-7", None)
    await controller.close()


@pytest.mark.asyncio
async def test_the_first_membership_after_an_adoption_has_the_addresses_of_all() -> None:
    controller = Controller(StuckWorkers(start_s=0.05), Settings(), Counts(0, 3))  # type: ignore[arg-type]
    await controller.adopt()
    first = await anext(controller.board.watch())
    assert [member.session_address for member in first.members] == ["127.0.0.1:2"] * 3
    await controller.close()
