"""The controller's ClusterService: membership as it changes, and what operators ask of the cluster."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING, TypeVar

import grpc.aio

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import Role
from pdserve.rpc.v1.cluster_pb2 import (
    DrainWorkerRequest,
    ListWorkersRequest,
    Membership,
    ScaleRequest,
    UndrainWorkerRequest,
    WatchRequest,
)
from pdserve.rpc.v1.cluster_pb2_grpc import ClusterServiceStub
from pdserve.wire.convert import role_to_proto, to_milliseconds
from pdserve.wire.errors import answer_of, error_from_rpc
from pdserve.wire.server import dial

if TYPE_CHECKING:
    from pdserve.rpc.v1.cluster_pb2_grpc import ClusterServiceAsyncStub

R = TypeVar("R")

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0

_log = logging.getLogger(__name__)


class ClusterClient:
    """One controller. Every call raises PdserveError: the controller's own, or worker_lost if there is no answer."""

    def __init__(self, address: str, timeout_s: float = 5.0) -> None:
        """
        Args:
            address: the controller's, as host:port.
            timeout_s: how long an answer may take.
        """
        self._address = address
        self._timeout_s = timeout_s
        self._channel = dial(address)
        self._stub: ClusterServiceAsyncStub = ClusterServiceStub(self._channel)

    async def watch(self) -> AsyncIterator[Membership]:
        """The membership now, then again after each change, for ever.

        While the controller is away nothing comes; when it is back its membership does, if it differs from the last.
        """
        last: Membership | None = None
        backoff_s = _FIRST_BACKOFF_S
        while True:
            call = self._stub.Watch(WatchRequest())
            try:
                async for membership in call:
                    backoff_s = _FIRST_BACKOFF_S
                    if membership != last:
                        last = membership
                        yield membership
            except grpc.aio.AioRpcError as rpc_error:
                error = self._explain(error_from_rpc(rpc_error))
                # Frontends often start before their controller; one that was there and has gone is another matter.
                level = logging.INFO if last is None else logging.WARNING
                _log.log(level, "%s; going on with what is known", error.message)
            finally:
                call.cancel()
            # Frontends that lost the same controller come back at different moments.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(_MAX_BACKOFF_S, 2 * backoff_s)

    async def list_workers(self) -> Membership:
        return await self._ask(self._stub.ListWorkers(ListWorkersRequest(), timeout=self._timeout_s))

    async def drain_worker(self, worker_id: str, deadline_s: float | None = None) -> None:
        """Let a worker take no new work; None leaves the deadline to the worker."""
        request = DrainWorkerRequest(worker_id=worker_id, deadline_ms=to_milliseconds(deadline_s or 0.0))
        await self._ask(self._stub.DrainWorker(request, timeout=self._timeout_s))

    async def undrain_worker(self, worker_id: str) -> None:
        request = UndrainWorkerRequest(worker_id=worker_id)
        await self._ask(self._stub.UndrainWorker(request, timeout=self._timeout_s))

    async def scale(self, role: Role, count: int) -> None:
        """Keep `count` workers of this role running."""
        request = ScaleRequest(role=role_to_proto(role), count=count)
        await self._ask(self._stub.Scale(request, timeout=self._timeout_s))

    async def close(self) -> None:
        await self._channel.close()

    async def _ask(self, call: Awaitable[R]) -> R:
        try:
            return await answer_of(call)
        except PdserveError as error:
            raise self._explain(error) from None

    def _explain(self, error: PdserveError) -> PdserveError:
        if error.code is not ErrorCode.worker_lost:
            return error
        return PdserveError(
            error.code,
            f"cannot reach the controller at {self._address}: is `pdserve up` running? ({error.message})",
        )
