"""What grpc.aio leaves to the handler of a stream: a first message that may never come, a write that is cancelled."""

import asyncio
from typing import TYPE_CHECKING, Any

import grpc.aio

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.wire.errors import abort

if TYPE_CHECKING:
    ServerContext = grpc.aio.ServicerContext[Any, Any]


async def read_first(context: "ServerContext", timeout_s: float) -> object:
    """The message that opens a stream, or grpc.aio.EOF. If none comes in time, the call ends with protocol_violation.

    A read that is cancelled takes its call along; so this one is cancelled only when the call is over.
    """
    reading = asyncio.ensure_future(context.read())
    try:
        await asyncio.wait({reading}, timeout=timeout_s)
        if not reading.done():
            message = f"a stream must begin with a message, and none came for {timeout_s:g} s"
            await abort(context, PdserveError(ErrorCode.protocol_violation, message))
        return await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


class ReplyWriter:
    """Writes messages of one call, each after the one before, whoever gives up waiting for it.

    A cancelled `context.write` goes on inside gRPC, which takes no second one beside it: that breaks the call, and leaves
    its client without an end.
    """

    def __init__(self, context: "ServerContext") -> None:
        self._context = context
        self._last: asyncio.Future[None] | None = None

    async def write(self, message: object) -> None:
        """
        Raises:
            Exception: gRPC's own, as from `context.write`, of this message or of the one before.
        """
        if self._last is not None:
            await asyncio.shield(self._last)
        self._last = asyncio.ensure_future(self._context.write(message))
        # Who gave up waiting, or has ended with its call, does not hear that this failed.
        self._last.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(self._last)
