"""ClusterService: the controller's face to frontends and operators."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from pdserve.config import MAX_WORKERS
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.rpc.v1 import cluster_pb2, cluster_pb2_grpc
from pdserve.wire.convert import role_from_proto
from pdserve.wire.errors import abort
from services.controller.controller import Controller

if TYPE_CHECKING:
    import grpc.aio

SERVICE = "pdserve.rpc.v1.ClusterService"


class ClusterService(cluster_pb2_grpc.ClusterServiceServicer):
    """Watch and list the membership; drain, undrain and scale."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def Watch(  # noqa: N802
        self, request: cluster_pb2.WatchRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[cluster_pb2.Membership]:
        async for membership in self._controller.board.watch():
            yield membership

    async def ListWorkers(  # noqa: N802
        self, request: cluster_pb2.ListWorkersRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> cluster_pb2.Membership:
        return self._controller.board.current

    async def DrainWorker(  # noqa: N802
        self, request: cluster_pb2.DrainWorkerRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> cluster_pb2.DrainWorkerResponse:
        try:
            await self._controller.drain(request.worker_id, request.deadline_ms / 1000 or None)
        except PdserveError as error:
            await abort(context, error)
        return cluster_pb2.DrainWorkerResponse()

    async def UndrainWorker(  # noqa: N802
        self, request: cluster_pb2.UndrainWorkerRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> cluster_pb2.UndrainWorkerResponse:
        try:
            await self._controller.undrain(request.worker_id)
        except PdserveError as error:
            await abort(context, error)
        return cluster_pb2.UndrainWorkerResponse()

    async def Scale(  # noqa: N802
        self, request: cluster_pb2.ScaleRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> cluster_pb2.ScaleResponse:
        try:
            if request.count > MAX_WORKERS:
                message = f"count is {request.count}, and may be {MAX_WORKERS} at most"
                raise PdserveError(ErrorCode.invalid_request, message, param="count")
            await self._controller.scale(role_from_proto(request.role), request.count)
        except PdserveError as error:
            await abort(context, error)
        return cluster_pb2.ScaleResponse()
