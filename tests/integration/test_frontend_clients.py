"""Clients that leave, stop reading or wait long; all of it on the server as it is really started."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdserve.core.events import FinishReason
from pdserve.rpc.v1 import session_pb2
from tests.fake_worker import FakeWorker
from tests.frontend_stack import Stack, answer_with, frontend_with, ids_of, pair, until

IDS = ids_of("The quick brown fox jumps over the lazy dog")
ONE = ids_of("x")
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 100}
# A client that leaves is to be noticed within a second; the machine may be busy.
NOTICED_S = 2.5


@asynccontextmanager
async def connection(
    stack: Stack, *, receive_buffer_bytes: int | None = None, **fields: object
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A chat request on a bare connection."""
    client = socket.socket()
    client.setblocking(False)
    if receive_buffer_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", stack.frontend.port))
    reader, writer = await asyncio.open_connection(sock=client, limit=1024)
    body = json.dumps(CHAT | fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    await writer.drain()
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def assert_cancelled(stack: Stack, *workers: FakeWorker) -> None:
    for worker in workers:
        await worker.expect("cancel", timeout_s=NOTICED_S)
    await until(lambda: stack.outcomes() == {"client_gone": 1})
    assert not any(worker.held for worker in workers)
    stack.assert_idle()


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "buffered"])
@pytest.mark.parametrize("way", ["close", "half-close"])
async def test_a_client_that_leaves_in_prefill_is_cancelled_on_both_workers(stream: bool, way: str) -> None:
    prefill, decode = pair()
    async with frontend_with(prefill, decode) as stack, connection(stack, stream=stream) as (_, writer):
        await prefill.expect("run")
        await decode.expect("reserve")
        writer.close() if way == "close" else writer.write_eof()
        await assert_cancelled(stack, prefill, decode)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "buffered"])
@pytest.mark.parametrize("way", ["close", "half-close"])
async def test_a_client_that_leaves_in_mid_answer_is_cancelled(stream: bool, way: str) -> None:
    prefill, decode = pair()
    async with frontend_with(prefill, decode) as stack, connection(stack, stream=stream) as (reader, writer):
        attempt = (await prefill.expect("run")).run.attempt
        decode.tokens(attempt, IDS[:4])
        if stream:
            await reader.readuntil(b"quick")
        writer.close() if way == "close" else writer.write_eof()
        await assert_cancelled(stack, decode)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "buffered"])
async def test_a_client_that_leaves_the_line_is_sent_nowhere(stream: bool) -> None:
    prefill, decode = pair()
    decode.state = session_pb2.WORKER_STATE_DRAINING
    async with (
        frontend_with(prefill, decode, wait_ready=False) as stack,
        connection(stack, stream=stream) as (_, writer),
    ):
        await until(lambda: len(stack.frontend.dispatcher.line) == 1)
        writer.close()
        await until(lambda: stack.outcomes() == {"client_gone": 1}, NOTICED_S)
        stack.assert_idle()
        assert prefill.commands == decode.commands == []


@pytest.mark.asyncio
async def test_a_stream_in_the_line_or_in_prefill_gets_heartbeats_and_then_its_answer() -> None:
    prefill, decode = pair()
    async with frontend_with(prefill, decode, heartbeat_s=0.1) as stack, connection(stack, stream=True) as (reader, _):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        await reader.readuntil(b": keepalive\n\n")
        await reader.readuntil(b": keepalive\n\n")
        attempt = (await prefill.expect("run")).run.attempt
        decode.tokens(attempt, IDS, finish=FinishReason.LENGTH)
        await reader.readuntil(b"data: [DONE]\n\n")
        assert stack.outcomes() == {"completed": 1}


