"""A client on a bare connection, which can leave in every way that TCP has."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
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

    async def read_tokens(self, tokens: int) -> None:
        """Until so many tokens have come; fails when the response ends before."""
        while self.tokens < tokens:
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
    port: int, body: dict[str, Any], *, receive_buffer_bytes: int | None = None, unsent_bytes: int = 0
) -> AsyncIterator[BareClient]:
    """A completion that has been asked for, but for the last `unsent_bytes` of its body."""
    text = json.dumps({"model": MODEL, "temperature": 0, **body}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: words\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\n\r\n"
    )
    with socket.socket() as connection:
        connection.setblocking(False)
        if receive_buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", port))
        await loop.sock_sendall(connection, head.encode() + text[: len(text) - unsent_bytes])
        yield BareClient(connection)
