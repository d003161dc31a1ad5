"""When a frontend's session is over: its next Hello waits for exactly that."""

import asyncio
from collections.abc import Sequence

import pytest

from pdserve.config import SessionConfig
from pdserve.core.events import Role
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.core.version import PROTOCOL_MAJOR
from pdserve.rpc.v1 import session_pb2 as pb
from pdserve.runtime.sessions import FrontendSession, SessionService

pytestmark = pytest.mark.asyncio

INSTANCE = 3
KEY = AttemptKey(GroupId(INSTANCE, 1), 1)


class Owner:
    """A worker that cannot let go of an attempt before its transfer has stopped."""

    def __init__(self) -> None:
        self.aborted: list[FrontendSession] = []

    def welcome(self) -> pb.Welcome:
        return pb.Welcome(worker_id="decode-0")

    def pulse(self) -> pb.WorkerPulse:
        return pb.WorkerPulse()

    def handle(self, session: FrontendSession, command: pb.Command) -> None:
        raise AssertionError("no commands here")

    def abort_session(self, session: FrontendSession) -> None:
        self.aborted.append(session)


class Stream:
    """The handler's side of a stream; reads wait for ever after the commands are read."""

    def __init__(self, commands: Sequence[pb.Command]) -> None:
        self._commands = list(commands)
        self.written: list[pb.Event] = []

    async def read(self) -> pb.Command:
        if not self._commands:
            await asyncio.get_running_loop().create_future()
        return self._commands.pop(0)

    async def write(self, event: pb.Event) -> None:
        self.written.append(event)


HELLO = pb.Command(hello=pb.Hello(protocol_major=PROTOCOL_MAJOR, frontend_instance=INSTANCE))


async def until_open(service: SessionService, other_than: FrontendSession | None = None) -> FrontendSession:
    async with asyncio.timeout(10):
        while (session := service.sessions.get(INSTANCE)) in (None, other_than):
            await asyncio.sleep(0)
    assert session is not None
    return session


async def test_a_session_is_released_when_it_was_left_and_holds_nothing() -> None:
    session = FrontendSession(INSTANCE, SessionConfig())
    session.hold(KEY)
    session.close(None)
    session.let_go(KEY)
    assert not session.released.is_set()
    forgotten: list[FrontendSession] = []
    session.leave(lambda: forgotten.append(session))
    assert session.released.is_set()
    assert forgotten == [session]


@pytest.mark.parametrize("turns", range(4))
async def test_a_new_hello_waits_until_the_old_session_is_gone(turns: int) -> None:
    """Whenever its last attempt ends: also between the moment that closes it and the one in which its handler leaves."""
    service = SessionService(Role.DECODE, Owner(), SessionConfig())
    handlers = [asyncio.create_task(service.Session(None, Stream([HELLO])))]
    old = await until_open(service)
    old.hold(KEY)
    handlers.append(asyncio.create_task(service.Session(None, Stream([HELLO]))))
    while not old.closed.done():
        await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    old.let_go(KEY)
    new = await until_open(service, other_than=old)
    new.close(None)
    await asyncio.gather(*handlers)
    assert not service.sessions


async def test_a_hello_waits_for_what_an_old_session_carried_also_when_its_stream_is_gone() -> None:
    owner = Owner()
    service = SessionService(Role.DECODE, owner, SessionConfig())
    leaving = asyncio.create_task(service.Session(None, Stream([HELLO])))
    old = await until_open(service)
    old.hold(KEY)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert owner.aborted == [old]
    stream = Stream([HELLO])
    coming = asyncio.create_task(service.Session(None, stream))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not stream.written
    old.let_go(KEY)
    new = await until_open(service, other_than=old)
    new.close(None)
    await coming
    assert not service.sessions