@pytest.mark.asyncio
async def test_a_refusal_after_a_heartbeat_is_told_in_band() -> None:
    async with (
        frontend_with(heartbeat_s=0.1, wait_s=0.5, workers=("127.0.0.1:9",)) as stack,
        connection(stack, stream=True) as (reader, _),
    ):
        await reader.readuntil(b": keepalive\n\n")
        event = await reader.readuntil(b"}}\n\n")
        assert b'"code":"no_capacity"' in event
        rest = await reader.readuntil(b"0\r\n\r\n")
        assert b"[DONE]" not in rest


async def fill_socket(stack: Stack, decode: FakeWorker, attempt: session_pb2.Attempt) -> int:
    """Tokens one at a time until the stream's socket takes no more; returns how many."""
    exchange = next(iter(stack.frontend.exchanges))
    sent = 0
    while not exchange.request.protocol.writing_paused:
        decode.tokens(attempt, ONE, start=sent)
        sent += 1
        await until(lambda expected=sent: stack.accepted() == expected)  # type: ignore[misc]
    return sent


@pytest.mark.asyncio
async def test_a_slow_reader_gets_larger_events_and_holds_nobody_up() -> None:
    prefill, decode = pair()
    async with (
        frontend_with(prefill, decode) as stack,
        connection(stack, receive_buffer_bytes=4096, stream=True) as (reader, _),
    ):
        attempt = (await prefill.expect("run")).run.attempt
        sent = await fill_socket(stack, decode, attempt)
        decode.tokens(attempt, ONE * 50, start=sent, finish=FinishReason.LENGTH)
        await until(lambda: stack.accepted() == sent + 50)

        received = b""
        while b"data: [DONE]" not in received:
            received += await reader.read(1 << 16)
        contents = [
            choice["delta"].get("content", "")
            for line in received.split(b"\n")
            if line.startswith(b"data: {")
            for choice in json.loads(line.removeprefix(b"data: "))["choices"]
        ]
        assert "".join(contents) == "x" * (sent + 50)
        assert max(map(len, contents)) >= 50


@pytest.mark.asyncio
async def test_a_reader_that_takes_nothing_counts_as_gone() -> None:
    prefill, decode = pair()
    async with (
        frontend_with(prefill, decode, stall_timeout_s=0.5) as stack,
        connection(stack, receive_buffer_bytes=4096, stream=True),
    ):
        attempt = (await prefill.expect("run")).run.attempt
        await fill_socket(stack, decode, attempt)
        await assert_cancelled(stack, decode)


@pytest.mark.asyncio
async def test_an_abort_storm_leaves_nothing_behind_and_the_next_request_works() -> None:
    prefill, decode = pair()
    async with frontend_with(prefill, decode) as stack:
        storm = [asyncio.create_task(stack.post("/v1/chat/completions", CHAT)) for _ in range(50)]
        await prefill.expect("run", 50)
        for request in storm:
            request.cancel()
        await until(lambda: stack.outcomes() == {"client_gone": 50}, NOTICED_S)
        await until(lambda: not prefill.held and not decode.held)
        stack.assert_idle()
        answer_with(prefill, decode, IDS)
        status, _ = await stack.post("/v1/chat/completions", CHAT)
        assert status == 200


@pytest.mark.asyncio
async def test_a_stopping_frontend_refuses_new_requests_lets_streams_end_and_tells_the_rest() -> None:
    prefill, decode = pair()
    async with frontend_with(prefill, decode, shutdown_s=0.5) as stack, connection(stack, stream=True) as (reader, _):
        attempt = (await prefill.expect("run")).run.attempt
        decode.tokens(attempt, IDS[:4])
        await reader.readuntil(b"quick")
        stopping = asyncio.create_task(stack.frontend.stop())
        await until(lambda: stack.frontend.stopping)
        async with stack.http.get(stack.url + "/ready") as response:
            assert response.status == 503
        status, body = await stack.post("/v1/chat/completions", CHAT)
        assert (status, body["error"]["code"]) == (503, "shutting_down")
        assert b'"code":"shutting_down"' in await reader.readuntil(b"}}\n\n")
        await stopping
        await until(lambda: not prefill.held and not decode.held)
