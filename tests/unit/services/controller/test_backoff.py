"""How long a place is left alone."""

from pdserve.cluster.placement import Slot
from pdserve.core.events import Role
from services.controller.backoff import Backoff

SLOT = Slot(Role.DECODE, 0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def rest_s(backoff: Backoff, clock: Clock) -> float:
    """How long the slot rests from now, in whole seconds."""
    begun_s = clock.now_s
    while SLOT in backoff.resting():
        clock.now_s += 1
    return clock.now_s - begun_s


def test_the_first_failure_is_cured_at_once_and_the_next_ones_wait_twice_as_long_each() -> None:
    clock = Clock()
    backoff = Backoff(clock)
    rests = []
    for _ in range(8):
        backoff.note_failure(SLOT)
        rests.append(rest_s(backoff, clock))
    assert rests == [0, 1, 2, 4, 8, 16, 30, 30]


def test_a_worker_that_was_ready_begins_anew() -> None:
    clock = Clock()
    backoff = Backoff(clock)
    for _ in range(5):
        backoff.note_failure(SLOT)
    backoff.clear(SLOT)
    assert SLOT not in backoff.resting()
    backoff.note_failure(SLOT)
    assert SLOT not in backoff.resting()
