"""Server-sent events: one event is one write, and the status line waits for the first of them."""

from collections.abc import Mapping
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from services.frontend.exchanges import Exchange
from services.frontend.responses import encode_json

# More than this in the transport, beyond the kernel's buffer, and the socket counts as not writable.
_UNSENT_BYTES = 16 << 10

_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventStream:
    """The events of one response. A write returns when the socket takes more; meanwhile text gathers in its choices."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._response = web.StreamResponse(headers=_HEADERS)
        self._writer: AbstractStreamWriter | None = None

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def send(self, event: Mapping[str, Any]) -> None:
        await self._write(b"data: " + encode_json(event) + b"\n\n")

    async def send_done(self) -> None:
        await self._write(b"data: [DONE]\n\n")

    async def send_keepalive(self) -> None:
        await self._write(b": keepalive\n\n")

    async def end(self) -> None:
        await self._response.write_eof()

    async def _write(self, data: bytes) -> None:
        if self._writer is None:
            self._exchange.streaming = True
            transport = self._exchange.request.transport
            if transport is not None:
                transport.set_write_buffer_limits(high=_UNSENT_BYTES)
            self._writer = await self._response.prepare(self._exchange.request)
        await self._response.write(data)
        self._exchange.wrote()
        if self._writer is not None:
            await self._writer.drain()
