"""Servers for one test, each on a free port."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest_asyncio

from pdserve.wire.server import GrpcServer

Serve = Callable[..., Awaitable[str]]


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """`await serve(service_name, adder, servicer)` gives the address of a server that runs until the test ends."""
    servers: list[GrpcServer] = []

    async def start(service_name: str, adder: Any, servicer: Any) -> str:
        server = GrpcServer()
        server.add(service_name, adder, servicer)
        port = await server.start("127.0.0.1", 0)
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        await server.stop(0)
