"""Where a frontend's workers come from when a controller publishes them."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import grpc.aio
import pytest

from pdserve.core.events import FinishReason, Role
from pdserve.rpc.v1 import cluster_pb2, cluster_pb2_grpc, common_pb2
from tests.fake_worker import FakeWorker, running
from tests.frontend_stack import answer_with, frontend_with, ids_of, pair, until

IDS = ids_of("The quick brown fox")
PROMPT = {"prompt": "hello", "max_tokens": 50}


class FakeController(cluster_pb2_grpc.ClusterServiceServicer):
    """Publishes whatever membership a test sets."""

    def __init__(self) -> None:
        self.address = ""
        self.watchers = 0
        self._membership = cluster_pb2.Membership()
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def publish(self, *workers: FakeWorker) -> None:
        async with self._changed:
            self._membership = cluster_pb2.Membership(
                version=self._membership.version + 1,
                members=[
                    cluster_pb2.Member(
                        worker_id=worker.worker_id,
                        role=common_pb2.Role.ValueType(worker.role),
                        session_address=worker.address,
                        epoch=worker.epoch,
                    )
                    for worker in workers
                ],
            )
            self._changed.notify_all()

    async def Watch(self, request: object, context: object) -> AsyncIterator[cluster_pb2.Membership]:  # noqa: N802
        self.watchers += 1
        seen = 0
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda version=seen: self._membership.version > version)
                membership = self._membership
            seen = membership.version
            yield membership


@pytest.mark.asyncio
async def test_workers_come_and_go_with_the_membership_and_stay_when_the_controller_dies() -> None:
    (prefill, decode), other = pair(), FakeWorker(Role.DECODE, "decode-1")
    async with (
        FakeController() as controller,
        running(prefill, decode, other),
        frontend_with(wait_ready=False, controller=controller.address) as stack,
    ):
        names = lambda: {worker.name for worker in stack.frontend.membership if worker.ready}  # noqa: E731
        await controller.publish(prefill, decode)
        await until(lambda: names() == {"prefill-0", "decode-0"})
        await controller.publish(prefill, other)
        await until(lambda: names() == {"prefill-0", "decode-1"})
        answer_with(prefill, other, IDS, FinishReason.LENGTH)

        await controller.stop()
        status, body = await stack.post("/v1/completions", PROMPT)
        assert status == 200
        assert body["usage"]["completion_tokens"] == len(IDS)
        assert names() == {"prefill-0", "decode-1"}
        stack.assert_idle()


@pytest.mark.asyncio
async def test_a_frontend_that_cannot_follow_the_membership_any_more_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rather than go on with workers that are long gone."""

    def fail(members: object) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError("a defect")

    async with FakeController() as controller:
        async with frontend_with(wait_ready=False, controller=controller.address) as stack:
            monkeypatch.setattr(stack.frontend.membership, "set_members", fail)
            await controller.publish()
            async with asyncio.timeout(5):
                with pytest.raises(ZeroDivisionError):
                    await stack.frontend.serve(asyncio.Event())
        assert "the frontend broke" in caplog.text


@pytest.mark.asyncio
async def test_a_frontend_serves_until_it_is_told_to_stop() -> None:
    stop = asyncio.Event()
    async with frontend_with(wait_ready=False, workers=("127.0.0.1:9",)) as stack:
        serving = asyncio.create_task(stack.frontend.serve(stop))
        await asyncio.sleep(0)
        assert not serving.done()
        stop.set()
        await serving


@pytest.mark.asyncio
async def test_what_a_worker_carries_when_it_is_no_member_any_more_goes_elsewhere() -> None:
    (prefill, decode), other = pair(), FakeWorker(Role.DECODE, "decode-1")
    async with (
        FakeController() as controller,
        running(prefill, decode, other),
        frontend_with(wait_ready=False, controller=controller.address) as stack,
    ):
        await controller.publish(prefill, decode)
        await until(lambda: sum(worker.ready for worker in stack.frontend.membership) == 2)
        request = asyncio.create_task(stack.post("/v1/completions", PROMPT))
        await decode.expect("reserve")
        answer_with(prefill, other, IDS, FinishReason.LENGTH)
        await controller.publish(prefill, other)
        status, body = await request
        assert status == 200
        assert body["choices"][0]["text"] == "The quick brown fox"
