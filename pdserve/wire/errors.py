"""Errors across gRPC: the table's status, and the whole error in the trailing metadata."""

import asyncio
import re
from collections.abc import Awaitable
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.rpc.v1.common_pb2 import ErrorStatus
from pdserve.wire.convert import error_from_proto, error_to_proto

R = TypeVar("R")

METADATA_KEY = "pdserve-error-bin"

# Metadata beyond some KiB makes a peer drop the whole call.
_MESSAGE_CHARACTERS = 1000

# What gRPC itself says, when the peer gave no error of ours. A peer that goes away while it answers, or doesn't answer in
# time, counts as lost; RESOURCE_EXHAUSTED is a message above the limit, UNIMPLEMENTED a service that isn't there. INTERNAL
# is what grpc.aio makes of a write to a connection that has just broken, whatever status that ended with (grpc#36066).
_CODES = {
    grpc.StatusCode.UNAVAILABLE: ErrorCode.worker_lost,
    grpc.StatusCode.CANCELLED: ErrorCode.worker_lost,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorCode.worker_lost,
    grpc.StatusCode.INTERNAL: ErrorCode.worker_lost,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorCode.protocol_violation,
    grpc.StatusCode.UNIMPLEMENTED: ErrorCode.protocol_violation,
}

# gRPC's words for a peer that could not be reached end in the system's, once for each address that was tried.
_NOT_REACHED = re.compile(r"failed to connect to all addresses; .*: ([^:]+?)\s*", re.DOTALL)
_NOT_RESOLVED = "errors resolving "


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: PdserveError) -> NoReturn:
    """End the call with `error`, which `error_from_rpc` gives back at the other end."""
    status = error_to_proto(error)
    status.message = status.message[:_MESSAGE_CHARACTERS]
    await context.abort(
        grpc.StatusCode[error.spec.grpc_status],
        status.message,
        trailing_metadata=((METADATA_KEY, status.SerializeToString()),),
    )


def error_from_rpc(rpc_error: grpc.aio.AioRpcError) -> PdserveError:
    """The error that the peer gave to `abort`, or what the call's status stands for."""
    for key, value in rpc_error.trailing_metadata() or ():
        if key == METADATA_KEY and isinstance(value, bytes):
            try:
                return error_from_proto(ErrorStatus.FromString(value))
            except DecodeError:
                break
    status = rpc_error.code()
    return PdserveError(_CODES.get(status, ErrorCode.internal), _told(status, rpc_error.details() or "no details"))


def _told(status: grpc.StatusCode, details: str) -> str:
    """Why a call failed; of a peer that was never reached, without gRPC's own words."""
    if status is grpc.StatusCode.UNAVAILABLE:
        if reason := _NOT_REACHED.fullmatch(details):
            return reason[1].lower()
        if details.startswith(_NOT_RESOLVED):
            return "its name does not resolve"
    return f"{status.name}: {details}"


async def answer_of(call: Awaitable[R]) -> R:
    """What a unary call answers.

    Raises:
        PdserveError: the peer's own, or what the call's status stands for.
    """
    try:
        return await call
    except grpc.aio.AioRpcError as rpc_error:
        raise error_from_rpc(rpc_error) from None
    except asyncio.CancelledError:
        # A channel that is closed cancels its calls; that must not pass for the cancellation of whoever waits.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise PdserveError(ErrorCode.worker_lost, "the channel was closed before an answer came") from None
