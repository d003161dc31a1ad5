"""Errors through a real server: what the handler raises is what the caller gets."""

from typing import Any

import grpc
import grpc.aio
import pytest

from pdserve.core.errors import ErrorCode, InvalidRequest, PdserveError
from pdserve.rpc.v1 import admin_pb2, admin_pb2_grpc
from pdserve.wire.errors import METADATA_KEY, abort, error_from_rpc
from pdserve.wire.server import dial
from tests.unit.wire.conftest import Serve


class Refusing(admin_pb2_grpc.AdminServiceServicer):
    """Answers every call with its error, or with what a status alone says."""

    def __init__(self) -> None:
        self.error: PdserveError | None = None
        self.status = grpc.StatusCode.OK
        self.details = "as asked"
        self.metadata: Any = ()

    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.error is not None:
            await abort(context, self.error)
        await context.abort(self.status, self.details, self.metadata)


async def ask(address: str) -> grpc.aio.AioRpcError:
    async with dial(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=10)
    return refusal.value


async def refusing(serve: Serve) -> tuple[Refusing, str]:
    servicer = Refusing()
    return servicer, await serve(
        "pdserve.rpc.v1.AdminService", admin_pb2_grpc.add_AdminServiceServicer_to_server, servicer
    )


@pytest.mark.asyncio
async def test_every_error_of_the_table_arrives_as_it_was_given(serve: Serve) -> None:
    servicer, address = await refusing(serve)
    for code in ErrorCode:
        servicer.error = PdserveError(code, f"so it is: {code}, ünïcode\n", retry_after_s=1.5)
        rpc_error = await ask(address)
        error = error_from_rpc(rpc_error)
        assert rpc_error.code().name == code.spec.grpc_status
        assert (error.code, error.message, error.param) == (code, servicer.error.message, None)
        assert error.retry_after_s == 1.5


@pytest.mark.asyncio
async def test_the_field_at_fault_arrives(serve: Serve) -> None:
    servicer, address = await refusing(serve)
    servicer.error = InvalidRequest("top_p", "top_p must be above 0")
    error = error_from_rpc(await ask(address))
    assert isinstance(error, InvalidRequest)
    assert (error.param, error.message) == ("top_p", "top_p must be above 0")


@pytest.mark.asyncio
async def test_a_long_message_is_cut_and_does_not_break_the_call(serve: Serve) -> None:
    servicer, address = await refusing(serve)
    servicer.error = PdserveError(ErrorCode.queue_full, "ü" * 100_000)
    error = error_from_rpc(await ask(address))
    assert (error.code, error.message) == (ErrorCode.queue_full, "ü" * 1000)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (grpc.StatusCode.UNAVAILABLE, ErrorCode.worker_lost),
        (grpc.StatusCode.CANCELLED, ErrorCode.worker_lost),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ErrorCode.worker_lost),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorCode.protocol_violation),
        (grpc.StatusCode.UNIMPLEMENTED, ErrorCode.protocol_violation),
        (grpc.StatusCode.INTERNAL, ErrorCode.worker_lost),
        (grpc.StatusCode.UNKNOWN, ErrorCode.internal),
    ],
)
@pytest.mark.parametrize("metadata", [(), ((METADATA_KEY, b"\xff\xff"),)])
async def test_a_status_alone_stands_for_an_error(
    serve: Serve, status: grpc.StatusCode, code: ErrorCode, metadata: Any
) -> None:
    servicer, address = await refusing(serve)
    servicer.status, servicer.metadata = status, metadata
    error = error_from_rpc(await ask(address))
    assert error.code is code
    assert error.message == f"{status.name}: as asked"


@pytest.mark.asyncio
async def test_a_peer_that_is_not_there_is_lost() -> None:
    error = error_from_rpc(await ask("127.0.0.1:1"))
    assert (error.code, error.message) == (ErrorCode.worker_lost, "connection refused")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("details", "told"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:1: "
            "Failed to connect to remote host: Connection refused",
            "connection refused",
        ),
        ("errors resolving nowhere:81: [field:hostname lookup error:…]", "its name does not resolve"),
        ("Socket closed", "UNAVAILABLE: Socket closed"),
    ],
)
async def test_a_peer_that_is_not_reached_is_told_in_few_words(serve: Serve, details: str, told: str) -> None:
    servicer, address = await refusing(serve)
    servicer.status, servicer.details = grpc.StatusCode.UNAVAILABLE, details
    assert error_from_rpc(await ask(address)).message == told


@pytest.mark.asyncio
async def test_a_service_that_is_not_there_breaks_the_protocol(serve: Serve) -> None:
    _, address = await refusing(serve)
    async with dial(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest(), timeout=10)
    assert error_from_rpc(refusal.value).code is ErrorCode.protocol_violation
