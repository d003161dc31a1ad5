import asyncio
import gc
from typing import Any

import grpc.aio
import pytest

from pdserve.rpc.v1 import kv_pb2, kv_pb2_grpc
from pdserve.wire.server import dial
from pdserve.wire.streams import ReplyWriter
from tests.unit.wire.conftest import Serve

KV = "pdserve.rpc.v1.KVService"
# Long in the writing.
LARGE = kv_pb2.PushReply(failed={"message": "x" * (3 << 20)})
LAST = kv_pb2.PushReply(committed=kv_pb2.PushCommitted())


class GivesUp(kv_pb2_grpc.KVServiceServicer):
    """Begins to write, gives that up, and writes its last word."""

    async def Push(self, request_iterator: object, context: Any) -> None:  # noqa: N802
        replies = ReplyWriter(context)
        writing = asyncio.create_task(replies.write(LARGE))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not writing.done()
        writing.cancel()
        await replies.write(LAST)


@pytest.mark.asyncio
async def test_a_message_comes_whole_after_one_that_was_given_up(serve: Serve) -> None:
    address = await serve(KV, kv_pb2_grpc.add_KVServiceServicer_to_server, GivesUp())
    async with dial(address) as channel, asyncio.timeout(10):
        call = kv_pb2_grpc.KVServiceStub(channel).Push()
        assert await call.read() == LARGE
        assert await call.read() == LAST
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


@pytest.mark.asyncio
async def test_a_failure_of_what_was_given_up_is_nobodys_to_hear() -> None:
    class Broken:
        async def write(self, message: object) -> None:
            await asyncio.sleep(0)
            raise ConnectionError("the call is over")

    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    context: Any = Broken()
    writing = asyncio.create_task(ReplyWriter(context).write(LAST))
    await asyncio.sleep(0)
    writing.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    del writing
    gc.collect()
    assert told == []
    with pytest.raises(ConnectionError):
        await ReplyWriter(context).write(LAST)
