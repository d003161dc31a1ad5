"""What watchers see."""

import asyncio

import pytest

from pdserve.cluster.membership import MembershipBoard
from pdserve.rpc.v1.cluster_pb2 import MEMBER_STATE_READY, MEMBER_STATE_STARTING, Member

pytestmark = pytest.mark.asyncio

STARTING = Member(worker_id="decode-0", state=MEMBER_STATE_STARTING)
READY = Member(worker_id="decode-0", state=MEMBER_STATE_READY)


async def test_a_watcher_gets_what_is_known_then_each_change() -> None:
    board = MembershipBoard()
    board.publish([STARTING], 1, 1)
    watch = board.watch()
    assert list((await anext(watch)).members) == [STARTING]
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    assert not waiting.done()
    board.publish([READY], 1, 1)
    membership = await waiting
    assert (membership.version, list(membership.members)) == (2, [READY])


async def test_a_watcher_that_comes_first_waits_for_the_first_one() -> None:
    board = MembershipBoard()
    waiting = asyncio.ensure_future(anext(board.watch()))
    await asyncio.sleep(0)
    board.publish([], 1, 2)
    assert (await waiting).desired_decode == 2


async def test_the_same_again_is_no_change_whatever_its_order() -> None:
    board = MembershipBoard()
    other = Member(worker_id="prefill-0")
    board.publish([READY, other], 1, 1)
    board.publish([other, READY], 1, 1)
    assert board.current.version == 1
    board.publish([other, READY], 1, 2)
    assert board.current.version == 2


async def test_a_slow_watcher_skips_to_the_newest() -> None:
    board = MembershipBoard()
    board.publish([], 1, 1)
    watch = board.watch()
    await anext(watch)
    for count in (2, 3, 4):
        board.publish([], 1, count)
    assert (await anext(watch)).desired_decode == 4
