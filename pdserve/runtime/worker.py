"""What a prefill and a decode worker have in common: an engine thread, three ports, pulses, health, drain and the end.

A worker is a plain class. Its process, or a Ray actor, starts it and waits for it; nothing here knows which.
"""

import asyncio
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from pdserve.config import Settings
from pdserve.core.errors import ErrorCode, PdserveError, StartupError
from pdserve.core.events import EngineLoad, Role
from pdserve.core.ids import AttemptKey, random_id
from pdserve.core.version import PROTOCOL_MAJOR, VERSION
from pdserve.engine.engine import Engine
from pdserve.engine.work import Command, Progress, StepOutcome
from pdserve.rpc.v1 import admin_pb2_grpc, session_pb2, session_pb2_grpc
from pdserve.runtime.admin import AdminService
from pdserve.runtime.allocator import keep_freed_memory
from pdserve.runtime.attempts import Admission, AttemptTable, Held
from pdserve.runtime.engine_thread import EngineState, EngineThread
from pdserve.runtime.engines import engine_factory
from pdserve.runtime.identity import WorkerIdentity
from pdserve.runtime.sessions import FrontendSession, SessionService
from pdserve.wire.convert import geometry_to_proto, pulse_to_proto, role_to_proto, to_milliseconds
from pdserve.wire.server import GrpcServer, format_address

SESSION_SERVICE = "pdserve.rpc.v1.SessionService"
ADMIN_SERVICE = "pdserve.rpc.v1.AdminService"

log = logging.getLogger(__name__)


