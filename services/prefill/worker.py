"""The prefill worker: reads prompts, and pushes their cache to decode."""

from typing import Any

from pdserve.core.events import Role
from pdserve.core.ids import Ticket
from pdserve.engine.engine import Engine
from pdserve.runtime.attempts import Admission, AttemptTable
from pdserve.runtime.worker import Worker
from services.prefill.attempts import PrefillAttempts
from services.prefill.peers import Peers
from services.prefill.push import Push, PushListener


class PrefillWorker(Worker):
    """See `Worker`."""

    role = Role.PREFILL
    _peers: Peers | None = None
    _attempts: PrefillAttempts | None

    @property
    def transfers(self) -> int:
        return self._peers.pushes if self._peers is not None else 0

    def make_attempts(self, engine: Engine, admission: Admission) -> AttemptTable[Any]:
        session, pool = self.settings.session, engine.runner.pool
        peers = self._peers = Peers(self.worker_id, self.epoch, engine.runner.geometry, session.dead_after_s)

        def open_push(address: str, ticket: Ticket, num_tokens: int, listener: PushListener) -> Push:
            return Push(peers, address, ticket, pool, num_tokens, listener, session.pulse_s)

        return PrefillAttempts(admission, self.post, open_push)

    async def close_role(self) -> None:
        if self._peers is not None:
            await self._peers.close()
