"""A relay in front of a worker's port, which may change or hold what passes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

# Another address of this machine, on which the port of a worker that listens on 127.0.0.1 is free.
RELAY_HOST = "127.0.0.2"
_READ_BYTES = 1 << 16


class Relay:
    """Passes bytes both ways.

    Attributes:
        change: is given what goes to the worker, and returns what it gets.
        open: while it is cleared, nothing goes to the worker.
    """

    def __init__(self, port: int) -> None:
        self.change: Callable[[bytes], bytes] = lambda data: data
        self.open = asyncio.Event()
        self.open.set()
        self._port = port
        self._closing = asyncio.get_running_loop().create_future()
        self._connections: set[asyncio.Task[None]] = set()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        finally:
            self._connections.discard(task)

    async def close(self) -> None:
        self._closing.set_result(None)
        if self._connections:
            await asyncio.wait(self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            worker_reader, worker_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        ways = [
            asyncio.ensure_future(self._pass_to_worker(reader, worker_writer)),
            asyncio.ensure_future(self._pass_back(worker_reader, writer)),
        ]
        try:
            # A connection that ends on one side ends on the other.
            await asyncio.wait([*ways, self._closing], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for side in (writer, worker_writer):
                side.transport.abort()

    async def _pass_to_worker(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_READ_BYTES):
            await self.open.wait()
            writer.write(self.change(data))
            await writer.drain()

    async def _pass_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def relay_to(port: int) -> AsyncIterator[Relay]:
    """A relay on RELAY_HOST to the same port of 127.0.0.1, which need not listen yet."""
    relay = Relay(port)
    server = await asyncio.start_server(relay.take, RELAY_HOST, port)
    try:
        yield relay
    finally:
        server.close()
        await relay.close()
        await server.wait_closed()
