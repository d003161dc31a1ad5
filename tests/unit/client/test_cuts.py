"""Cut the stream at every byte: it is never taken for a whole answer."""

import itertools
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import httpx
import pytest

from pdserve.client.answers import Answer
from pdserve.client.async_client import AsyncClient
from pdserve.client.errors import ServerFailed, TruncatedStream
from pdserve.client.sync_client import Client
from tests.unit.client.recordings import (
    COMPLETION,
    FAILED_CHAT,
    NO_RETRIES,
    ONE_CHAT,
    SILENT_CHAT,
    TWO_CHATS,
    Script,
    async_client,
    in_pieces,
    sync_client,
)

CHAT: dict[str, Any] = {"model": "tiny"}
BODIES = {
    "two chats": (TWO_CHATS, {"n": 2}, ["Paris", "Ly\u2028on \U0001f600"]),
    "a completion": (COMPLETION, {}, ["Paris"]),
    "heartbeats and CRLF": (SILENT_CHAT, {}, ["Paris"]),
}
Read: TypeAlias = Callable[[], Awaitable[Answer]]


class Cutter:
    """A server in memory whose next answer is cut after so many bytes; it ends there, or the connection breaks."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.cut = len(body)
        self.breaks = False
        self._sizes = itertools.cycle([4096, 13, 97])

    def __call__(self) -> httpx.Response:
        error = httpx.RemoteProtocolError("incomplete chunked read") if self.breaks else None
        return httpx.Response(200, stream=in_pieces(self.body[: self.cut], next(self._sizes), error))


@contextmanager
def reading(kind: str, cutter: Cutter, name: str, **fields: Any) -> Iterator[Read]:
    """How one of the clients reads its next answer to the end."""
    script = Script([cutter])
    verb = "stream_completion" if name == "a completion" else "stream_chat"
    if kind == "sync":
        with sync_client(script) as client:

            async def read() -> Answer:
                with getattr(client, verb)("Hello", model="tiny", **fields) as stream:
                    whole: Answer = stream.read_all()
                    return whole

            yield read
    else:
        other = async_client(script)

        async def read_async() -> Answer:
            async with getattr(other, verb)("Hello", model="tiny", **fields) as stream:
                whole: Answer = await stream.read_all()
                return whole

        yield read_async


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("name", BODIES)
async def test_a_cut_answer_is_never_whole(kind: str, name: str) -> None:
    body, fields, texts = BODIES[name]
    cutter = Cutter(body)
    with reading(kind, cutter, name, **fields) as read:
        # The CR of a last CRLF ends its line by itself: with it, nothing of the answer is missing.
        for cutter.cut in range(len(body) - body.endswith(b"\r\n")):
            cutter.breaks = not cutter.breaks
            with pytest.raises(TruncatedStream) as raised:
                await read()
            assert raised.value.answer is not None
            assert all(
                text.startswith(part.text) for text, part in zip(texts, raised.value.answer.choices, strict=False)
            )
        cutter.cut, cutter.breaks = len(body), False
        whole = await read()
    assert [choice.text for choice in whole.choices] == texts
    assert all(choice.finish_reason for choice in whole.choices)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_cut_error_is_a_cut_and_a_whole_one_is_the_servers(kind: str) -> None:
    cutter = Cutter(FAILED_CHAT)
    with reading(kind, cutter, "a failed chat") as read:
        for cutter.cut in range(len(FAILED_CHAT)):
            with pytest.raises(TruncatedStream):
                await read()
        cutter.cut = len(FAILED_CHAT)
        with pytest.raises(ServerFailed, match="no worker") as raised:
            await read()
    assert raised.value.answer is not None
    assert raised.value.answer.text == "Pa"


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_break_after_done_costs_no_answer(kind: str) -> None:
    cutter = Cutter(ONE_CHAT)
    cutter.breaks = True
    with reading(kind, cutter, "one chat") as read:
        assert (await read()).text == "Paris"


def framed(body: bytes) -> tuple[bytes, int]:
    """A response in chunks of an event each, and where its last event ends."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    events = [part + b"\n\n" for part in body.split(b"\n\n")[:-1]]
    chunks = head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in events)
    return chunks + b"0\r\n\r\n", len(chunks) - len(b"\r\n")


@contextmanager
def cutting_server(response: bytes, cuts: list[int]) -> Iterator[str]:
    """A real server that cuts its n-th answer after `cuts[n]` bytes and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for cut in cuts:
                with listener.accept()[0] as connection, connection.makefile("rb") as request:
                    length = 0
                    while (line := request.readline().lower()).strip():
                        length = (
                            int(line.removeprefix(b"content-length:")) if line.startswith(b"content-length") else length
                        )
                    request.read(length)
                    connection.sendall(response[:cut])
                    # Told in order, so that what was sent arrives before the end does.
                    connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def framing_cuts() -> tuple[bytes, list[int], list[int]]:
    response, end_of_events = framed(ONE_CHAT)
    second_chunk = response.index(b"ris") - 40
    cut = [0, 9, response.index(b"\r\n\r\n") + 4, second_chunk, response.index(b"[DONE]"), end_of_events - 1]
    return response, cut, [end_of_events, len(response) - 1, len(response)]


def test_cut_inside_the_framing_of_a_real_connection() -> None:
    response, cut, whole = framing_cuts()
    with cutting_server(response, cut + whole) as url, Client(url, retries=NO_RETRIES) as client:
        for _ in cut:
            with pytest.raises(TruncatedStream), client.stream_chat("Hello", **CHAT) as stream:
                stream.read_all()
        for _ in whole:
            with client.stream_chat("Hello", **CHAT) as stream:
                assert stream.read_all().text == "Paris"


@pytest.mark.asyncio
async def test_cut_inside_the_framing_of_a_real_connection_async() -> None:
    response, cut, whole = framing_cuts()
    with cutting_server(response, cut + whole) as url:
        async with AsyncClient(url, retries=NO_RETRIES) as client:
            for _ in cut:
                with pytest.raises(TruncatedStream):
                    async with client.stream_chat("Hello", **CHAT) as stream:
                        await stream.read_all()
            for _ in whole:
                async with client.stream_chat("Hello", **CHAT) as stream:
                    assert (await stream.read_all()).text == "Paris"
