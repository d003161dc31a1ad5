"""A client on a bare connection, which can leave in every way that TCP has."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import StrEnum, auto
from typing import Any

from tests.scripted_words import MODEL

_READ_BYTES = 1 << 16
# SO_LINGER on, for no time: closing sends RST, and whatever was not sent is lost.
_LINGER = struct.pack("ii", 1, 0)


class Leaving(StrEnum):
    """How a client says goodbye."""

    CLOSE = auto()
    HALF_CLOSE = auto()
    RESET = auto()


class BareClient:
    """One request. `received` is what was read of its response."""

    def __init__(self, connection: socket.socket) -> None:
        self.received = b""
        self._socket = connection
        self._loop = asyncio.get_running_loop()

    @property
    def tokens(self) -> int:
        """Tokens of a streamed completion that were read; scripted ones begin with a space."""
        return self.received.count(b'"text":" w')

    @property
    def texts(self) -> dict[int, str]:
        """What was read of each choice of a streamed completion."""
        texts: dict[int, str] = {}
        for line in self.received.split(b"\n"):
            # An event is a line of its own, whatever chunks it comes in; the last one may be half read.
            if line.startswith(b"data: {") and line.endswith(b"}"):
                for choice in json.loads(line.removeprefix(b"data: ")).get("choices", ()):
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        return texts

    async def read_tokens(self, tokens: int) -> None:
        """Until so many tokens have come; fails when the response ends before."""
        while self.tokens < tokens:
            data = await self._loop.sock_recv(self._socket, _READ_BYTES)
            assert data, self.received
            self.received += data

    async def read_until(self, words: bytes) -> None:
        """Until these have come."""
        while words not in self.received:
            data = await self._loop.sock_recv(self._socket, _READ_BYTES)
            assert data, self.received
            self.received += data

    def leave(self, way: Leaving) -> None:
        match way:
            case Leaving.HALF_CLOSE:
                self._socket.shutdown(socket.SHUT_WR)
            case Leaving.RESET:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
                self._socket.close()
            case Leaving.CLOSE:
                self._socket.close()


@asynccontextmanager
async def bare_client(
    port: int,
    body: dict[str, Any],
    *,
    host: str = "127.0.0.1",
    make_socket: Callable[[], socket.socket] = socket.socket,
    receive_buffer_bytes: int | None = None,
    unsent_bytes: int = 0,
) -> AsyncIterator[BareClient]:
    """A completion that has been asked for, but for the last `unsent_bytes` of its body."""
    text = json.dumps({"model": MODEL, "temperature": 0, **body}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: words\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\n\r\n"
    )
    with make_socket() as connection:
        connection.setblocking(False)
        if receive_buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, (host, port))
        await loop.sock_sendall(connection, head.encode() + text[: len(text) - unsent_bytes])
        yield BareClient(connection)
