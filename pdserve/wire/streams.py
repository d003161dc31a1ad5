"""How a server reads streams whose clients may say nothing."""

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
