"""A worker that says what a test tells it to: a real session service on a real port, without an engine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

import grpc.aio

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import FinishReason, Role, Stage, StageReport, Token
from pdserve.core.ids import AttemptKey, GroupId, random_id
from pdserve.core.version import PROTOCOL_MAJOR
from pdserve.rpc.v1 import common_pb2, session_pb2, session_pb2_grpc
from pdserve.wire.convert import error_to_proto, stage_to_proto
from pdserve.wire.tokens import tokens_to_columns

MODEL = "tiny"
PULSE_S = 0.05


class FakeWorker(session_pb2_grpc.SessionServiceServicer):
    """One worker.

    Attributes:
        commands: everything but Hello and Pulse that has come, in order.
        prompts: token ids that came, by (group, attempt).
        held: attempts that were begun and neither ended nor cancelled, as a real worker would count them.
        sessions_opened: Hellos answered.
        pulses_heard: of frontends.
        on_command: called with each command; a test's script.
        instance: of the frontend whose session it has.
        pulses: while False nothing is heard of it, as if it were paused.
    """

    def __init__(self, role: Role, worker_id: str, *, colocated: bool = False) -> None:
        self.role = role
        self.colocated = colocated
        self.worker_id = worker_id
        self.epoch = random_id()
        self.commands: list[session_pb2.Command] = []
        self.prompts: dict[tuple[int, int], list[int]] = {}
        self.held: set[tuple[int, int]] = set()
        self.sessions_opened = 0
        self.pulses_heard = 0
        self.state = session_pb2.WORKER_STATE_READY
        self.total_blocks = 1000
        self.queued_tokens = 0
        self.pulses = True
        self.on_command: Callable[[FakeWorker, session_pb2.Command], None] = lambda worker, command: None
        self.address = ""
        self.instance = 0
        self._events: asyncio.Queue[session_pb2.Event | None] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self._came = asyncio.Event()

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        session_pb2_grpc.add_SessionServiceServicer_to_server(self, self._server)
        bound_port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{bound_port}"
        await self._server.start()

    async def stop(self) -> None:
        """Die: every connection breaks."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    async def Session(  # noqa: N802
        self, request_iterator: object, context: "grpc.aio.ServicerContext[session_pb2.Command, session_pb2.Event]"
    ) -> None:
        first = await context.read()
        assert isinstance(first, session_pb2.Command)
        self.instance = first.hello.frontend_instance
        self.sessions_opened += 1
        self._events = asyncio.Queue()
        welcome = session_pb2.Welcome(
            protocol_major=PROTOCOL_MAJOR,
            epoch=self.epoch,
            role=common_pb2.Role.ValueType(self.role),
            worker_id=self.worker_id,
            model=MODEL,
            geometry=common_pb2.Geometry(block_size=16),
            total_blocks=self.total_blocks,
            colocated=self.colocated,
            draining=self.state == session_pb2.WORKER_STATE_DRAINING,
            kv_address=f"{self.worker_id}:1" if self.role is Role.DECODE else "",
        )
        await context.write(session_pb2.Event(welcome=welcome))
        tasks = [
            asyncio.create_task(self._write(context, self._events)),
            asyncio.create_task(self._pulse()),
        ]
        try:
            while isinstance(command := await context.read(), session_pb2.Command):
                self._take(command)
                if command.HasField("end"):
                    break
        finally:
            self.held.clear()
            for task in tasks:
                task.cancel()

    async def expect(self, kind: str, count: int = 1, timeout_s: float = 5.0) -> session_pb2.Command:
        """The `count`-th command of this kind, once it has come."""
        async with asyncio.timeout(timeout_s):
            while len(found := self.taken(kind)) < count:
                self._came.clear()
                await self._came.wait()
        return found[count - 1]

    def taken(self, kind: str) -> list[session_pb2.Command]:
        """The commands of this kind that have come, in order."""
        return [command for command in self.commands if command.HasField(kind)]  # type: ignore[arg-type]

    # What a script says.

    def on_run(self, script: "Callable[[FakeWorker, session_pb2.Attempt], None]") -> None:
        """Call the script with each attempt that is to be run here."""

        def on_command(worker: FakeWorker, command: session_pb2.Command) -> None:
            if command.HasField("run"):
                script(worker, command.run.attempt)

        self.on_command = on_command

    def send(self, event: session_pb2.Event) -> None:
        self._events.put_nowait(event)

    def tokens(
        self,
        attempt: session_pb2.Attempt,
        ids: Sequence[int],
        *,
        start: int = 0,
        sibling: int = 0,
        finish: FinishReason | None = None,
    ) -> None:
        """Tokens of one sibling from output position `start` of this attempt on; `finish` goes with the last."""
        key = AttemptKey(GroupId(self.instance, attempt.group), attempt.attempt)
        first = attempt.total_tokens + start
        last = len(ids) - 1
        self.step(
            Token(key, sibling, first + i, token_id, finish if i == last else None) for i, token_id in enumerate(ids)
        )

    def step(self, tokens: Iterable[Token], stages: Iterable[StageReport] = ()) -> None:
        """One message with all of these."""
        step = session_pb2.Step(tokens=tokens_to_columns(tokens), stages=map(stage_to_proto, stages))
        self.send(session_pb2.Event(step=step))

    def stage(self, attempt: session_pb2.Attempt, stage: Stage, seconds: float, cached_tokens: int = 0) -> None:
        key = AttemptKey(GroupId(self.instance, attempt.group), attempt.attempt)
        self.step((), [StageReport(key, stage, seconds, cached_tokens)])

    def fail(self, attempt: session_pb2.Attempt, code: ErrorCode, message: str = "told to fail") -> None:
        self.held.discard((attempt.group, attempt.attempt))
        error = error_to_proto(PdserveError(code, message))
        failed = session_pb2.AttemptFailed(group=attempt.group, attempt=attempt.attempt, error=error)
        self.send(session_pb2.Event(failed=failed))

    def _take(self, command: session_pb2.Command) -> None:
        match command.WhichOneof("kind"):
            case "pulse":
                self.pulses_heard += 1
                return
            case "end":
                return
            case "prompt_part":
                part = command.prompt_part
                self.prompts.setdefault((part.group, part.attempt), []).extend(part.token_ids)
            case "run" | "reserve":
                attempt = command.run.attempt if command.HasField("run") else command.reserve.attempt
                assert len(self.prompts[attempt.group, attempt.attempt]) == attempt.total_tokens
                self.held.add((attempt.group, attempt.attempt))
            case "cancel":
                cancel = command.cancel
                if not cancel.siblings and not cancel.unless_running:
                    self.held.discard((cancel.group, cancel.attempt))
        self.commands.append(command)
        self.on_command(self, command)
        self._came.set()

    async def _pulse(self) -> None:
        while True:
            if self.pulses:
                pulse = session_pb2.WorkerPulse(
                    state=self.state,
                    free_blocks=self.total_blocks,
                    total_blocks=self.total_blocks,
                    queued_tokens=self.queued_tokens,
                )
                self.send(session_pb2.Event(pulse=pulse))
            await asyncio.sleep(PULSE_S)

    async def _write(
        self,
        context: "grpc.aio.ServicerContext[session_pb2.Command, session_pb2.Event]",
        events: "asyncio.Queue[session_pb2.Event | None]",
    ) -> None:
        while (event := await events.get()) is not None:
            await context.write(event)


@asynccontextmanager
async def running(*workers: FakeWorker) -> AsyncIterator[None]:
    """Start workers, and stop them in the end."""
    for worker in workers:
        await worker.start()
    try:
        yield
    finally:
        for worker in workers:
            await worker.stop()
