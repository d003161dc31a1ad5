"""The decode worker: takes prompts' caches, and writes the answers."""

from collections.abc import Callable
from typing import Any

from pdserve.config import Settings
from pdserve.core.events import Role
from pdserve.engine.engine import Engine
from pdserve.rpc.v1 import kv_pb2_grpc
from pdserve.runtime.attempts import Admission, AttemptTable
from pdserve.runtime.worker import Worker
from pdserve.wire.server import GrpcServer
from services.decode.attempts import DecodeAttempts
from services.decode.kv_service import KVService

KV_SERVICE = "pdserve.rpc.v1.KVService"


class DecodeWorker(Worker):
    """See `Worker`."""

    role = Role.DECODE

    def __init__(self, settings: Settings, make_engine: Callable[[], Engine] | None = None) -> None:
        super().__init__(settings, make_engine)
        self._kv = KVService(self.worker_id, self.epoch, settings.session.dead_after_s)

    @property
    def transfers(self) -> int:
        return self._kv.pushes

    async def serve_role(self) -> str:
        server = GrpcServer()
        server.add(KV_SERVICE, kv_pb2_grpc.add_KVServiceServicer_to_server, self._kv)
        return await self.listen(server, self.settings.worker.kv_port)

    def make_attempts(self, engine: Engine, admission: Admission) -> AttemptTable[Any]:
        attempts = DecodeAttempts(
            admission, self.post, self.epoch, self.settings.session.ticket_wait_s, self.settings.worker.colocated
        )
        self._kv.open(attempts, engine.runner.pool)
        return attempts
