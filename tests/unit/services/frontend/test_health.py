"""A worker that keeps failing is left alone for a while, then tried with one request."""

from services.frontend.health import WorkerHealth


def failed(times: int, now_s: float = 0.0) -> WorkerHealth:
    health = WorkerHealth()
    for _ in range(times):
        health.failed(now_s)
    return health


def test_two_failures_are_forgiven() -> None:
    assert failed(2).allows(0.0)


def test_three_in_a_row_pause_it_for_a_second() -> None:
    health = failed(3)
    assert not health.allows(0.9)
    assert health.allows(1.0)


def test_after_the_pause_one_request_tries_it() -> None:
    health = failed(3)
    health.dispatched()
    assert not health.allows(5.0)
    health.succeeded()
    assert health.allows(5.0)


def test_a_trial_that_fails_doubles_the_pause() -> None:
    health = failed(3)
    health.dispatched()
    health.failed(10.0)
    assert not health.allows(11.9)
    assert health.allows(12.0)


def test_a_trial_that_tells_nothing_lets_another_try() -> None:
    health = failed(3)
    health.dispatched()
    health.released()
    assert health.allows(5.0)


def test_a_success_between_failures_starts_the_count_again() -> None:
    health = failed(2)
    health.succeeded()
    health.failed(0.0)
    assert health.allows(0.0)


def test_the_pause_is_bounded() -> None:
    assert failed(1000).allows(30.0)
