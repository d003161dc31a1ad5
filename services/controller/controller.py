"""The controller: compares what should run with what runs, acts on the difference, and publishes the membership."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any

from pdserve.cluster.lock import Counts
from pdserve.cluster.membership import MembershipBoard
from pdserve.cluster.placement import PlacementError, Slot
from pdserve.cluster.ray_cluster import RayCluster, WorkerHandle
from pdserve.config import Settings
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import Role
from services.controller.backoff import Backoff
from services.controller.plan import Action, Drain, Kill, Limits, Phase, Start, Stop, Undrain, decide
from services.controller.tracked import Tracked

# Workers are told what a class is by its path: services do not know each other.
WORKER_CLASSES: Mapping[Role, str] = {
    Role.PREFILL: "services.prefill.worker:PrefillWorker",
    Role.DECODE: "services.decode.worker:DecodeWorker",
}

# A worker that has become ready is to be known soon.
_START_WATCH_S = 0.2

_log = logging.getLogger(__name__)


class Controller:
    """Keeps workers running on one cluster, while it has the lock.

    Args:
        settings: each worker gets them whole, with its own name; the controller reads `cluster`, and from the others how
            patient it has to be.
        desired: how many workers of each role, as far as is known.
    """

    def __init__(self, cluster: RayCluster, settings: Settings, desired: Counts) -> None:
        self.board = MembershipBoard()
        self._cluster = cluster
        self._settings = settings
        self._desired = desired
        self._workers: dict[Slot, Tracked] = {}
        self._backoff = Backoff()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        config, drain_s = settings.cluster, settings.worker.drain_s
        self._watch_s = config.watch_s
        self._limits = Limits(
            start_s=config.start_s,
            silent_s=settings.session.dead_after_s,
            drain_s=drain_s + settings.session.dead_after_s,
            stop_s=drain_s + 2 * settings.session.dead_after_s,
        )

    async def adopt(self) -> None:
        """Take over every worker that already runs, and publish the first membership.

        Whoever is left out of that loses its sessions, so it waits for a moment until each has said where it is.
        """
        for handle in await self._cluster.list_workers():
            if handle.slot in self._workers:
                # Its predecessor was being replaced when the last controller went.
                await self._cluster.kill(handle)
            else:
                self._follow(handle)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._watch_s):
                for worker in list(self._workers.values()):
                    await worker.found.wait()
        self._publish()

    async def run(self) -> None:
        """Watch and act, until cancelled."""
        while True:
            self._changed.clear()
            await self._poll()
            # First what is known, so that watchers see a failure before its cure.
            self._publish()
            views = [worker.view() for worker in self._workers.values()]
            for action in decide(self._counts(), views, self._limits, self._backoff.resting()):
                await self._act(action)
            self._publish()
            starting = any(worker.phase is Phase.STARTING for worker in self._workers.values())
            with suppress(TimeoutError):
                await asyncio.wait_for(
                    self._changed.wait(), min(self._watch_s, _START_WATCH_S) if starting else self._watch_s
                )

    async def close(self) -> None:
        """Stop following; workers go on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._workers.values():
            await worker.close()

    async def stop_workers(self, deadline_s: float) -> None:
        """Stop every worker, in order if it is done by `deadline_s`; only once `run` has been cancelled."""
        for worker in self._workers.values():
            worker.enter(Phase.STOPPING)
            self._run_aside(self._cluster.stop(worker.handle))
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self._workers:
                    self._changed.clear()
                    await self._changed.wait()
        for worker in list(self._workers.values()):
            await self._cluster.kill(worker.handle)

    async def drain(self, worker_id: str, deadline_s: float | None) -> None:
        """Let one worker take no new work. Raises PdserveError: not_found, no_capacity, or the worker's own."""
        await self._reachable(worker_id).ask_drain(deadline_s)
        self._changed.set()

    async def undrain(self, worker_id: str) -> None:
        """Let it take work again. Raises PdserveError: not_found, no_capacity, or the worker's own."""
        await self._reachable(worker_id).ask_undrain()
        self._changed.set()

    async def scale(self, role: Role, count: int) -> None:
        """Keep `count` workers of this role running; remembered across controllers."""
        prefill = count if role is Role.PREFILL else self._desired.prefill
        decode = count if role is Role.DECODE else self._desired.decode
        self._desired = Counts(prefill, decode)
        await self._cluster.save_scale(self._desired)
        self._changed.set()

    def _counts(self) -> Mapping[Role, int]:
        return {Role.PREFILL: self._desired.prefill, Role.DECODE: self._desired.decode}

    def _reachable(self, worker_id: str) -> Tracked:
        for slot, worker in self._workers.items():
            if slot.worker_id == worker_id:
                if worker.admin is None:
                    raise PdserveError(
                        ErrorCode.no_capacity, f"{worker_id} is still starting: ask again when it is ready"
                    )
                return worker
        known = ", ".join(slot.worker_id for slot in sorted(self._workers)) or "none yet"
        raise PdserveError(ErrorCode.not_found, f"there is no worker {worker_id!r}; there are: {known}")

    def _publish(self) -> None:
        members = [worker.member() for worker in self._workers.values()]
        self.board.publish(members, self._desired.prefill, self._desired.decode)

    async def _poll(self) -> None:
        await asyncio.gather(*(self._ask(worker) for worker in self._workers.values()))

    async def _ask(self, worker: Tracked) -> None:
        try:
            await worker.ask_status()
        except PdserveError:
            # Its silence is counted from its last answer.
            return
        if worker.phase is Phase.READY:
            self._backoff.clear(worker.handle.slot)

    async def _act(self, action: Action) -> None:
        slot = action.slot
        if isinstance(action, Start):
            pinned = self._settings.engine.device == "cpu" and self._settings.engine.kind == "torch"
            self._follow(await self._cluster.place(slot, WORKER_CLASSES[slot.role], self._settings, pinned))
            return
        worker = self._workers.get(slot)
        if worker is None:
            # It has ended since the decision.
            return
        match action:
            case Kill(_, reason):
                worker.kill_reason = reason
                await self._cluster.kill(worker.handle)
            case Drain():
                worker.leaving = True
                await self._try(worker, worker.ask_drain(None))
            case Undrain():
                await self._try(worker, worker.ask_undrain())
            case Stop():
                worker.enter(Phase.STOPPING)
                self._run_aside(self._cluster.stop(worker.handle))

    async def _try(self, worker: Tracked, call: Coroutine[Any, Any, None]) -> None:
        try:
            await call
        except PdserveError as error:
            # The next round decides again.
            _log.warning("%s", error.message, extra={"worker": worker.handle.slot.worker_id})

    def _follow(self, handle: WorkerHandle) -> None:
        worker = Tracked(handle, timeout_s=self._watch_s)
        self._workers[handle.slot] = worker
        self._run_aside(self._follow_to_end(worker))

    async def _follow_to_end(self, worker: Tracked) -> None:
        slot = worker.handle.slot
        try:
            placed = await self._cluster.started(worker.handle)
        except PlacementError as error:
            reason = str(error)
        else:
            worker.place(placed)
            _log.info("started, epoch %x, pid %d", placed.epoch, placed.pid, extra={"worker": slot.worker_id})
            self._changed.set()
            reason = await self._cluster.ended(worker.handle)
        # An actor outlives the worker in it.
        await self._cluster.kill(worker.handle)
        await self._forget(worker, worker.kill_reason or reason)

    async def _forget(self, worker: Tracked, reason: str) -> None:
        slot = worker.handle.slot
        if self._workers.get(slot) is worker:
            del self._workers[slot]
        worker.found.set()
        self._publish()
        if worker.phase is Phase.STOPPING:
            _log.info("stopped", extra={"worker": slot.worker_id})
        else:
            self._backoff.note_failure(slot)
            log_path = f"; its log: {worker.placed.log_path}" if worker.placed else ""
            _log.error("%s failed: %s%s", slot.worker_id, reason, log_path, extra={"worker": slot.worker_id})
        self._changed.set()
        await worker.close()

    def _run_aside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_aside)

    def _end_aside(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task of the controller failed", exc_info=error)
