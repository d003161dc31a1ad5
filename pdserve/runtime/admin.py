"""What operators may ask of one worker."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from pdserve.config import Settings
from pdserve.core.errors import PdserveError
from pdserve.core.ids import AttemptKey
from pdserve.core.version import VERSION
from pdserve.rpc.v1 import admin_pb2, admin_pb2_grpc, session_pb2
from pdserve.runtime.attempts import Held
from pdserve.runtime.identity import WorkerIdentity
from pdserve.runtime.sessions import SessionService
from pdserve.wire.convert import group_to_proto, role_to_proto, to_milliseconds
from pdserve.wire.errors import abort

if TYPE_CHECKING:
    import grpc.aio


class AdminTarget(Protocol):
    """What the service needs of its worker."""

    settings: Settings
    identity: WorkerIdentity
    started_s: float
    sessions: SessionService

    @property
    def held(self) -> Mapping[AttemptKey, Held]: ...

    @property
    def transfers(self) -> int: ...

    def state_name(self, key: AttemptKey) -> str: ...

    def pulse(self) -> session_pb2.WorkerPulse: ...

    def drain(self, deadline_s: float) -> None: ...

    def undrain(self) -> None: ...


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Drain, undrain, status and the list of what is held."""

    def __init__(self, worker: AdminTarget) -> None:
        self._worker = worker

    async def Drain(  # noqa: N802
        self,
        request: admin_pb2.DrainRequest,
        context: "grpc.aio.ServicerContext[admin_pb2.DrainRequest, admin_pb2.DrainResponse]",
    ) -> admin_pb2.DrainResponse:
        deadline_s = request.deadline_ms / 1000 if request.deadline_ms else self._worker.settings.worker.drain_s
        self._worker.drain(deadline_s)
        return admin_pb2.DrainResponse(held_attempts=len(self._worker.held))

    async def Undrain(  # noqa: N802
        self,
        request: admin_pb2.UndrainRequest,
        context: "grpc.aio.ServicerContext[admin_pb2.UndrainRequest, admin_pb2.UndrainResponse]",
    ) -> admin_pb2.UndrainResponse:
        try:
            self._worker.undrain()
        except PdserveError as error:
            await abort(context, error)
        return admin_pb2.UndrainResponse()

    async def GetStatus(  # noqa: N802
        self,
        request: admin_pb2.GetStatusRequest,
        context: "grpc.aio.ServicerContext[admin_pb2.GetStatusRequest, admin_pb2.WorkerStatus]",
    ) -> admin_pb2.WorkerStatus:
        worker, identity = self._worker, self._worker.identity
        pulse = worker.pulse()
        return admin_pb2.WorkerStatus(
            worker_id=identity.worker_id,
            role=role_to_proto(identity.role),
            epoch=identity.epoch,
            model=worker.settings.model.name,
            build=VERSION,
            pulse=pulse,
            sessions=len(worker.sessions.sessions),
            attempts=len(worker.held),
            transfers=worker.transfers,
            used_blocks=pulse.total_blocks - pulse.free_blocks - pulse.cached_blocks,
            pid=identity.pid,
            uptime_ms=to_milliseconds(time.monotonic() - worker.started_s),
        )

    async def ListSequences(  # noqa: N802
        self,
        request: admin_pb2.ListSequencesRequest,
        context: "grpc.aio.ServicerContext[admin_pb2.ListSequencesRequest, admin_pb2.ListSequencesResponse]",
    ) -> admin_pb2.ListSequencesResponse:
        now_s = time.monotonic()
        return admin_pb2.ListSequencesResponse(
            sequences=[
                admin_pb2.SequenceStatus(
                    group=group_to_proto(key.group),
                    attempt=key.attempt,
                    siblings=sorted(held.live),
                    state=self._worker.state_name(key),
                    age_ms=to_milliseconds(now_s - held.group.arrival_s),
                    prompt_tokens=held.group.prompt_tokens,
                )
                for key, held in self._worker.held.items()
            ]
        )
