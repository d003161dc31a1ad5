"""One worker as its controller follows it, from the request for an actor to that actor's end."""

import asyncio
import time

from pdserve.cluster.placement import Placed
from pdserve.cluster.ray_cluster import WorkerHandle
from pdserve.rpc.v1.admin_pb2 import WorkerStatus
from pdserve.rpc.v1.cluster_pb2 import (
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_STARTING,
    MEMBER_STATE_STUCK,
    Member,
    MemberState,
)
from pdserve.rpc.v1.session_pb2 import (
    WORKER_STATE_BROKEN,
    WORKER_STATE_DRAINING,
    WORKER_STATE_READY,
    WORKER_STATE_STUCK,
)
from pdserve.wire.admin_client import AdminClient
from pdserve.wire.convert import role_to_proto
from services.controller.plan import Phase, WorkerView

_PHASES = {
    WORKER_STATE_READY: Phase.READY,
    WORKER_STATE_DRAINING: Phase.DRAINING,
    WORKER_STATE_STUCK: Phase.STUCK,
    WORKER_STATE_BROKEN: Phase.BROKEN,
}

_MEMBER_STATES: dict[Phase, MemberState.ValueType] = {
    Phase.PLACING: MEMBER_STATE_STARTING,
    Phase.STARTING: MEMBER_STATE_STARTING,
    Phase.READY: MEMBER_STATE_READY,
    Phase.DRAINING: MEMBER_STATE_DRAINING,
    Phase.STOPPING: MEMBER_STATE_DRAINING,
    Phase.STUCK: MEMBER_STATE_STUCK,
    Phase.BROKEN: MEMBER_STATE_STUCK,
}


class Tracked:
    """
    Args:
        timeout_s: for an answer of the worker.

    Attributes:
        placed: set once its ports are bound, together with `admin`.
        found: set once it is known where it is, or that it has ended.
        held: attempts and transfers that it held when it last answered.
        leaving: it drains because there is one too many, not because an operator said so.
        kill_reason: why it was killed, "" as long as it wasn't.
    """

    def __init__(self, handle: WorkerHandle, timeout_s: float) -> None:
        self.handle = handle
        self.placed: Placed | None = None
        self.found = asyncio.Event()
        self.admin: AdminClient | None = None
        self.phase = Phase.PLACING
        self.held = 0
        self.leaving = False
        self.kill_reason = ""
        self._timeout_s = timeout_s
        self._phase_since_s = self._answered_s = time.monotonic()

    def place(self, placed: Placed) -> None:
        """It has bound its ports."""
        self.placed = placed
        self.admin = AdminClient(placed.admin_address, self._timeout_s)
        self._answered_s = time.monotonic()
        self.enter(Phase.STARTING)
        self.found.set()

    def enter(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase, self._phase_since_s = phase, time.monotonic()

    def take_status(self, status: WorkerStatus) -> None:
        """What the worker has just said of itself."""
        self._answered_s = time.monotonic()
        self.held = status.attempts + status.transfers
        if self.phase is not Phase.STOPPING:
            self.enter(_PHASES.get(status.pulse.state, Phase.STARTING))

    async def ask_status(self) -> None:
        """Take over what it says of itself, if it can be asked yet. Raises PdserveError."""
        if self.admin is not None:
            self.take_status(await self.admin.status())

    async def ask_drain(self, deadline_s: float | None) -> None:
        """Raises PdserveError."""
        if self.admin is not None:
            await self.admin.drain(deadline_s)

    async def ask_undrain(self) -> None:
        """Raises PdserveError."""
        if self.admin is not None:
            await self.admin.undrain()
            self.leaving = False

    async def close(self) -> None:
        if self.admin is not None:
            await self.admin.close()

    def view(self) -> WorkerView:
        now_s = time.monotonic()
        return WorkerView(
            slot=self.handle.slot,
            phase=self.phase,
            phase_s=now_s - self._phase_since_s,
            silent_s=now_s - self._answered_s if self.placed else 0.0,
            held=self.held,
            leaving=self.leaving,
        )

    def member(self) -> Member:
        """As others are told of it. Until it has bound its ports it has no addresses, and nobody can reach it."""
        slot = self.handle.slot
        member = Member(worker_id=slot.worker_id, role=role_to_proto(slot.role), state=_MEMBER_STATES[self.phase])
        if (placed := self.placed) is not None:
            member.session_address = placed.session_address
            member.kv_address = placed.kv_address
            member.admin_address = placed.admin_address
            member.epoch = placed.epoch
            member.pid = placed.pid
            member.node = placed.node
        return member
