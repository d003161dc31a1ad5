"""When a line of attempts tries again: failures are counted, and want of room is timed."""

import pytest

from pdserve.config import FrontendConfig
from pdserve.core.errors import ErrorCode, PdserveError
from services.frontend.retry_budget import RetryBudget

LOST = PdserveError(ErrorCode.worker_lost, "it is gone")
FULL = PdserveError(ErrorCode.queue_full, "it is full")
REFUSED = PdserveError(ErrorCode.invalid_request, "it is wrong")


def budget(failures: int = 0) -> RetryBudget:
    return RetryBudget(FrontendConfig(max_attempts=3, retry_backoff_s=0.5, wait_s=10.0), failures)


def test_what_cannot_succeed_is_not_tried_again() -> None:
    assert not budget().allows(REFUSED, 0.0)


def test_failures_end_with_the_last_attempt() -> None:
    retries = budget()
    for _ in range(2):
        assert retries.allows(LOST, 0.0)
        retries.spend(LOST)
    assert not retries.allows(LOST, 0.0)
    assert not budget(failures=2).allows(LOST, 0.0)


def test_backoff_doubles_up_to_a_limit() -> None:
    assert [budget(failures).spend(LOST) for failures in (0, 1, 2, 10)] == [0.5, 1.0, 2.0, 5.0]


def test_want_of_room_costs_no_attempt_and_no_backoff() -> None:
    retries = budget(failures=2)
    assert retries.allows(FULL, 0.0)
    assert retries.spend(FULL) == 0.0
    assert retries.failures == 2


@pytest.mark.parametrize(("now_s", "allowed"), [(9.9, True), (10.0, False), (11.0, False)])
def test_want_of_room_ends_with_the_time_for_it(now_s: float, allowed: bool) -> None:
    retries = budget()
    assert retries.room_wait_s(0.0) == 10.0
    assert retries.room_wait_s(4.0) == 6.0
    assert retries.allows(FULL, now_s) == allowed


def test_progress_begins_the_time_anew() -> None:
    retries = budget()
    retries.allows(FULL, 0.0)
    retries.progressed()
    assert retries.allows(FULL, 15.0)
    assert retries.room_wait_s(20.0) == 5.0


def test_room_is_waited_for_while_the_requests_other_answers_grow() -> None:
    retries = budget()
    assert retries.room_wait_s(0.0) == 10.0
    assert retries.room_wait_s(9.0, grown_s=5.0) == 6.0
    assert retries.allows(FULL, 14.9, grown_s=5.0)
    assert not retries.allows(FULL, 15.0, grown_s=5.0)
    # What grew before room was wanted gives no time.
    assert budget().room_wait_s(20.0, grown_s=1.0) == 10.0
