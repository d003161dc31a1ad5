"""The frontend's end of a session: one stream to one worker, opened again for as long as the worker is wanted.

A connection has one reader and one writer task. Nothing waits on either with a timeout and nothing cancels the reader, since
a read or write that is cancelled takes the whole call with it; deadlines are timers that cancel the call itself.
A broken connection is never resumed: what it carried is lost, and the worker aborts it.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import grpc.aio

from pdserve.config import SessionConfig
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import EngineLoad, PromptLogprobs, Role, StageReport, Token
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.core.version import PROTOCOL_MAJOR, VERSION
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import session_pb2 as pb
from pdserve.rpc.v1.session_pb2_grpc import SessionServiceStub
from pdserve.wire.convert import (
    error_from_proto,
    load_from_proto,
    role_from_proto,
    role_to_proto,
    stage_from_proto,
)
from pdserve.wire.prompt_logprobs import prompt_logprobs_from_proto
from pdserve.wire.server import dial
from pdserve.wire.tokens import tokens_from_columns

_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 1.0

_logger = logging.getLogger(__name__)


class SessionListener(Protocol):
    """Hears what a session brings, in order, on the loop. Nothing here may block or raise."""

    def on_welcome(self, welcome: pb.Welcome) -> None: ...

    def on_tokens(self, tokens: Sequence[Token]) -> None:
        """What a step brought. Several steps come as one when they were sent as one."""

    def on_stages(self, stages: Sequence[StageReport]) -> None: ...

    def on_prompt_logprobs(self, parts: Sequence[PromptLogprobs]) -> None:
        """They come before the first token of their attempt."""

    def on_failed(self, key: AttemptKey, error: PdserveError) -> None:
        """The worker no longer holds the attempt."""

    def on_pulse(self, load: EngineLoad, state: "pb.WorkerState.ValueType") -> None: ...

    def on_go_away(self, deadline_s: float) -> None: ...

    def on_lost(self, error: PdserveError) -> None:
        """The connection is gone with all it carried, or could not be made. It is tried again later."""


class WorkerSession:
    """A session to the worker at one address.

    Args:
        address: host:port of the worker's session service.
        instance: this frontend's random number.
        role: what the worker is taken for; None takes it as it is.
        listener: hears everything.
        jitter: numbers in [0, 1) that spread reconnects.
    """

    def __init__(
        self,
        address: str,
        instance: int,
        role: Role | None,
        config: SessionConfig,
        listener: SessionListener,
        *,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.address = address
        self._hello = pb.Hello(
            protocol_major=PROTOCOL_MAJOR,
            frontend_instance=instance,
            role=role_to_proto(role) if role else common_pb2.ROLE_UNSPECIFIED,
            build=VERSION,
        )
        self._instance = instance
        self._role = role
        self._config = config
        self._listener = listener
        self._jitter = jitter
        self._connection: _Connection | None = None
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether the worker has answered and the connection stands."""
        return self._connection is not None and self._connection.welcomed

    @property
    def quiet(self) -> bool:
        """Whether nothing was heard for so long that the worker should get no new work."""
        return self._connection is None or self._connection.silence_s > self._config.quiet_after_s

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"session {self.address}")

    def send(self, commands: Iterable[pb.Command]) -> None:
        """Put commands in line, in order. They are lost with the connection if it breaks, as `on_lost` will say.

        Raises:
            PdserveError: worker_lost, when there is no connection.
        """
        if self._connection is None or not self._connection.welcomed:
            raise PdserveError(ErrorCode.worker_lost, f"no session with the worker at {self.address}")
        self._connection.put(commands)

    async def close(self) -> None:
        """End the session in order, and wait until it is gone. `on_lost` is called if there was a connection."""
        self._closing.set()
        if self._connection is not None:
            self._connection.end()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._closing.is_set():
            connection = _Connection(
                self.address, self._hello, self._instance, self._role, self._config, self._listener
            )
            self._connection = connection
            error = await connection.run()
            self._connection = None
            if connection.was_welcomed:
                backoff_s = _FIRST_BACKOFF_S
            try:
                self._listener.on_lost(error)
            except Exception:
                # A defect there must not cost the worker for ever.
                _logger.exception("the loss of the worker at %s could not be handled", self.address)
            await self._wait_to_close(backoff_s * (0.5 + self._jitter()))
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    async def _wait_to_close(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._closing.wait()
        except TimeoutError:
            return


class _Connection:
    """One life of a session. The task that runs it is the call's reader."""

    def __init__(
        self,
        address: str,
        hello: pb.Hello,
        instance: int,
        role: Role | None,
        config: SessionConfig,
        listener: SessionListener,
    ) -> None:
        self._address = address
        self._instance = instance
        self._role = role
        self._config = config
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._call: grpc.aio.StreamStreamCall[pb.Command, pb.Event] | None = None
        self._error: PdserveError | None = None
        self._pending: deque[tuple[pb.Command, int, float]] = deque()
        self._pending_bytes = 0
        self._wake = asyncio.Event()
        self._sent_s = self._heard_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self.was_welcomed = False
        self.put([pb.Command(hello=hello)])

    @property
    def welcomed(self) -> bool:
        return self.was_welcomed and self._error is None

    @property
    def silence_s(self) -> float:
        return self._loop.time() - self._heard_s

    def put(self, commands: Iterable[pb.Command]) -> None:
        now_s = self._loop.time()
        for command in commands:
            size = command.ByteSize()
            self._pending.append((command, size, now_s))
            self._pending_bytes += size
        self._wake.set()
        if self._pending_bytes > self._config.pending_bytes:
            self._break(PdserveError(ErrorCode.worker_lost, f"the worker at {self._address} does not take commands"))

    def end(self) -> None:
        """Say that the session ends; it is cut if the worker does not agree in time."""
        closed = PdserveError(ErrorCode.worker_lost, f"the session with {self._address} was closed")
        if not self.welcomed:
            self._break(closed)
            return
        self.put([pb.Command(end=pb.End())])
        self._loop.call_later(self._config.pulse_s, self._break, closed)

    async def run(self) -> PdserveError:
        """Connect, carry messages until the connection ends, and say why it ended."""
        channel = dial(self._address)
        try:
            self._call = SessionServiceStub(channel).Session()
            writer = self._loop.create_task(self._write(self._call), name=f"session writer {self._address}")
            self._tick()
            try:
                await self._read(self._call)
            finally:
                # The call is over, so there is nothing left that this could take along.
                self._call.cancel()
                writer.cancel()
                await asyncio.wait([writer])
        finally:
            if self._timer is not None:
                self._timer.cancel()
            await channel.close()
        return self._error or self._lost("ended")

    def _lost(self, how: str) -> PdserveError:
        return PdserveError(ErrorCode.worker_lost, f"the session with the worker at {self._address} {how}")

    def _break(self, error: PdserveError) -> None:
        """Cancel the call; the reader ends, and `run` with it."""
        if self._error is None:
            self._error = error
        if self._call is not None:
            self._call.cancel()

    async def _read(self, call: "grpc.aio.StreamStreamCall[pb.Command, pb.Event]") -> None:
        try:
            while self._error is None and isinstance(event := await call.read(), pb.Event):
                self._heard_s = self._loop.time()
                if not self._take(event):
                    return
        except grpc.aio.AioRpcError as error:
            self._error = self._error or self._lost(f"broke: {error.details() or error.code().name}")
        except asyncio.CancelledError:
            # A call that was cancelled here raises this in its reader; the reader's own cancellation must go on.
            task = asyncio.current_task()
            if self._error is None or (task is not None and task.cancelling()):
                raise
        except (ValueError, PdserveError) as error:
            self._error = PdserveError(
                ErrorCode.protocol_violation, f"the worker at {self._address} sent what cannot be read: {error}"
            )
        except Exception as error:
            # A defect here costs one connection, not the worker for ever.
            _logger.exception("a message of the worker at %s could not be handled", self._address)
            self._error = PdserveError(ErrorCode.internal, f"{type(error).__name__} in the frontend")

    def _take(self, event: pb.Event) -> bool:
        """Whether the session goes on."""
        kind = event.WhichOneof("kind")
        if kind != "welcome" and not self.was_welcomed and kind != "end":
            raise ValueError(f"{kind} before welcome")
        match kind:
            case "step":
                # A token may end its request; what the step says of it has to be known by then.
                if event.step.stages:
                    self._listener.on_stages([stage_from_proto(stage, self._instance) for stage in event.step.stages])
                if event.step.prompt_logprobs:
                    parts = [prompt_logprobs_from_proto(part, self._instance) for part in event.step.prompt_logprobs]
                    self._listener.on_prompt_logprobs(parts)
                if event.step.tokens.group:
                    self._listener.on_tokens(tokens_from_columns(event.step.tokens, self._instance))
            case "failed":
                key = AttemptKey(GroupId(self._instance, event.failed.group), event.failed.attempt)
                self._listener.on_failed(key, error_from_proto(event.failed.error))
            case "pulse":
                self._listener.on_pulse(load_from_proto(event.pulse), event.pulse.state)
            case "welcome":
                self._check(event.welcome)
                self.was_welcomed = True
                self._listener.on_welcome(event.welcome)
            case "go_away":
                self._listener.on_go_away(event.go_away.deadline_ms / 1000)
            case "end":
                self._error = (
                    error_from_proto(event.end.error) if event.end.error.code else self._lost("was ended by it")
                )
                return False
        return True

    def _check(self, welcome: pb.Welcome) -> None:
        if welcome.protocol_major != PROTOCOL_MAJOR:
            raise ValueError(f"it speaks protocol {welcome.protocol_major}, this frontend {PROTOCOL_MAJOR}")
        role = role_from_proto(welcome.role)
        if self._role not in (None, role):
            raise ValueError(f"its role is {role}, not {self._role}")

    async def _write(self, call: "grpc.aio.StreamStreamCall[pb.Command, pb.Event]") -> None:
        try:
            while True:
                while not self._pending:
                    self._wake.clear()
                    await self._wake.wait()
                command, size, _ = self._pending[0]
                await call.write(command)
                self._pending.popleft()
                self._pending_bytes -= size
                self._sent_s = self._loop.time()
                if command.HasField("end"):
                    await call.done_writing()
                    return
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # The reader meets the end of the call too, and reports it.
            _logger.debug("the writer of the session with %s stopped: %s", self._address, error)

    def _tick(self) -> None:
        now_s = self._loop.time()
        config = self._config
        if now_s - self._heard_s >= config.dead_after_s:
            self._break(self._lost(f"was silent for {config.dead_after_s:g} s"))
            return
        if self._pending and now_s - self._pending[0][2] >= config.pending_s:
            self._break(self._lost(f"took no command for {config.pending_s:g} s"))
            return
        if self.welcomed and not self._pending and now_s - self._sent_s >= config.pulse_s:
            self.put([pb.Command(pulse=pb.Pulse())])
            self._sent_s = now_s
        pulse_in_s = max(self._sent_s + config.pulse_s - now_s, 0.1 * config.pulse_s)
        dead_in_s = self._heard_s + config.dead_after_s - now_s
        self._timer = self._loop.call_later(min(pulse_in_s, dead_in_s), self._tick)
