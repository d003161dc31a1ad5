"""How far behind a reader may be, and what counts as reading."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdserve.rpc.v1 import session_pb2
from services.frontend.exchanges import Exchange
from tests.fake_worker import MODEL, FakeWorker
from tests.frontend_stack import Stack, answer_with, frontend_with, ids_of, pair, until

ONE = ids_of("x")
FAR_AWAY_S = 60.0


@asynccontextmanager
async def connected(stack: Stack, sent: str) -> AsyncIterator[socket.socket]:
    """A client with a small receive buffer that has sent this, and has not read yet."""
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", stack.frontend.port))
        await loop.sock_sendall(client, sent.encode())
        yield client


def post(path: str, **fields: Any) -> str:
    """A request."""
    body = json.dumps(fields)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n{body}"


@asynccontextmanager
async def silent_client(stack: Stack, *, max_tokens: int = 400, stream: bool = True) -> AsyncIterator[socket.socket]:
    """Asks for an answer, and never reads."""
    request = post("/v1/completions", model=MODEL, prompt="hello", max_tokens=max_tokens, stream=stream)
    async with connected(stack, request) as client:
        yield client


async def send(stack: Stack, decode: FakeWorker, attempt: session_pb2.Attempt, sent: int) -> int:
    """One more token than were sent; returns how many that are."""
    decode.tokens(attempt, ONE, start=sent)
    await until(lambda: stack.accepted() == sent + 1)
    return sent + 1


async def fill_kernel(stack: Stack, decode: FakeWorker, attempt: session_pb2.Attempt) -> tuple[Exchange, int]:
    """Tokens until the kernel takes no more; the stream, and how many they were."""
    exchange = next(iter(stack.frontend.exchanges))
    sent = 0
    while exchange.request.transport is None or exchange.request.transport.get_write_buffer_size() == 0:
        sent = await send(stack, decode, attempt, sent)
    return exchange, sent


@pytest.mark.asyncio
async def test_a_reader_that_is_too_far_behind_is_given_up_before_any_deadline() -> None:
    prefill, decode = pair()
    limits: dict[str, Any] = {"max_unread_bytes": 4096, "send_buffer_bytes": 4096, "stall_timeout_s": FAR_AWAY_S}
    async with frontend_with(prefill, decode, context_tokens=8192, **limits) as stack, silent_client(stack):
        attempt = (await prefill.expect("run")).run.attempt
        exchange, sent = await fill_kernel(stack, decode, attempt)
        while not exchange.request.protocol.writing_paused:
            sent = await send(stack, decode, attempt, sent)
        decode.tokens(attempt, ONE * 6000, start=sent)
        await decode.expect("cancel")
        await until(lambda: stack.outcomes() == {"client_gone": 1})
        stack.assert_idle()


@pytest.mark.asyncio
async def test_text_that_is_written_meanwhile_is_no_progress_of_a_reader_that_takes_nothing() -> None:
    prefill, decode = pair()
    limits: dict[str, Any] = {"send_buffer_bytes": 4096, "stall_timeout_s": 0.4}
    async with frontend_with(prefill, decode, context_tokens=8192, **limits) as stack, silent_client(stack):
        attempt = (await prefill.expect("run")).run.attempt
        exchange, sent = await fill_kernel(stack, decode, attempt)
        while not stack.outcomes():
            # Each of these is written: there is room in the process's own buffer.
            assert not exchange.request.protocol.writing_paused
            sent = await send(stack, decode, attempt, sent)
            await asyncio.sleep(0.05)
        assert stack.outcomes() == {"client_gone": 1}


# Far more text than the kernel holds.
LONG_TOKENS = 20_000


@pytest.mark.asyncio
async def test_who_takes_nothing_of_a_buffered_answer_counts_as_gone() -> None:
    prefill, decode = pair()
    answer_with(prefill, decode, ONE * LONG_TOKENS)
    limits: dict[str, Any] = {"send_buffer_bytes": 4096, "stall_timeout_s": 0.4}
    async with (
        frontend_with(prefill, decode, context_tokens=2 * LONG_TOKENS, **limits) as stack,
        silent_client(stack, max_tokens=LONG_TOKENS, stream=False),
    ):
        await until(lambda: bool(stack.outcomes()))
        assert stack.outcomes() == {"client_gone": 1}
        stack.assert_idle()


@pytest.mark.asyncio
async def test_a_buffered_answer_is_open_until_its_reader_has_taken_it() -> None:
    prefill, decode = pair()
    answer_with(prefill, decode, ONE * LONG_TOKENS)
    limits: dict[str, Any] = {"send_buffer_bytes": 4096, "stall_timeout_s": FAR_AWAY_S}
    async with (
        frontend_with(prefill, decode, context_tokens=2 * LONG_TOKENS, **limits) as stack,
        silent_client(stack, max_tokens=LONG_TOKENS, stream=False) as client,
    ):
        await until(lambda: len(stack.frontend.exchanges) == 1)
        exchange = next(iter(stack.frontend.exchanges))
        await until(lambda: exchange.request.protocol.writing_paused)
        assert stack.outcomes() == {}
        received = b""
        async with asyncio.timeout(FAR_AWAY_S):
            while not received.endswith(b"}"):
                received += await asyncio.get_running_loop().sock_recv(client, 1 << 16)
        assert json.loads(received.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == "x" * LONG_TOKENS
        await until(lambda: stack.outcomes() == {"completed": 1})


@pytest.mark.asyncio
async def test_who_takes_nothing_of_any_other_response_is_cut_off() -> None:
    limits: dict[str, Any] = {"workers": ("127.0.0.1:9",), "send_buffer_bytes": 4096, "body_timeout_s": 0.5}
    async with frontend_with(**limits) as stack, connected(stack, post("/tokenize", prompt="hello " * 50_000)):
        server = stack.frontend._runner.server
        await until(lambda: any(connection.writing_paused for connection in server.connections))
        await until(lambda: not server.connections)


@pytest.mark.asyncio
async def test_a_head_that_comes_too_slowly_ends_its_connection() -> None:
    async with (
        frontend_with(workers=("127.0.0.1:9",), keepalive_s=0.3) as stack,
        connected(stack, "GET /health HTTP/1.1\r\nHo") as client,
        asyncio.timeout(10),
    ):
        assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
