"""The frontend's end of a session, against a real gRPC server."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from pdserve.config import SessionConfig
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import EngineLoad, FinishReason, Role, StageReport, Token
from pdserve.core.ids import AttemptKey
from pdserve.rpc.v1 import session_pb2 as pb
from pdserve.wire.session_client import WorkerSession
from tests.fake_worker import PULSE_S, FakeWorker, running
from tests.frontend_stack import until

CONFIG = SessionConfig(pulse_s=PULSE_S, quiet_after_s=0.3, dead_after_s=0.8)
INSTANCE = 77


class Heard:
    """A listener that keeps everything."""

    def __init__(self) -> None:
        self.welcomes: list[pb.Welcome] = []
        self.tokens: list[Token] = []
        self.failed: list[tuple[AttemptKey, PdserveError]] = []
        self.pulses = 0
        self.lost: list[PdserveError] = []
        self.go_aways: list[float] = []

    def on_welcome(self, welcome: pb.Welcome) -> None:
        self.welcomes.append(welcome)

    def on_tokens(self, tokens: Sequence[Token]) -> None:
        self.tokens += tokens

    def on_stages(self, stages: Sequence[StageReport]) -> None: ...

    def on_failed(self, key: AttemptKey, error: PdserveError) -> None:
        self.failed.append((key, error))

    def on_pulse(self, load: EngineLoad, state: "pb.WorkerState.ValueType") -> None:
        self.pulses += 1

    def on_go_away(self, deadline_s: float) -> None:
        self.go_aways.append(deadline_s)

    def on_lost(self, error: PdserveError) -> None:
        self.lost.append(error)


def open_session(address: str, heard: Heard, role: Role | None = Role.DECODE, **config: float) -> WorkerSession:
    opened = WorkerSession(address, INSTANCE, role, CONFIG.model_copy(update=config), heard, jitter=lambda: 0.0)
    opened.start()
    return opened


@asynccontextmanager
async def session(**config: float) -> AsyncIterator[tuple[FakeWorker, Heard, WorkerSession]]:
    """A decode worker, and a session to it that stands."""
    worker, heard = FakeWorker(Role.DECODE, "decode-0"), Heard()
    async with running(worker):
        opened = open_session(worker.address, heard, **config)
        try:
            await until(lambda: opened.connected)
            yield worker, heard, opened
        finally:
            await opened.close()
        assert not opened.connected


def cancel(group: int) -> pb.Command:
    return pb.Command(cancel=pb.Cancel(group=group, attempt=1))


@pytest.mark.asyncio
async def test_hello_is_answered_and_messages_go_both_ways_in_order() -> None:
    async with session() as (worker, heard, opened):
        opened.send(cancel(group) for group in range(1, 101))
        await worker.expect("cancel", 100)
        assert [command.cancel.group for command in worker.commands] == list(range(1, 101))

        attempt = pb.Attempt(group=5, attempt=2, total_tokens=3)
        worker.tokens(attempt, [9, 8], finish=FinishReason.STOP)
        worker.fail(attempt, ErrorCode.engine_failed)
        worker.send(pb.Event(go_away=pb.GoAway(deadline_ms=1500)))
        await until(lambda: bool(heard.go_aways))
        assert [(token.key.group, token.position, token.token_id, token.finish) for token in heard.tokens] == [
            ((INSTANCE, 5), 3, 9, None),
            ((INSTANCE, 5), 4, 8, FinishReason.STOP),
        ]
        assert [(key, error.code) for key, error in heard.failed] == [
            (AttemptKey(heard.tokens[0].key.group, 2), ErrorCode.engine_failed)
        ]
        assert heard.go_aways == [1.5]


@pytest.mark.asyncio
async def test_an_idle_session_pulses() -> None:
    async with session() as (worker, heard, opened):
        await until(lambda: worker.pulses_heard >= 3 and heard.pulses >= 3)
        assert not opened.quiet


@pytest.mark.asyncio
async def test_a_silent_worker_is_quiet_then_dead_and_is_tried_again() -> None:
    async with session() as (worker, heard, opened):
        worker.pulses = False
        await until(lambda: opened.quiet)
        assert opened.connected
        assert heard.lost == []
        await until(lambda: bool(heard.lost))
        assert heard.lost[0].code is ErrorCode.worker_lost
        assert "silent" in heard.lost[0].message
        await until(lambda: len(heard.welcomes) == 2)


@pytest.mark.asyncio
async def test_a_loss_that_cannot_be_handled_does_not_cost_the_worker_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(error: PdserveError) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError("a defect")

    async with session() as (worker, heard, _):
        monkeypatch.setattr(heard, "on_lost", fail)
        await worker.stop()
        await worker.start(int(worker.address.rpartition(":")[2]))
        await until(lambda: len(heard.welcomes) == 2)
        assert "ZeroDivisionError: a defect" in caplog.text


@pytest.mark.asyncio
async def test_a_worker_that_dies_is_lost_at_once_and_found_again_at_its_address() -> None:
    async with session() as (worker, heard, opened):
        await worker.stop()
        await until(lambda: bool(heard.lost))
        assert not opened.connected
        with pytest.raises(PdserveError) as refused:
            opened.send([cancel(1)])
        assert refused.value.code is ErrorCode.worker_lost
        await worker.start(int(worker.address.rpartition(":")[2]))
        await until(lambda: opened.connected)
        assert len(heard.welcomes) == 2


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("role", "code"), [(Role.PREFILL, ErrorCode.protocol_violation), (None, None)], ids=["another role", "any role"]
)
async def test_a_worker_is_taken_only_for_what_it_is(role: Role | None, code: ErrorCode | None) -> None:
    worker, heard = FakeWorker(Role.DECODE, "decode-0"), Heard()
    async with running(worker):
        opened = open_session(worker.address, heard, role)
        await until(lambda: bool(heard.welcomes or heard.lost))
        assert [error.code for error in heard.lost] == ([code] if code else [])
        await opened.close()


@pytest.mark.asyncio
async def test_an_end_is_a_loss_with_the_workers_own_error() -> None:
    async with session() as (worker, heard, _):
        worker.send(pb.Event(end=pb.End(error={"code": "draining", "message": "moving out"})))  # type: ignore[arg-type]
        await until(lambda: bool(heard.lost))
        assert heard.lost[0].code is ErrorCode.draining


@pytest.mark.asyncio
async def test_commands_that_nobody_takes_are_bounded_in_bytes() -> None:
    async with session(pending_bytes=100_000) as (_, heard, opened):
        part = pb.Command(prompt_part=pb.PromptPart(group=1, attempt=1, token_ids=range(30_000)))
        opened.send([part] * 3)
        await until(lambda: bool(heard.lost))
        assert "does not take" in heard.lost[0].message


@pytest.mark.asyncio
async def test_closing_a_session_that_never_stood_is_immediate() -> None:
    heard = Heard()
    opened = open_session("127.0.0.1:9", heard)
    await until(lambda: bool(heard.lost))
    async with asyncio.timeout(3):
        await opened.close()
