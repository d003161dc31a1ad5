import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.rpc.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from pdserve.wire.admin_client import AdminClient
from pdserve.wire.errors import abort
from tests.unit.wire.conftest import Serve


class Worker(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.error: PdserveError | None = None
        self.silent = False
        self.asked = asyncio.Event()

    async def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        if self.error is not None:
            await abort(context, self.error)
        return admin_pb2.DrainResponse(held_attempts=3)

    async def Undrain(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        return admin_pb2.UndrainResponse()

    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked.set()
        if self.silent:
            await asyncio.get_running_loop().create_future()
        return admin_pb2.WorkerStatus(worker_id="prefill-0", role=common_pb2.ROLE_PREFILL)

    async def ListSequences(self, request: Any, context: Any) -> Any:  # noqa: N802
        return admin_pb2.ListSequencesResponse(sequences=[admin_pb2.SequenceStatus(attempt=a) for a in (1, 2)])


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest_asyncio.fixture
async def client(serve: Serve, worker: Worker) -> AsyncIterator[AdminClient]:
    address = await serve("pdserve.rpc.v1.AdminService", admin_pb2_grpc.add_AdminServiceServicer_to_server, worker)
    client = AdminClient(address, timeout_s=10)
    yield client
    await client.close()


@pytest.mark.asyncio
async def test_drain_says_what_is_still_held(client: AdminClient, worker: Worker) -> None:
    assert await client.drain(2.5) == 3
    assert await client.drain() == 3
    assert [request.deadline_ms for request in worker.requests] == [2500, 0]


@pytest.mark.asyncio
async def test_undrain_status_and_sequences(client: AdminClient, worker: Worker) -> None:
    await client.undrain()
    assert worker.requests == [admin_pb2.UndrainRequest()]
    assert (await client.status()).worker_id == "prefill-0"
    assert [sequence.attempt for sequence in await client.list_sequences()] == [1, 2]


@pytest.mark.asyncio
async def test_the_workers_own_error_is_raised(client: AdminClient, worker: Worker) -> None:
    worker.error = PdserveError(ErrorCode.shutting_down, "the worker stops")
    with pytest.raises(PdserveError, match=r"^shutting_down: the worker stops$"):
        await client.drain()


@pytest.mark.asyncio
async def test_a_worker_that_is_not_there_is_named() -> None:
    client = AdminClient("127.0.0.1:1", timeout_s=10)
    with pytest.raises(PdserveError, match=r"cannot reach the worker at 127\.0\.0\.1:1") as refusal:
        await client.status()
    assert refusal.value.code is ErrorCode.worker_lost
    await client.close()


@pytest.mark.asyncio
async def test_a_client_that_is_closed_meanwhile_fails_its_calls_and_cancels_nobody(
    client: AdminClient, worker: Worker
) -> None:
    worker.silent = True
    status = asyncio.create_task(client.status())
    await worker.asked.wait()
    await client.close()
    with pytest.raises(PdserveError) as refusal:
        await status
    assert refusal.value.code is ErrorCode.worker_lost
