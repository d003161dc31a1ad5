"""The process of one worker under Ray: any worker class, named by its path, on a thread and an event loop of its own.

Ray answers calls on a loop that it owns, so the worker's loop is the only one that touches gRPC for Python. Signals don't
reach either loop: a controller drains and stops the worker.
"""

import asyncio
import importlib
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, cast

import ray

from pdserve.cluster.placement import Placed, Slot
from pdserve.config import Settings
from pdserve.telemetry.logs import configure_logs

T = TypeVar("T")


class Identity(Protocol):
    """What a started worker says of itself."""

    epoch: int
    session_address: str
    kv_address: str
    admin_address: str
    pid: int


class Worker(Protocol):
    """What a worker class has to offer; see pdserve.runtime.worker."""

    async def start(self) -> Identity: ...

    async def wait_closed(self) -> None: ...

    async def stop(self) -> None: ...


class WorkerActor:
    """Actor that runs one worker.

    Args:
        class_path: "package.module:Class", called with Settings on the worker's loop.
        settings_json: the worker's Settings.
        core_index: the engine is pinned to the core of this number, modulo those there are; None leaves it free.
    """

    def __init__(self, class_path: str, settings_json: str, slot: Slot, core_index: int | None) -> None:
        self._class_path = class_path
        self._slot = slot
        settings = Settings.model_validate_json(settings_json)
        if core_index is not None and settings.engine.core is None:
            cores = sorted(os.sched_getaffinity(0))
            engine = settings.engine.model_copy(update={"core": cores[core_index % len(cores)]})
            settings = settings.model_copy(update={"engine": engine})
        self._settings = settings
        configure_logs(str(slot.role), settings.log)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="worker-loop", daemon=True).start()
        self._worker: Worker | None = None
        # Each controller that this worker lives to see waits for both.
        self._placed: Future[Placed] = Future()
        self._closed = self._submit(self._live())

    async def start(self) -> Placed:
        """Until the worker has bound its ports.

        Raises:
            StartupError: the worker's own.
        """
        return await asyncio.wrap_future(self._placed)

    async def wait_closed(self) -> None:
        """Until the worker has stopped; raises what broke it."""
        await asyncio.wrap_future(self._closed)

    async def stop(self) -> None:
        """Drain and stop the worker."""
        if self._worker is not None:
            await asyncio.wrap_future(self._submit(self._worker.stop()))

    async def _live(self) -> None:
        try:
            module, _, name = self._class_path.partition(":")
            worker = self._worker = cast(Worker, getattr(importlib.import_module(module), name)(self._settings))
            identity = await worker.start()
        except Exception as error:
            self._placed.set_exception(error)
            raise
        placed = Placed(
            slot=self._slot,
            epoch=identity.epoch,
            session_address=identity.session_address,
            kv_address=identity.kv_address,
            admin_address=identity.admin_address,
            pid=identity.pid,
            node=ray.get_runtime_context().get_node_id(),
            log_path=os.readlink("/proc/self/fd/2"),
        )
        self._placed.set_result(placed)
        await worker.wait_closed()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)
