import asyncio

import pytest

from pdserve.core.errors import PdserveError
from pdserve.core.ids import AttemptKey, GroupId, Ticket
from pdserve.engine.host_pool import HostKVPool
from pdserve.engine.scripted import SCRIPTED_GEOMETRY
from services.prefill.peers import Peers
from services.prefill.push import Push

TICKET = Ticket(1, 2, AttemptKey(GroupId(3, 1), 1), 9)


class Listener:
    def __init__(self) -> None:
        self.heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_ready(self, held_tokens: int) -> None:
        raise AssertionError("nobody is there")

    def on_acknowledged(self) -> None:
        self.heard.set_result("acknowledged")

    def on_failed(self, error: PdserveError) -> None:
        self.heard.set_result("failed")

    def on_stopped(self) -> None:
        self.heard.set_result("stopped")


@pytest.mark.asyncio
@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_a_push_that_is_stopped_at_once_says_so(turns: int) -> None:
    """Even one that has not begun: whoever stops it keeps blocks until it hears."""
    peers = Peers("prefill-0", 1, SCRIPTED_GEOMETRY, meet_s=5.0)
    listener = Listener()
    push = Push(peers, "127.0.0.1:1", TICKET, HostKVPool(SCRIPTED_GEOMETRY, 4), 20, listener, stop_s=0.05)
    for _ in range(turns):
        await asyncio.sleep(0)
    push.stop(None)
    async with asyncio.timeout(10):
        assert await listener.heard == "stopped"
    await peers.close()
