"""Every call to Ray that places, finds, watches and ends workers."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import ray
import ray.exceptions
import ray.util

from pdserve.cluster.actor import WorkerActor
from pdserve.cluster.lock import Counts, Lease
from pdserve.cluster.placement import Placed, PlacementError, Slot
from pdserve.config import Settings
from pdserve.core.errors import ErrorCode, PdserveError, StartupError
from pdserve.core.ids import random_id

_LOCK = "controller-lock"
# A head that is started at the same time takes some seconds.
_REACH_S = 15.0
_RETRY_S = 0.05
# A process that Ray starts takes some seconds on a loaded machine.
_LOCK_ANSWER_S = 30.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerHandle:
    """An actor that has been asked for; where it runs is known when `RayCluster.started` returns."""

    slot: Slot
    name: str
    actor: Any


class RayCluster:
    """One driver's connection to a cluster. Actors are detached: they outlive it, and are found again by name."""

    def __init__(self) -> None:
        self._lease: Any = None

    @classmethod
    @asynccontextmanager
    async def connect(cls, address: str, namespace: str) -> AsyncIterator[Self]:
        """
        Args:
            address: host:port of the head.
        Raises:
            StartupError: nothing answers there, or it takes another token.
        """
        await asyncio.to_thread(_connect, address, namespace)
        try:
            yield cls()
        finally:
            await asyncio.to_thread(ray.shutdown)

    async def list_workers(self) -> list[WorkerHandle]:
        """Every worker's actor that is alive or about to be, whoever asked for it."""
        return await asyncio.to_thread(_list_workers)

    async def place(self, slot: Slot, class_path: str, settings: Settings, pinned: bool) -> WorkerHandle:
        """Ask for a worker. It waits, in Ray, for as long as no node has room for its role.

        Args:
            class_path: "package.module:Class" of the worker.
            pinned: pin its engine to a core, in turn.
        """
        config = settings.worker.model_copy(update={"worker_id": slot.worker_id})
        settings = settings.model_copy(update={"worker": config})
        name = f"{slot.worker_id}.{random_id():x}"
        core_index = slot.core_index if pinned else None
        actor_class = ray.remote(WorkerActor).options(
            name=name,
            lifetime="detached",
            max_restarts=0,
            num_cpus=0,
            num_gpus=1 if settings.engine.device == "cuda" else 0,
            resources={str(slot.role): 1},
        )
        arguments = (class_path, settings.model_dump_json(), slot, core_index)
        return WorkerHandle(slot, name, await asyncio.to_thread(actor_class.remote, *arguments))

    async def started(self, handle: WorkerHandle) -> Placed:
        """Until the worker has bound its ports.

        Raises:
            PlacementError: it could not, or it died first.
        """
        try:
            placed: Placed = await handle.actor.start.remote()
        except ray.exceptions.RayError as error:
            raise PlacementError(_reason(error)) from error
        return placed

    async def ended(self, handle: WorkerHandle) -> str:
        """Until the worker has stopped, broken or died. Returns: why, in one line; "" if it was stopped."""
        try:
            await handle.actor.wait_closed.remote()
        except ray.exceptions.RayError as error:
            return _reason(error)
        return ""

    async def stop(self, handle: WorkerHandle) -> None:
        """Let the worker drain and stop, for as long as that takes."""
        try:
            await handle.actor.stop.remote()
        except ray.exceptions.RayError as error:
            _log.warning("it did not stop in order: %s", _reason(error), extra={"worker": handle.slot.worker_id})

    async def kill(self, handle: WorkerHandle) -> None:
        """End the worker's process at once, paused or not."""
        await asyncio.to_thread(ray.kill, handle.actor, no_restart=True)

    async def acquire_lock(self, owner: str, lease_s: float) -> str:
        """Take or renew the controllers' lock. Returns: who has it.

        This and the other calls to the lock raise PdserveError(worker_lost) when it does not answer.
        """
        return str(await self._ask_lease("acquire", owner, lease_s))

    async def release_lock(self, owner: str) -> None:
        await self._ask_lease("release", owner)

    async def remove_lock(self) -> None:
        """End the lock's process, and forget what it kept: nothing of the controllers is left."""
        if self._lease is not None:
            await asyncio.to_thread(ray.kill, self._lease)

    async def configure(self, configured: Counts) -> Counts:
        """What should run: the last `save_scale`, unless the settings have changed since."""
        desired: Counts = await self._ask_lease("configure", configured)
        return desired

    async def save_scale(self, desired: Counts) -> None:
        await self._ask_lease("scale", desired)

    async def _ask_lease(self, method: str, *arguments: object) -> Any:
        try:
            async with asyncio.timeout(_LOCK_ANSWER_S):
                return await self._ask_lease_patiently(method, *arguments)
        except TimeoutError:
            message = f"the controllers' lock has not answered for {_LOCK_ANSWER_S:.0f} s: end its actor, {_LOCK}"
            raise PdserveError(ErrorCode.worker_lost, message) from None

    async def _ask_lease_patiently(self, method: str, *arguments: object) -> Any:
        if self._lease is None:
            self._lease = await asyncio.to_thread(_find_or_place_lease)
        try:
            return await getattr(self._lease, method).remote(*arguments)
        except ray.exceptions.RayActorError:
            # Its process is gone, and what it knew: a new one starts empty.
            self._lease = await asyncio.to_thread(_find_or_place_lease)
            return await getattr(self._lease, method).remote(*arguments)


def _connect(address: str, namespace: str) -> None:
    _reach(address)
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise StartupError(f"cannot join the Ray cluster at {address} ({reason}): check RAY_AUTH_TOKEN_PATH") from error


def _reach(address: str) -> None:
    """Until something accepts connections there. Ray itself would try for minutes, and say nothing."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise StartupError(f"cluster.address is {address!r}: give host:port of a Ray head")
    deadline_s = time.monotonic() + _REACH_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=_REACH_S).close()
        except OSError as error:
            if time.monotonic() > deadline_s:
                message = f"no Ray cluster answers at {address} ({error.strerror or error}): start one, or give another"
                raise StartupError(message) from None
            time.sleep(_RETRY_S)
        else:
            return


def _list_workers() -> list[WorkerHandle]:
    handles = []
    for name in ray.util.list_named_actors():
        slot = Slot.parse(name.partition(".")[0])
        if slot is None:
            continue
        try:
            handles.append(WorkerHandle(slot, name, ray.get_actor(name)))
        except ValueError:
            # It has died since the names were listed.
            continue
    return handles


def _find_or_place_lease() -> Any:
    options = {"name": _LOCK, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0, "max_restarts": 0}
    return ray.remote(Lease).options(**options).remote()


def _reason(error: ray.exceptions.RayError) -> str:
    """The cause in one line: a worker's own error, or what Ray says of its process."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return f"{cause}".splitlines()[0] if str(cause) else type(cause).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
