import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve.core.errors import StartupError
from pdserve.rpc.v1 import admin_pb2, admin_pb2_grpc, kv_pb2_grpc
from pdserve.wire.server import GrpcServer, dial, format_address

ADMIN = "pdserve.rpc.v1.AdminService"
KV = "pdserve.rpc.v1.KVService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """Answers GetStatus once it may."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked.set()
        await self.may_answer.wait()
        return admin_pb2.WorkerStatus(worker_id="decode-0")


class Running:
    def __init__(self, server: GrpcServer, admin: Admin, port: int) -> None:
        self.server = server
        self.admin = admin
        self.port = port
        self.channel = dial(f"127.0.0.1:{port}")

    async def status(self) -> admin_pb2.WorkerStatus:
        stub: Any = admin_pb2_grpc.AdminServiceStub(self.channel)
        answer: admin_pb2.WorkerStatus = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=10)
        return answer

    async def health(self, service: str) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        return int(answer.status)


def server_of(admin: Admin) -> GrpcServer:
    server = GrpcServer()
    server.add(ADMIN, admin_pb2_grpc.add_AdminServiceServicer_to_server, admin)
    server.add(KV, kv_pb2_grpc.add_KVServiceServicer_to_server, kv_pb2_grpc.KVServiceServicer())
    return server


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Running]:
    admin = Admin()
    server = server_of(admin)
    running = Running(server, admin, await server.start("127.0.0.1", 0))
    yield running
    await running.channel.close()
    await server.stop(0)


@pytest.mark.asyncio
async def test_a_service_answers_on_the_port_that_start_returns(running: Running) -> None:
    assert running.port > 0
    assert (await running.status()).worker_id == "decode-0"


@pytest.mark.asyncio
async def test_a_busy_port_is_an_error_that_says_what_to_do(running: Running) -> None:
    other = server_of(Admin())
    with pytest.raises(StartupError, match=f"^port {running.port} on 127.0.0.1 is taken: stop what listens there"):
        await other.start("127.0.0.1", running.port)
    await other.stop(0)


@pytest.mark.asyncio
async def test_a_port_that_another_program_has_is_busy_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is taken"):
            await server_of(Admin()).start("127.0.0.1", port)


@pytest.mark.asyncio
async def test_an_address_of_another_machine_is_told_apart_from_a_busy_port() -> None:
    with pytest.raises(StartupError, match=r"cannot listen on 192\.0\.2\.1:5000: "):
        await server_of(Admin()).start("192.0.2.1", 5000)


@pytest.mark.asyncio
async def test_health_of_the_server_and_of_each_service_follows_set_serving(running: Running) -> None:
    names = ["", ADMIN, KV]
    assert [await running.health(name) for name in names] == [NOT_SERVING] * 3
    await running.server.set_serving(True)
    assert [await running.health(name) for name in names] == [SERVING] * 3
    await running.server.set_serving(False)
    assert [await running.health(name) for name in names] == [NOT_SERVING] * 3


@pytest.mark.asyncio
async def test_health_of_an_unknown_service_is_not_found(running: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await running.health("pdserve.rpc.v1.NoService")
    assert refusal.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.asyncio
async def test_reflection_lists_every_service(running: Running) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in stub.ServerReflectionInfo(iter([request]), timeout=10):
        names = {service.name for service in answer.list_services_response.service}
        assert names == {ADMIN, KV, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


@pytest.mark.asyncio
async def test_reflection_describes_a_service(running: Running) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=ADMIN)
    async for answer in stub.ServerReflectionInfo(iter([request]), timeout=10):
        assert any(b"WorkerStatus" in file for file in answer.file_descriptor_response.file_descriptor_proto)


@pytest.mark.asyncio
async def test_stop_lets_a_call_finish_within_the_grace(running: Running) -> None:
    running.admin.may_answer.clear()
    call = asyncio.create_task(running.status())
    await asyncio.wait_for(running.admin.asked.wait(), 10)
    stop = asyncio.create_task(running.server.stop(30))
    await asyncio.sleep(0)
    running.admin.may_answer.set()
    assert (await call).worker_id == "decode-0"
    await asyncio.wait_for(stop, 10)


@pytest.mark.asyncio
async def test_stop_cuts_off_what_outlasts_the_grace(running: Running) -> None:
    running.admin.may_answer.clear()
    call = asyncio.create_task(running.status())
    await asyncio.wait_for(running.admin.asked.wait(), 10)
    await running.server.stop(0)
    with pytest.raises(grpc.aio.AioRpcError):
        await call


@pytest.mark.asyncio
async def test_a_server_that_never_started_stops() -> None:
    await server_of(Admin()).stop(0)


@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.1", "127.0.0.1:5"), ("node-1.svc", "node-1.svc:5"), ("::1", "[::1]:5")]
)
def test_an_address_is_written_as_grpc_reads_it(host: str, address: str) -> None:
    assert format_address(host, 5) == address
