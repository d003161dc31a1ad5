"""The worker's side of sessions: one stream for each frontend, its pulses and its lease.

A session has one reader and one writer task. Neither is ever under a timeout: deadlines are looked at by the one pulse task
of the process, which closes a session that is silent, or whose messages nobody takes; a stream that never says Hello is
ended by a timer of its own. However a session ends, whatever it carried is aborted, and a new one of the same frontend is
answered only when all of that is gone.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

import grpc.aio

from pdserve.config import SessionConfig
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import Role
from pdserve.core.ids import AttemptKey
from pdserve.core.version import PROTOCOL_MAJOR
from pdserve.rpc.v1 import session_pb2, session_pb2_grpc
from pdserve.runtime.outbox import Outbox
from pdserve.wire.attempts import PromptAssembly
from pdserve.wire.convert import error_to_proto, role_from_proto
from pdserve.wire.streams import read_first

SessionContext = grpc.aio.ServicerContext[session_pb2.Command, session_pb2.Event]

log = logging.getLogger(__name__)


class FrontendSession:
    """One frontend's stream, open or closing.

    Attributes:
        instance: the frontend's.
        outbox: what waits to be written.
        prompts: token ids that wait for their Run or Reserve.
        closed: resolves with the reason when the stream is to be left; None is an orderly end.
        released: set when the session has been left, nothing that it carried is held any more, and it is forgotten.
    """

    def __init__(self, instance: int, config: SessionConfig) -> None:
        self.instance = instance
        self.outbox = Outbox(config.message_bytes)
        self.prompts = PromptAssembly(config.prompt_tokens, config.prompt_parts)
        self.last_heard_s = time.monotonic()
        self.closed: asyncio.Future[PdserveError | None] = asyncio.get_running_loop().create_future()
        self.released = asyncio.Event()
        self._held: set[AttemptKey] = set()
        self._forget: Callable[[], object] | None = None

    @property
    def held(self) -> frozenset[AttemptKey]:
        """The attempts that the worker holds for this session."""
        return frozenset(self._held)

    def hold(self, key: AttemptKey) -> None:
        self._held.add(key)

    def let_go(self, key: AttemptKey) -> None:
        self._held.remove(key)
        self._check_released()

    def leave(self, forget: Callable[[], object]) -> None:
        """The stream has been left; `forget` is called as soon as nothing that it carried is held any more."""
        self._forget = forget
        self._check_released()

    def _check_released(self) -> None:
        if self._forget is not None and not self._held:
            self._forget()
            self.released.set()

    def close(self, error: PdserveError | None) -> None:
        """Leave the stream now, once; later reasons change nothing."""
        if not self.closed.done():
            self.closed.set_result(error)

    def end(self, error: PdserveError | None = None) -> None:
        """Close after everything that waits, and an End, has been written."""
        end = session_pb2.End(error=error_to_proto(error) if error else None)
        self.outbox.put(session_pb2.Event(end=end))

    def fail(self, key: AttemptKey, error: PdserveError) -> None:
        """Tell the frontend that its attempt is not held here any more."""
        failed = session_pb2.AttemptFailed(group=key.group.counter, attempt=key.attempt, error=error_to_proto(error))
        self.outbox.put(session_pb2.Event(failed=failed))


class SessionOwner(Protocol):
    """The role's side: what a worker does with the commands of a session. All calls come on the loop."""

    def welcome(self) -> session_pb2.Welcome:
        """Who this worker is.

        Raises:
            PdserveError: it takes no session now.
        """
        ...

    def pulse(self) -> session_pb2.WorkerPulse: ...

    def handle(self, session: FrontendSession, command: session_pb2.Command) -> None:
        """Carry out a PromptPart, Run, Reserve or Cancel.

        Raises:
            PdserveError: the command breaks the protocol; the session ends.
        """
        ...

    def abort_session(self, session: FrontendSession) -> None:
        """Abort whatever the session carried; each attempt is let go when its last resource is free."""
        ...


