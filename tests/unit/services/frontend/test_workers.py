"""A worker as its frontend knows it, with no connection: what its session says is said by hand."""

from itertools import count

import pytest
from prometheus_client import CollectorRegistry

from pdserve.config import SessionConfig
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import EngineLoad, Role, StageReport, Token
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.rpc.v1 import session_pb2 as pb
from pdserve.telemetry.metrics import FrontendMetrics
from pdserve.wire.convert import role_to_proto
from pdserve.wire.session_client import WorkerSession
from services.frontend.workers import Worker

pytestmark = pytest.mark.asyncio

LATER_S = 1e9
FAULT = PdserveError(ErrorCode.engine_failed, "its engine broke")
LOST = PdserveError(ErrorCode.worker_lost, "the session broke")
FULL = PdserveError(ErrorCode.queue_full, "it is full")


def key(counter: int) -> AttemptKey:
    return AttemptKey(GroupId(1, counter), 1)


class Attempt:
    def __init__(self, defect: Exception | None = None) -> None:
        self.failures: list[PdserveError] = []
        self._defect = defect

    def take_token(self, worker: Worker, token: Token) -> None: ...

    def take_stage(self, worker: Worker, report: StageReport) -> None: ...

    def take_failure(self, worker: Worker, error: PdserveError) -> None:
        if self._defect is not None:
            raise self._defect
        self.failures.append(error)
        worker.drop(key(len(self.failures)))


class Listener:
    def on_workers_changed(self) -> None: ...


def make_worker() -> Worker:
    metrics = FrontendMetrics(CollectorRegistry())
    return Worker("127.0.0.1:1", 1, Role.DECODE, "m", SessionConfig(), Listener(), metrics)


async def test_a_worker_that_is_lost_with_its_request_on_trial_is_tried_again() -> None:
    worker, attempt = make_worker(), Attempt()
    for counter in (1, 2, 3):
        worker.carry(key(counter), attempt, tokens=1, blocks=1)
        worker.on_failed(key(counter), FAULT)
    worker.carry(key(4), attempt, tokens=1, blocks=1)
    assert not worker.health.allows(LATER_S)
    worker.on_lost(LOST)
    assert worker.health.allows(LATER_S)


@pytest.mark.parametrize(
    "code", [ErrorCode.transfer_failed, ErrorCode.worker_lost, ErrorCode.stale_epoch, ErrorCode.unknown_ticket]
)
async def test_a_peers_failure_does_not_count_against_the_worker_that_reports_it(code: ErrorCode) -> None:
    worker, attempt = make_worker(), Attempt()
    for counter in range(1, 11):
        worker.carry(key(counter), attempt, tokens=1, blocks=1)
        worker.on_failed(key(counter), PdserveError(code, "the other one"))
    assert worker.health.allows(0.0)
    assert len(attempt.failures) == 10


async def test_one_attempts_defect_does_not_keep_a_loss_from_the_others() -> None:
    worker, attempt = make_worker(), Attempt()
    worker.carry(key(1), Attempt(ZeroDivisionError()), tokens=1, blocks=1)
    worker.carry(key(2), attempt, tokens=1, blocks=1)
    worker.on_lost(LOST)
    assert attempt.failures == [LOST]
    assert not worker.carried


async def test_metrics_know_a_worker_by_one_name() -> None:
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    worker = Worker("127.0.0.1:1", 1, Role.DECODE, "m", SessionConfig(), Listener(), metrics)
    # Its model is still loading.
    worker.on_lost(LOST)
    worker.on_welcome(pb.Welcome(role=role_to_proto(Role.DECODE), worker_id="decode-0", model="m"))
    names = {s.labels["worker"] for m in registry.collect() for s in m.samples if s.name == "pdserve_worker_up"}
    assert names == {"decode-0"}
    await worker.close()
    assert not [s for m in registry.collect() for s in m.samples if s.name == "pdserve_worker_up"]


async def test_a_worker_that_refused_is_offered_a_little_and_then_more_while_it_takes_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WorkerSession, "connected", True)
    monkeypatch.setattr(WorkerSession, "quiet", False)
    worker, attempt, counters = make_worker(), Attempt(), count(1)
    worker.on_welcome(pb.Welcome(role=role_to_proto(Role.DECODE), worker_id="decode-0", model="m"))

    def offer() -> int:
        """Work for as long as it is a candidate, to a hundred at most; returns how much that was."""
        offered = 0
        while offered < 100 and worker.candidate() is not None:
            worker.carry(key(next(counters)), attempt, tokens=1, blocks=1)
            offered += 1
        return offered

    def pulse() -> None:
        worker.on_pulse(EngineLoad(), pb.WORKER_STATE_READY)

    assert offer() == 100
    worker.on_failed(key(1), FULL)
    assert offer() == 0
    for wanted in (16, 32, 64):
        pulse()
        assert offer() == wanted
    worker.on_failed(key(150), FULL)
    pulse()
    assert offer() == 16
    # Nobody wants more.
    pulse()
    pulse()
    assert offer() == 100
