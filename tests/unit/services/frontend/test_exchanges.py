"""When a client counts as gone, and when a heartbeat is due, on a clock that the test moves."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from pdserve.config import FrontendConfig
from pdserve.telemetry.metrics import FrontendMetrics
from services.frontend.exchanges import Exchange, Exchanges

pytestmark = pytest.mark.asyncio

CONFIG = FrontendConfig(heartbeat_s=5, stall_timeout_s=10, total_timeout_s=100, max_unread_bytes=4096)


@dataclass
class FakeTransport:
    """Of a connection whose socket takes what a test says."""

    unsent_bytes: int = 0
    aborted: bool = False
    closing: bool = False

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.aborted = True

    def get_extra_info(self, name: str) -> None:
        """It has no socket."""


@dataclass
class FakeWriter:
    output_size: int = 0


@dataclass
class FakeRequest:
    transport: FakeTransport = field(default_factory=FakeTransport)
    writer: FakeWriter = field(default_factory=FakeWriter)

    def write(self, written_bytes: int, taken_bytes: int) -> None:
        """So many more bytes are written, and the socket takes so many."""
        self.writer.output_size += written_bytes
        self.transport.unsent_bytes += written_bytes - taken_bytes


@dataclass
class FakeAnswer:
    unread_bytes: int = 0
    wakes: int = 0

    def wake(self) -> None:
        self.wakes += 1


class Watched:
    """An exchange that streams, in a task which is cancelled when its client counts as gone."""

    def __init__(self) -> None:
        self.request = FakeRequest()
        self.answer = FakeAnswer()
        self.exchange = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    async def look(self, after_s: float) -> None:
        """As the timer would, so long after the request came."""
        exchange: Exchange = await asyncio.shield(self.exchange)
        exchange.look(exchange.arrival_s + after_s, CONFIG)

    async def gone(self) -> bool:
        """Whether the exchange was ended; for the last question of a test."""
        await asyncio.sleep(0)
        ended = self._task.done()
        self._task.cancel()
        await asyncio.wait([self._task])
        return ended

    async def _hold(self) -> None:
        exchanges = Exchanges(CONFIG, FrontendMetrics(CollectorRegistry()))
        with Exchange(cast(web.Request, self.request), exchanges) as exchange:
            exchange.answer = cast(Any, self.answer)
            exchange.streaming = True
            exchange.heartbeats = True
            self.exchange.set_result(exchange)
            await asyncio.Event().wait()


async def test_a_client_that_takes_nothing_has_the_stall_timeout() -> None:
    watched = Watched()
    watched.request.write(500, 200)
    await watched.look(1)
    await watched.look(10.9)
    assert not watched.request.transport.aborted
    await watched.look(11)
    assert watched.request.transport.aborted
    assert await watched.gone()


async def test_what_is_written_meanwhile_is_no_progress() -> None:
    watched = Watched()
    watched.request.write(500, 200)
    await watched.look(1)
    for after_s in range(2, 12):
        watched.request.write(100, 0)
        await watched.look(after_s)
    assert await watched.gone()


async def test_whatever_the_socket_takes_is_progress() -> None:
    watched = Watched()
    watched.request.write(5000, 200)
    for after_s in range(1, 90, 9):
        watched.request.write(0, 1)
        await watched.look(after_s)
    assert not await watched.gone()


async def test_no_reader_is_waited_for_long_after_the_time_that_an_answer_has() -> None:
    watched = Watched()
    watched.request.write(5000, 200)
    for after_s in range(1, 109, 9):
        watched.request.write(0, 1)
        await watched.look(after_s)
    assert not watched.request.transport.aborted
    watched.request.write(0, 1)
    await watched.look(110)
    assert await watched.gone()


@pytest.mark.parametrize(("unread_bytes", "gone"), [(4096, False), (4097, True)])
async def test_a_reader_may_be_so_far_behind(unread_bytes: int, gone: bool) -> None:
    watched = Watched()
    watched.answer.unread_bytes = unread_bytes
    watched.request.write(500, 200)
    await watched.look(1)
    await watched.look(2)
    assert await watched.gone() == gone


async def test_a_closed_connection_is_a_client_that_left() -> None:
    watched = Watched()
    await watched.look(1)
    watched.request.transport.closing = True
    await watched.look(2)
    assert await watched.gone()


async def test_a_silent_stream_gets_a_heartbeat_unless_bytes_are_on_their_way() -> None:
    watched = Watched()
    await watched.look(4.9)
    assert watched.answer.wakes == 0
    watched.request.write(10, 0)
    await watched.look(5)
    assert watched.answer.wakes == 0
    watched.request.transport.unsent_bytes = 0
    await watched.look(5.1)
    assert watched.answer.wakes == 1
    assert not await watched.gone()