class Worker(ABC):
    """One worker. A role adds its table of attempts, and what it serves beside sessions.

    Args:
        settings: of the process; each part gets its own slice.
        make_engine: builds the engine, in its thread; None builds the one that the settings ask for.
    """

    role: ClassVar[Role]

    def __init__(self, settings: Settings, make_engine: Callable[[], Engine] | None = None) -> None:
        self.settings = settings
        self.epoch = random_id()
        self.worker_id = settings.worker.worker_id or f"{self.role}-{self.epoch & 0xFFFFFF:06x}"
        self.started_s = time.monotonic()
        self.sessions = SessionService(self.role, self, settings.session)
        self.identity: WorkerIdentity
        self._engine = EngineThread(
            make_engine or engine_factory(settings.model, settings.engine, self.role),
            on_outcome=self._take_outcome,
            on_progress=self._take_progress,
            on_broken=self._take_breakdown,
            core=settings.engine.core,
            idle_tick_s=settings.session.pulse_s,
        )
        self._load = EngineLoad()
        self._engine_built: Engine | None = None
        self._attempts: AttemptTable[Any] | None = None
        self._admin_server = GrpcServer()
        self._servers: list[GrpcServer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._is_draining = False
        self._is_stopping = False
        self._drains: set[asyncio.Task[None]] = set()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # What a role adds.

    @abstractmethod
    def make_attempts(self, engine: Engine, admission: Admission) -> AttemptTable[Any]:
        """The table of this role, once the engine is there."""

    async def serve_role(self) -> str:
        """Serve what only this role serves; returns its address, or ""."""
        return ""

    async def close_role(self) -> None:  # noqa: B027 - most roles have nothing to close
        """Close what only this role has opened."""

    @property
    def transfers(self) -> int:
        """Pushes under way."""
        return 0

    # Life.

    async def start(self) -> WorkerIdentity:
        """Bind the ports and begin to load the model; returns before that is done.

        Raises:
            StartupError: a port is taken.
        """
        keep_freed_memory()
        config = self.settings.worker
        sessions = GrpcServer()
        sessions.add(SESSION_SERVICE, session_pb2_grpc.add_SessionServiceServicer_to_server, self.sessions)
        self._admin_server.add(ADMIN_SERVICE, admin_pb2_grpc.add_AdminServiceServicer_to_server, AdminService(self))
        try:
            session_address = await self.listen(sessions, config.session_port)
            kv_address = await self.serve_role()
            admin_address = await self.listen(self._admin_server, config.admin_port)
        except StartupError:
            # Those that listen already.
            await self._stop_servers(0.0)
            raise
        self.identity = WorkerIdentity(
            self.worker_id, self.role, self.epoch, session_address, kv_address, admin_address, os.getpid()
        )
        self._tasks = [
            asyncio.create_task(self._open(self._engine.start())),
            asyncio.create_task(self.sessions.run_pulses()),
            asyncio.create_task(self._watch_health()),
        ]
        for task in self._tasks:
            task.add_done_callback(self._check_task)
        log.info("worker started", extra={"worker": self.worker_id, "address": session_address, "admin": admin_address})
        return self.identity

    async def listen(self, server: GrpcServer, port: int) -> str:
        """Start a server of this worker, stopped with it; returns the address that others are told."""
        config = self.settings.worker
        self._servers.append(server)
        bound_port = await server.start(config.host, port)
        return format_address(config.advertise_host or config.host, bound_port)

    async def wait_closed(self) -> None:
        """Until `stop` is done.

        Raises:
            Exception: what broke the worker; a StartupError if its engine could not even be built.
        """
        await asyncio.shield(self._closed)

    async def stop(self, drain_s: float | None = None) -> None:
        """Drain for up to `drain_s` (default: the setting), tell every frontend, and close everything."""
        self._is_stopping = True
        self._begin_drain(self.settings.worker.drain_s if drain_s is None else drain_s)
        if self._attempts is not None:
            await self._attempts.wait_empty()
        await self.sessions.end_all(self.settings.session.pulse_s)
        for task in [*self._tasks, *self._drains]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._drains, return_exceptions=True)
        await self._stop_servers(self.settings.session.pulse_s)
        await self.close_role()
        await asyncio.to_thread(self._engine.stop, self.settings.engine.stuck_after_s)
        if not self._closed.done():
            self._closed.set_result(None)

    def drain(self, deadline_s: float) -> None:
        """Take no new attempts; what is still held at the deadline is given back to its frontends to be moved.

        Without effect once the worker stops: that has a deadline of its own.
        """
        if not self._is_stopping:
            self._begin_drain(deadline_s)

    def undrain(self) -> None:
        """Take new attempts again; frontends see it in the next pulse.

        Raises:
            PdserveError: shutting_down; it stops, and cannot be kept.
        """
        if self._is_stopping:
            raise PdserveError(ErrorCode.shutting_down, f"worker {self.worker_id} stops already")
        self._end_drains()
        self._is_draining = False
        if self._attempts is not None:
            self._attempts.draining = False

    def _begin_drain(self, deadline_s: float) -> None:
        self._end_drains()
        self._is_draining = True
        go_away = session_pb2.GoAway(deadline_ms=to_milliseconds(deadline_s))
        self.sessions.announce(session_pb2.Event(go_away=go_away))
        if self._attempts is not None:
            self._attempts.draining = True
            self._drains.add(asyncio.create_task(self._move_at(self._attempts, deadline_s)))

    def post(self, command: Command) -> None:
        """Give the engine a command before its next step."""
        self._engine.post(command)

    # What sessions ask (SessionOwner).

    def welcome(self) -> session_pb2.Welcome:
        if self._engine_built is None:
            raise still_loading()
        runner = self._engine_built.runner
        return session_pb2.Welcome(
            protocol_major=PROTOCOL_MAJOR,
            epoch=self.epoch,
            role=role_to_proto(self.role),
            worker_id=self.worker_id,
            model=self.settings.model.name,
            geometry=geometry_to_proto(runner.geometry),
            max_context_tokens=self._engine_built.max_context_tokens,
            total_blocks=runner.pool.num_blocks,
            kv_address=self.identity.kv_address,
            build=VERSION,
            draining=self._is_draining,
            colocated=self.settings.worker.colocated,
        )

    def pulse(self) -> session_pb2.WorkerPulse:
        step_age_s = time.monotonic() - self._engine.last_step_s
        return pulse_to_proto(replace(self._load, step_age_s=step_age_s), self.state(step_age_s))

    def handle(self, session: FrontendSession, command: session_pb2.Command) -> None:
        if self._attempts is None:
            raise PdserveError(ErrorCode.protocol_violation, "a command before Welcome")
        self._attempts.handle(session, command)

    def abort_session(self, session: FrontendSession) -> None:
        if self._attempts is not None:
            self._attempts.abort_session(session)

    # What operators ask (AdminService).

    def state(self, step_age_s: float) -> session_pb2.WorkerState.ValueType:
        """As pulses and status say it. `step_age_s` is that of the engine's last step."""
        if self._engine.state is EngineState.BROKEN:
            return session_pb2.WORKER_STATE_BROKEN
        if self._engine_built is None:
            return session_pb2.WORKER_STATE_STARTING
        if step_age_s > self.settings.engine.stuck_after_s:
            return session_pb2.WORKER_STATE_STUCK
        return session_pb2.WORKER_STATE_DRAINING if self._is_draining else session_pb2.WORKER_STATE_READY

    @property
    def held(self) -> Mapping[AttemptKey, Held]:
        return self._attempts.held if self._attempts is not None else {}

    def state_name(self, key: AttemptKey) -> str:
        """Name of the state of an attempt that is held."""
        if self._attempts is None:
            raise KeyError(key)
        return self._attempts.state_name(self._attempts.held[key])

    # The engine's side.

    async def _open(self, built: asyncio.Future[Engine]) -> None:
        try:
            engine = await built
        except Exception:  # noqa: BLE001 - _take_breakdown is told of it
            return
        admission = Admission(
            model=self.settings.model.name,
            vocab_size=engine.runner.vocab_size,
            max_held=self.settings.engine.max_waiting + self.settings.engine.max_running,
        )
        self._attempts = self.make_attempts(engine, admission)
        self._attempts.draining = self._is_draining
        self._engine_built = engine
        log.info("worker ready", extra={"worker": self.worker_id, "blocks": engine.runner.pool.num_blocks})

    def _take_outcome(self, outcome: StepOutcome) -> None:
        self._load = outcome.load
        if self._attempts is not None:
            self._attempts.take_outcome(outcome)

    def _take_progress(self, progress: Sequence[Progress]) -> None:
        if self._attempts is not None:
            self._attempts.learn_progress(progress)

    def _take_breakdown(self, error: Exception) -> None:
        # One that could not start has a message that says what to do; whoever waits for this worker shows it.
        if not isinstance(error, StartupError):
            log.error("the worker broke", extra={"worker": self.worker_id}, exc_info=error)
        if self._attempts is not None:
            self._attempts.break_all(PdserveError(ErrorCode.engine_failed, "the worker broke"))
        if not self._closed.done():
            self._closed.set_exception(error)

    def _check_task(self, task: asyncio.Task[None]) -> None:
        """A worker that no longer pulses or looks at its health is replaced like one whose engine broke."""
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._take_breakdown(error)

    async def _move_at(self, attempts: AttemptTable[Any], deadline_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await attempts.wait_empty()
        attempts.break_all(PdserveError(ErrorCode.draining, "this worker drains, and its deadline has passed"))

    async def _watch_health(self) -> None:
        while True:
            step_age_s = time.monotonic() - self._engine.last_step_s
            ready = self.state(step_age_s) == session_pb2.WORKER_STATE_READY
            for server in self._servers:
                await server.set_serving(ready)
            await asyncio.sleep(self.settings.session.pulse_s)

    async def _stop_servers(self, grace_s: float) -> None:
        for server in self._servers:
            await server.stop(grace_s)

    def _end_drains(self) -> None:
        for task in self._drains:
            task.cancel()
        self._drains.clear()


def still_loading() -> PdserveError:
    """What a worker says to whoever comes before its engine is there."""
    return PdserveError(ErrorCode.no_capacity, "this worker is still loading its model")


async def run_worker(worker: Worker, stop: asyncio.Event) -> None:
    """Start a worker, and stop it in order when `stop` is set.

    Raises:
        Exception: what broke the engine, after everything has been closed.
    """
    await worker.start()
    closed = asyncio.create_task(worker.wait_closed())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({closed, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    await worker.stop()
    await closed
