"""`python -m services.controller`: one controller, until SIGTERM or until it loses the lock. Workers go on without it.

It joins the Ray cluster at `cluster.address`.
"""

import asyncio
import logging
import os
import socket
import sys

from pdserve.cluster.lock import Counts
from pdserve.cluster.ray_cluster import RayCluster
from pdserve.config import Settings
from pdserve.core.errors import PdserveError, StartupError
from pdserve.core.ids import random_id
from pdserve.rpc.v1 import cluster_pb2_grpc
from pdserve.runtime.process import run_process
from pdserve.wire.server import GrpcServer
from services.controller.controller import Controller
from services.controller.hold import Hold
from services.controller.service import SERVICE, ClusterService

# A controller that has not renewed for so many rounds has lost the lock.
_LEASE_ROUNDS = 4
_MIN_LEASE_S = 2.0
_GRACE_S = 0.2
_STOP_WORKERS_S = 5.0

_log = logging.getLogger("services.controller")


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Control until `stop` is set.

    Raises:
        StartupError: no cluster, a busy port, or another controller that has taken over.
    """
    config = settings.cluster
    if not config.address:
        raise StartupError("cluster.address is not set: give host:port of a Ray head, or use `pdserve up`")
    owner = f"{socket.gethostname()}:{os.getpid()}:{random_id():x}"
    lease_s = max(_MIN_LEASE_S, _LEASE_ROUNDS * config.watch_s)
    async with RayCluster.connect(config.address, config.namespace) as cluster:
        hold = Hold(cluster, owner, lease_s)
        try:
            if not await _wait_for_lock(hold, config.watch_s, stop):
                return
            try:
                await _control(cluster, settings, hold, stop)
            finally:
                if stop.is_set() and not config.keep_workers:
                    await cluster.remove_lock()
                else:
                    await hold.release()
        except PdserveError as error:
            raise StartupError(error.message) from error


async def _wait_for_lock(hold: Hold, poll_s: float, stop: asyncio.Event) -> bool:
    """Returns: whether it has the lock; not if `stop` was set first. Raises PdserveError: the lock does not answer."""
    reported = ""
    while not stop.is_set():
        holder = await hold.take()
        if holder == hold.owner:
            return True
        if holder != reported:
            _log.info("standing by: controller %s has the lock", holder)
            reported = holder
        await _wait(stop, poll_s)
    return False


async def _control(cluster: RayCluster, settings: Settings, hold: Hold, stop: asyncio.Event) -> None:
    config = settings.cluster
    desired = await cluster.configure(Counts(config.prefill, config.decode))
    controller = Controller(cluster, settings, desired)
    server = GrpcServer()
    server.add(SERVICE, cluster_pb2_grpc.add_ClusterServiceServicer_to_server, ClusterService(controller))
    await controller.adopt()
    # All of that may have taken longer than the lease.
    await hold.confirm()
    port = await server.start(config.host, config.port)
    await server.set_serving(True)
    _log.info("controlling, port %d", port)
    work = asyncio.create_task(controller.run())
    try:
        while not stop.is_set() and not work.done():
            await hold.renew()
            await _wait(stop, config.watch_s)
        if work.done():
            await work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await server.stop(_GRACE_S)
        if stop.is_set() and not config.keep_workers:
            await controller.stop_workers(_STOP_WORKERS_S)
        await controller.close()


async def _wait(stop: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), timeout_s)
    except TimeoutError:
        return


if __name__ == "__main__":
    sys.exit(run_process("controller", main))
