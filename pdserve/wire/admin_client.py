"""What an operator may ask of one worker, as calls with deadlines."""

from collections.abc import Awaitable
from typing import TYPE_CHECKING, TypeVar

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.rpc.v1.admin_pb2 import (
    DrainRequest,
    GetStatusRequest,
    ListSequencesRequest,
    SequenceStatus,
    UndrainRequest,
    WorkerStatus,
)
from pdserve.rpc.v1.admin_pb2_grpc import AdminServiceStub
from pdserve.wire.convert import to_milliseconds
from pdserve.wire.errors import answer_of
from pdserve.wire.server import dial

if TYPE_CHECKING:
    from pdserve.rpc.v1.admin_pb2_grpc import AdminServiceAsyncStub

R = TypeVar("R")


class AdminClient:
    """One worker's AdminService. Every call raises PdserveError: the worker's own, or worker_lost if there is no answer."""

    def __init__(self, address: str, timeout_s: float = 5.0) -> None:
        """
        Args:
            address: the worker's admin port, as host:port.
            timeout_s: how long an answer may take.
        """
        self._address = address
        self._timeout_s = timeout_s
        self._channel = dial(address)
        self._stub: AdminServiceAsyncStub = AdminServiceStub(self._channel)

    async def drain(self, deadline_s: float | None = None) -> int:
        """Take no new work; None leaves the deadline to the worker. Returns: attempts that it still holds."""
        request = DrainRequest(deadline_ms=to_milliseconds(deadline_s or 0.0))
        return (await self._ask(self._stub.Drain(request, timeout=self._timeout_s))).held_attempts

    async def undrain(self) -> None:
        await self._ask(self._stub.Undrain(UndrainRequest(), timeout=self._timeout_s))

    async def status(self) -> WorkerStatus:
        return await self._ask(self._stub.GetStatus(GetStatusRequest(), timeout=self._timeout_s))

    async def list_sequences(self) -> list[SequenceStatus]:
        answer = await self._ask(self._stub.ListSequences(ListSequencesRequest(), timeout=self._timeout_s))
        return list(answer.sequences)

    async def close(self) -> None:
        await self._channel.close()

    async def _ask(self, call: Awaitable[R]) -> R:
        try:
            return await answer_of(call)
        except PdserveError as error:
            if error.code is not ErrorCode.worker_lost:
                raise
            raise PdserveError(error.code, f"cannot reach the worker at {self._address}: {error.message}") from None
