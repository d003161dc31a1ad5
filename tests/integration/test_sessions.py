"""The worker's side of a session, spoken to by hand: who is let in, and who is shown out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdserve.core.errors import ErrorCode
from pdserve.core.ids import random_id
from pdserve.core.sampling import SamplingParams
from pdserve.core.version import PROTOCOL_MAJOR
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import session_pb2 as pb
from pdserve.rpc.v1.session_pb2_grpc import SessionServiceStub
from pdserve.wire.server import dial
from tests.worker_pair import WorkerPair, prompt_of, scripted_settings, wait_until, worker_pair

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def open_session(pair: WorkerPair, *commands: pb.Command) -> "AsyncIterator[Any]":
    """A raw session to decode, with these commands sent."""
    channel = dial(pair.decode.worker.identity.session_address)
    call = SessionServiceStub(channel).Session()
    for command in commands:
        await call.write(command)
    try:
        yield call
    finally:
        call.cancel()
        await channel.close()


def hello(**fields: Any) -> pb.Command:
    return pb.Command(hello=pb.Hello(**({"protocol_major": PROTOCOL_MAJOR, "frontend_instance": random_id()} | fields)))


async def last_event(call: Any) -> pb.Event:
    """The End, past welcome and pulses."""
    while isinstance(event := await call.read(), pb.Event):
        if event.HasField("end"):
            return event
    raise AssertionError("the stream ended without End")


@pytest.mark.parametrize(
    "commands",
    [
        [pb.Command(pulse=pb.Pulse())],
        [hello(protocol_major=PROTOCOL_MAJOR + 1)],
        [hello(role=common_pb2.ROLE_PREFILL)],
        [hello(), hello()],
        [hello(), pb.Command(run=pb.Run())],
        [hello(), pb.Command()],
    ],
    ids=["no-hello", "other-protocol", "other-role", "second-hello", "run-at-decode", "empty"],
)
async def test_whoever_breaks_the_protocol_is_told_so(commands: list[pb.Command]) -> None:
    async with worker_pair() as pair, open_session(pair, *commands) as call:
        assert (await last_event(call)).end.error.code == ErrorCode.protocol_violation


async def test_a_stream_that_never_says_hello_is_ended() -> None:
    decode = scripted_settings(session={"dead_after_s": 0.5})
    async with worker_pair(decode=decode) as pair, open_session(pair) as call:
        assert (await call.code()).name == "FAILED_PRECONDITION"
        assert "none came for 0.5 s" in await call.details()


async def test_an_attempt_that_is_here_already_ends_the_session() -> None:
    slow = scripted_settings(engine={"scripted": {"step_s": 0.02}})
    async with worker_pair(prefill=slow) as pair:
        key = pair.dispatch(prompt_of(30), SamplingParams(max_tokens=500, temperature=0.0))
        await wait_until(lambda: key in pair.decode.worker.held, "the attempt")
        attempt = pair.attempt(key, prompt_of(30), SamplingParams(max_tokens=500))
        pair.reserve(attempt, prompt_of(30), pair.ticket(key))
        await wait_until(lambda: bool(pair.decode.heard.losses), "the end of the session")
        assert pair.decode.heard.losses[0].code is ErrorCode.protocol_violation
        assert key not in pair.decode.heard.failures
        pair.cancel(key, pair.prefill)
        await pair.settle()


async def test_welcome_says_who_the_worker_is() -> None:
    async with worker_pair() as pair, open_session(pair, hello()) as call:
        welcome = (await call.read()).welcome
        identity = pair.decode.worker.identity
        assert (welcome.epoch, welcome.worker_id) == (identity.epoch, identity.worker_id)
        assert welcome.kv_address == identity.kv_address
        assert welcome.total_blocks == 64


async def test_end_is_answered_with_the_end_of_the_stream() -> None:
    async with worker_pair() as pair, open_session(pair, hello(), pb.Command(end=pb.End())) as call:
        while isinstance(await call.read(), pb.Event):
            pass
        assert (await call.code()).name == "OK"


async def test_a_frontend_that_takes_nothing_is_dropped_and_others_notice_nothing() -> None:
    settings = scripted_settings(session={"pending_s": 0.3, "pending_bytes": 1 << 16, "dead_after_s": 60.0})
    params = SamplingParams(max_tokens=300, temperature=0.0, top_logprobs=20)
    async with worker_pair(decode=settings) as pair:
        instance = random_id()
        async with open_session(pair, hello(frontend_instance=instance)) as call:
            await wait_until(lambda: instance in pair.decode.worker.sessions.sessions, "the second session")
            jammed = pair.decode.worker.sessions.sessions[instance]
            filler = pb.Event(failed=pb.AttemptFailed(error=common_pb2.ErrorStatus(message="x" * 60_000)))
            key = pair.dispatch(prompt_of(30), params)
            while not jammed.closed.done():
                jammed.outbox.put(filler)
                await asyncio.sleep(0.001)
            await wait_until(lambda: instance not in pair.decode.worker.sessions.sessions, "the session to be gone")
            del call
        await pair.finish(key)
        assert len(pair.decode.heard.ids(key)) == 300
        await pair.settle()