class SessionService(session_pb2_grpc.SessionServiceServicer):
    """Accepts sessions and keeps the table of them, by frontend instance, until all that they carried is gone."""

    def __init__(self, role: Role, owner: SessionOwner, config: SessionConfig) -> None:
        self.sessions: dict[int, FrontendSession] = {}
        self._role = role
        self._owner = owner
        self._config = config

    # grpc.aio takes a coroutine that uses its context as well as the generator of the stub.
    async def Session(  # type: ignore[override]  # noqa: N802
        self, request_iterator: object, context: SessionContext
    ) -> None:
        """The handler of one stream: Hello, Welcome, then both directions until the session is closed."""
        first = await read_first(context, self._config.dead_after_s)
        if not isinstance(first, session_pb2.Command):
            return
        try:
            hello = self._checked(first)
            await self._replace(hello.frontend_instance)
            welcome = self._owner.welcome()
        except PdserveError as error:
            await context.write(session_pb2.Event(end=session_pb2.End(error=error_to_proto(error))))
            return
        session = FrontendSession(hello.frontend_instance, self._config)
        self.sessions[session.instance] = session
        session.outbox.put(session_pb2.Event(welcome=welcome))
        session.outbox.put(session_pb2.Event(pulse=self._owner.pulse()))
        log.info("session opened", extra={"frontend": f"{session.instance:016x}"})
        await self._serve(session, context)

    async def run_pulses(self) -> None:
        """Pulse every session and close those that are dead or jammed, for as long as the worker lives."""
        while True:
            await asyncio.sleep(self._config.pulse_s)
            now_s = time.monotonic()
            pulse = session_pb2.Event(pulse=self._owner.pulse())
            for session in list(self.sessions.values()):
                if now_s - session.last_heard_s > self._config.dead_after_s:
                    session.close(PdserveError(ErrorCode.worker_lost, "the frontend has been silent for too long"))
                elif (
                    session.outbox.pending_bytes > self._config.pending_bytes
                    or session.outbox.oldest_age_s() > self._config.pending_s
                ):
                    session.close(PdserveError(ErrorCode.worker_lost, "the frontend does not take its messages"))
                else:
                    session.outbox.put(pulse)

    def announce(self, event: session_pb2.Event) -> None:
        """Put an event on every session."""
        for session in self.sessions.values():
            session.outbox.put(event)

    async def end_all(self, wait_s: float) -> None:
        """End every session in order; those that do not take their End within `wait_s` are closed."""
        sessions = list(self.sessions.values())
        for session in sessions:
            session.end()
        if sessions:
            await asyncio.wait([session.closed for session in sessions], timeout=wait_s)
        for session in sessions:
            session.close(PdserveError(ErrorCode.shutting_down, "the worker stops"))

    def _checked(self, first: session_pb2.Command) -> session_pb2.Hello:
        if first.WhichOneof("kind") != "hello":
            raise PdserveError(ErrorCode.protocol_violation, "the first command of a session must be Hello")
        hello = first.hello
        if hello.protocol_major != PROTOCOL_MAJOR:
            raise PdserveError(
                ErrorCode.protocol_violation,
                f"the frontend speaks protocol {hello.protocol_major}, this worker {PROTOCOL_MAJOR}",
            )
        if hello.role and (role := role_from_proto(hello.role)) is not self._role:
            raise PdserveError(
                ErrorCode.protocol_violation,
                f"this is a {self._role} worker, not the {role} it was taken for",
            )
        return hello

    async def _replace(self, instance: int) -> None:
        while (old := self.sessions.get(instance)) is not None:
            old.close(PdserveError(ErrorCode.worker_lost, "the frontend has opened a new session"))
            await old.released.wait()

    async def _serve(self, session: FrontendSession, context: SessionContext) -> None:
        tasks = [asyncio.create_task(self._read(session, context)), asyncio.create_task(self._write(session, context))]
        for task in tasks:
            task.add_done_callback(lambda done: _close_on_error(session, done))
        error: PdserveError | None = PdserveError(ErrorCode.worker_lost, "the connection to the frontend broke")
        try:
            error = await asyncio.shield(session.closed)
        finally:
            # Also on cancellation, which is how grpc.aio tells a handler that its peer is gone.
            session.close(error)
            for task in tasks:
                task.cancel()
            self._owner.abort_session(session)
            session.leave(lambda: self.sessions.pop(session.instance))
            log.info("session closed", extra={"frontend": f"{session.instance:016x}", "reason": str(error or "end")})
        await asyncio.wait(tasks)

    async def _read(self, session: FrontendSession, context: SessionContext) -> None:
        while True:
            command = await context.read()
            if not isinstance(command, session_pb2.Command):
                session.close(PdserveError(ErrorCode.worker_lost, "the frontend left without End"))
                return
            session.last_heard_s = time.monotonic()
            match command.WhichOneof("kind"):
                case "pulse":
                    continue
                case "end":
                    session.close(None)
                    return
                case "hello":
                    session.end(PdserveError(ErrorCode.protocol_violation, "a second Hello in one session"))
                    return
            try:
                self._owner.handle(session, command)
            except PdserveError as error:
                session.end(error)
                return

    async def _write(self, session: FrontendSession, context: SessionContext) -> None:
        while True:
            event = await session.outbox.take()
            await context.write(event)
            if event.HasField("end"):
                session.close(None)
                return


def _close_on_error(session: FrontendSession, done: asyncio.Task[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.warning("session broke", exc_info=error)
        session.close(PdserveError(ErrorCode.worker_lost, f"the session broke: {error}"))
