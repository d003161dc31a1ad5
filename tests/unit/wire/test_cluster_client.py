import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import Role
from pdserve.rpc.v1 import cluster_pb2, cluster_pb2_grpc, common_pb2
from pdserve.rpc.v1.cluster_pb2 import Membership
from pdserve.wire.cluster_client import ClusterClient
from pdserve.wire.errors import abort
from pdserve.wire.server import GrpcServer

SERVICE = "pdserve.rpc.v1.ClusterService"


class Controller(cluster_pb2_grpc.ClusterServiceServicer):
    """Streams what is put into `changes`; None ends the stream, an error breaks it."""

    def __init__(self) -> None:
        self.changes: asyncio.Queue[Membership | PdserveError | None] = asyncio.Queue()
        self.watches = 0
        self.requests: list[Any] = []

    async def Watch(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.watches += 1
        while (change := await self.changes.get()) is not None:
            if isinstance(change, PdserveError):
                await abort(context, change)
            yield change

    async def ListWorkers(self, request: Any, context: Any) -> Any:  # noqa: N802
        return Membership(version=5)

    async def DrainWorker(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        if request.worker_id == "nobody":
            await abort(context, PdserveError(ErrorCode.not_found, "there is no worker 'nobody'"))
        return cluster_pb2.DrainWorkerResponse()

    async def UndrainWorker(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        return cluster_pb2.UndrainWorkerResponse()

    async def Scale(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        return cluster_pb2.ScaleResponse()


async def serve(controller: Controller, port: int = 0) -> tuple[GrpcServer, int]:
    server = GrpcServer()
    server.add(SERVICE, cluster_pb2_grpc.add_ClusterServiceServicer_to_server, controller)
    return server, await server.start("127.0.0.1", port)


class Setting:
    def __init__(self, controller: Controller, server: GrpcServer, port: int) -> None:
        self.controller = controller
        self.server = server
        self.port = port
        self.client = ClusterClient(f"127.0.0.1:{port}", timeout_s=10)
        self.watch = self.client.watch()

    async def next(self) -> Membership:
        return await asyncio.wait_for(anext(self.watch), 20)


@pytest_asyncio.fixture
async def setting() -> AsyncIterator[Setting]:
    controller = Controller()
    setting = Setting(controller, *await serve(controller))
    yield setting
    await setting.watch.aclose()  # type: ignore[attr-defined]
    await setting.client.close()
    await setting.server.stop(0)


@pytest.mark.asyncio
async def test_watch_gives_the_membership_after_each_change(setting: Setting) -> None:
    for version in (1, 2, 3):
        setting.controller.changes.put_nowait(Membership(version=version))
        assert (await setting.next()).version == version
    assert setting.controller.watches == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("end", [None, PdserveError(ErrorCode.internal, "it broke")])
async def test_watch_goes_on_after_its_stream_ends(setting: Setting, end: PdserveError | None) -> None:
    for change in (Membership(version=1), end, Membership(version=1), end, Membership(version=2)):
        setting.controller.changes.put_nowait(change)
    assert [(await setting.next()).version for _ in range(2)] == [1, 2]
    assert setting.controller.watches == 3


@pytest.mark.asyncio
async def test_watch_finds_a_controller_that_comes_back(setting: Setting) -> None:
    setting.controller.changes.put_nowait(Membership(version=7))
    assert (await setting.next()).version == 7
    await setting.server.stop(0)
    setting.controller = Controller()
    setting.server, _ = await serve(setting.controller, setting.port)
    setting.controller.changes.put_nowait(Membership(version=1))
    assert (await setting.next()).version == 1


@pytest.mark.asyncio
async def test_a_watch_that_is_cancelled_ends_its_call(setting: Setting) -> None:
    waiting = asyncio.create_task(setting.next())
    async with asyncio.timeout(20):
        while not setting.controller.watches:
            await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(StopAsyncIteration):
        await setting.next()


@pytest.mark.asyncio
async def test_operators_calls_arrive(setting: Setting) -> None:
    assert (await setting.client.list_workers()).version == 5
    await setting.client.drain_worker("decode-0", 1.5)
    await setting.client.undrain_worker("decode-0")
    await setting.client.scale(Role.DECODE, 4)
    assert setting.controller.requests == [
        cluster_pb2.DrainWorkerRequest(worker_id="decode-0", deadline_ms=1500),
        cluster_pb2.UndrainWorkerRequest(worker_id="decode-0"),
        cluster_pb2.ScaleRequest(role=common_pb2.ROLE_DECODE, count=4),
    ]


@pytest.mark.asyncio
async def test_the_controllers_own_error_is_raised(setting: Setting) -> None:
    with pytest.raises(PdserveError, match=r"^not_found: there is no worker 'nobody'$"):
        await setting.client.drain_worker("nobody")


@pytest.mark.asyncio
async def test_without_a_controller_the_error_says_what_to_do() -> None:
    client = ClusterClient("127.0.0.1:1", timeout_s=10)
    with pytest.raises(
        PdserveError, match=r"cannot reach the controller at 127\.0\.0\.1:1: is `pdserve up` running\?"
    ) as refusal:
        await client.list_workers()
    assert refusal.value.code is ErrorCode.worker_lost
    await client.close()
