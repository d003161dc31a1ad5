"""A worker as this frontend knows it: its session, its last pulse, what it was given since, and what it carries."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Protocol

from pdserve.config import SessionConfig
from pdserve.core.errors import ErrorCode, Fault, IllegalTransition, PdserveError, internal_error
from pdserve.core.events import EngineLoad, PromptLogprobs, Role, StageReport, Token
from pdserve.core.ids import AttemptKey
from pdserve.rpc.v1 import session_pb2 as pb
from pdserve.telemetry.metrics import FrontendMetrics
from pdserve.wire.convert import role_from_proto
from pdserve.wire.session_client import WorkerSession
from services.frontend.health import WorkerHealth
from services.frontend.router import Candidate, Dispatched

# What a worker reports of the other one of its pair, or of what lies between them: a decode worker that is killed fails all that
# prefill was pushing to it. Who is lost counts by its own session.
_OF_A_PEER = frozenset(
    {ErrorCode.transfer_failed, ErrorCode.worker_lost, ErrorCode.stale_epoch, ErrorCode.unknown_ticket}
)

# A ready worker has made a step, if an empty one, within this time.
_FRESH_STEP_S = 5.0

# What a worker that has refused work is offered after its next pulse. Twice as much follows what it took whole: a line of
# thousands that is offered at every pulse costs more than what it waits for.
_FIRST_OFFERS = 16

_logger = logging.getLogger(__name__)


class Carried(Protocol):
    """What a worker carries: an attempt, which hears what happens to it there."""

    def take_token(self, worker: "Worker", token: Token) -> None: ...

    def take_prompt_logprobs(self, worker: "Worker", part: PromptLogprobs) -> None: ...

    def take_stage(self, worker: "Worker", report: StageReport) -> None: ...

    def take_failure(self, worker: "Worker", error: PdserveError) -> None: ...


class Availability(Enum):
    """Whether a worker may get new work."""

    READY = auto()
    ABSENT = auto()
    DRAINING = auto()
    STUCK = auto()


class WorkersListener(Protocol):
    """Hears that routing may have changed."""

    def on_workers_changed(self) -> None: ...


class Worker:
    """One worker, through all lives at its address.

    Args:
        address: host:port of its session service.
        instance: this frontend's random number.
        role: what it is taken for; None takes it as it is.
        model: workers of another model get no work.
        listener: hears of every change that routing depends on.
    Attributes:
        colocated: a decode worker that reads prompts itself, and needs no prefill worker.
        load: what its last pulse said of its engine.
    """

    def __init__(
        self,
        address: str,
        instance: int,
        role: Role | None,
        model: str,
        config: SessionConfig,
        listener: WorkersListener,
        metrics: FrontendMetrics,
    ) -> None:
        self.address = address
        self.role = role
        self.name = address
        self.epoch = 0
        self.kv_address = ""
        self.block_size = 1
        self.colocated = False
        self.carried: dict[AttemptKey, Carried] = {}
        self.health = WorkerHealth()
        self._model = model
        self._listener = listener
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._session = WorkerSession(address, instance, role, config, self)
        self.load = EngineLoad()
        self._since = Dispatched()
        self._availability = Availability.ABSENT
        self._serves_model = False
        # It has refused work since its last pulse.
        self._refuses = False
        # How much it is offered between two pulses; None sets no limit.
        self._offers: int | None = None
        self._told: str | None = None
        self._closing = False

    def start(self) -> None:
        self._session.start()

    async def close(self) -> None:
        """End the session, and forget the worker."""
        self._closing = True
        await self._session.close()
        if self.role is not None:
            self._metrics.worker_gone(self.role, self.name)

    @property
    def ready(self) -> bool:
        """READY by its own word, heard of lately, with a fresh step."""
        return self._takes_work and self.load.step_age_s < _FRESH_STEP_S

    @property
    def _takes_work(self) -> bool:
        session = self._session
        return (
            self._serves_model and self._availability is Availability.READY and session.connected and not session.quiet
        )

    def candidate(self) -> Candidate | None:
        """What routing sees; None when the worker should get no new work."""
        if not self._takes_work or self._refuses or not self.health.allows(self._loop.time()):
            return None
        if self._offers is not None and self._since.sequences >= self._offers:
            return None
        return Candidate(self.name, self.load, self._since)

    def carry(self, key: AttemptKey, attempt: Carried, tokens: int, blocks: int) -> None:
        """The attempt is held here from now on."""
        self.carried[key] = attempt
        since = self._since
        self._since = Dispatched(since.sequences + 1, since.tokens + tokens, since.blocks + blocks)
        self.health.dispatched()

    def drop(self, key: AttemptKey) -> None:
        """Whatever the worker still says of the attempt is of no interest."""
        if self.carried.pop(key, None) is not None:
            self.health.released()

    def send(self, commands: Iterable[pb.Command]) -> None:
        """Raises PdserveError(worker_lost) when there is no connection."""
        self._session.send(commands)

    def cancel(
        self,
        key: AttemptKey,
        reason: "pb.CancelReason.ValueType",
        *,
        siblings: Sequence[int] = (),
        unless_running: bool = False,
    ) -> None:
        """A worker that is gone holds nothing to cancel."""
        if not self._session.connected:
            return
        cancel = pb.Cancel(
            group=key.group.counter,
            attempt=key.attempt,
            siblings=siblings,
            reason=reason,
            unless_running=unless_running,
        )
        self._session.send([pb.Command(cancel=cancel)])

    # What its session brings.

    def on_welcome(self, welcome: pb.Welcome) -> None:
        self._told = None
        role, name = role_from_proto(welcome.role), welcome.worker_id or self.address
        if self.role is not None and (role, name) != (self.role, self.name):
            self._metrics.worker_gone(self.role, self.name)
        self.role, self.name = role, name
        self.epoch = welcome.epoch
        self.kv_address = welcome.kv_address
        self.colocated = welcome.colocated
        self.block_size = max(1, welcome.geometry.block_size)
        self.load = EngineLoad(free_blocks=welcome.total_blocks, total_blocks=welcome.total_blocks)
        self._since = Dispatched()
        self._refuses = False
        self._offers = None
        self._availability = Availability.DRAINING if welcome.draining else Availability.READY
        self._serves_model = welcome.model == self._model
        if self._serves_model:
            _logger.info("worker %s (%s) joined at %s", self.name, self.role, self.address)
        else:
            _logger.error("worker %s serves %r, not %r: it gets no work", self.name, welcome.model, self._model)
        self._changed()

    def on_tokens(self, tokens: Sequence[Token]) -> None:
        carried = self.carried
        for token in tokens:
            attempt = carried.get(token.key)
            if attempt is None:
                self._metrics.tokens_overshoot()
                continue
            try:
                attempt.take_token(self, token)
            except Exception as error:  # noqa: BLE001 - one request's defect must not take the others' session along
                self._give_up(token.key, error)

    def on_prompt_logprobs(self, parts: Sequence[PromptLogprobs]) -> None:
        for part in parts:
            attempt = self.carried.get(part.key)
            if attempt is None:
                continue
            try:
                attempt.take_prompt_logprobs(self, part)
            except Exception as error:  # noqa: BLE001 - as for tokens
                self._give_up(part.key, error)

    def on_stages(self, stages: Sequence[StageReport]) -> None:
        for report in stages:
            self._metrics.stage_took(report)
            attempt = self.carried.get(report.key)
            if attempt is not None:
                attempt.take_stage(self, report)

    def on_failed(self, key: AttemptKey, error: PdserveError) -> None:
        attempt = self.carried.get(key)
        if attempt is None:
            return
        match error.spec.fault:
            case Fault.CAPACITY:
                self._refuses = True
                self._offers = _FIRST_OFFERS
            case Fault.WORKER if error.code not in _OF_A_PEER:
                self.health.failed(self._loop.time())
        attempt.take_failure(self, error)

    def on_pulse(self, load: EngineLoad, state: "pb.WorkerState.ValueType") -> None:
        self.load = load
        if self._offers is not None and not self._refuses:
            self._offers = 2 * self._offers if self._since.sequences >= self._offers else None
        self._since = Dispatched()
        self._refuses = False
        self._availability = _AVAILABILITY.get(state, Availability.ABSENT)
        self._changed()

    def on_go_away(self, deadline_s: float) -> None:
        _logger.info("worker %s drains, within %.1f s", self.name, deadline_s)
        self._availability = Availability.DRAINING

    def on_lost(self, error: PdserveError) -> None:
        if error.message != self._told and not self._closing:
            # Told once, not at each try. That one still loads its model is nothing to warn of.
            level = logging.INFO if error.spec.fault is Fault.CAPACITY else logging.WARNING
            _logger.log(level, "worker %s: %s", self.name, error.message)
            self._told = error.message
        self._availability = Availability.ABSENT
        # A worker that ends by itself in order is as good as lost to what it carried.
        cause = error if error.spec.retryable else PdserveError(ErrorCode.worker_lost, error.message)
        lost, self.carried = self.carried, {}
        for key, attempt in lost.items():
            try:
                attempt.take_failure(self, cause)
            except Exception:
                # One request's defect must not take the others along.
                _logger.exception("attempt %s cannot lose worker %s", key, self.name)
        # A request on trial here told nothing.
        self.health.released()
        self._changed()

    def succeeded(self) -> None:
        """An attempt brought its first token here."""
        self.health.succeeded()

    def _give_up(self, key: AttemptKey, cause: Exception) -> None:
        """What the worker said of an attempt cannot be, or cannot be handled here."""
        _logger.error("attempt %s on worker %s", key, self.name, exc_info=cause)
        self.cancel(key, pb.CANCEL_REASON_SUPERSEDED)
        if isinstance(cause, PdserveError):
            error = cause
        elif isinstance(cause, IllegalTransition):
            error = PdserveError(ErrorCode.protocol_violation, f"worker {self.name} broke the protocol: {cause}")
        else:
            error = internal_error()
        self.on_failed(key, error)

    def _changed(self) -> None:
        if self.role is not None:
            self._metrics.worker_seen(self.role, self.name, up=self._takes_work)
        self._listener.on_workers_changed()


_AVAILABILITY = {
    pb.WORKER_STATE_READY: Availability.READY,
    pb.WORKER_STATE_DRAINING: Availability.DRAINING,
    pb.WORKER_STATE_STUCK: Availability.STUCK,
}
