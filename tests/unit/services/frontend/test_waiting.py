"""The line: urgent before old before new, bounded, and honest about how long it takes."""

import pytest

from pdserve.core.errors import ErrorCode, PdserveError
from services.frontend.waiting import WaitingLine


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def line(limit: int = 10, clock: Clock | None = None) -> WaitingLine[str]:
    return WaitingLine(limit, clock or Clock())


def test_the_smaller_priority_number_goes_first_then_the_older_then_who_came_first() -> None:
    waiting = line()
    for who, priority, arrival_s in (("late", 0, 9.0), ("old", 0, 1.0), ("urgent", -1, 10.0), ("twin", 0, 1.0)):
        waiting.join(who, priority, arrival_s)
    served: list[str] = []
    waiting.serve(lambda who: not served.append(who))
    assert served == ["urgent", "old", "twin", "late"]
    assert len(waiting) == 0


def test_who_cannot_be_served_keeps_the_place() -> None:
    waiting = line()
    for who in ("a", "b", "c"):
        waiting.join(who, 0, 0.0)
    waiting.serve(lambda who: who == "b")
    served: list[str] = []
    waiting.serve(lambda who: not served.append(who))
    assert served == ["a", "c"]


def test_a_defect_in_serving_one_leaves_the_others_in_line() -> None:
    waiting = line()
    for who in ("a", "b", "c", "d"):
        waiting.join(who, 0, 0.0)

    def take(who: str) -> bool:
        if who == "b":
            raise ZeroDivisionError
        return False

    with pytest.raises(ZeroDivisionError):
        waiting.serve(take)
    served: list[str] = []
    waiting.serve(lambda who: not served.append(who))
    assert served == ["a", "c", "d"]


def test_who_has_left_is_not_served_and_leaves_room() -> None:
    waiting = line(limit=1)
    place = waiting.join("a", 0, 0.0)
    waiting.leave(place)
    waiting.leave(place)
    assert len(waiting) == 0
    waiting.join("b", 0, 0.0)
    served: list[str] = []
    waiting.serve(lambda who: not served.append(who))
    assert served == ["b"]


def test_leaving_while_being_served_counts_once() -> None:
    waiting = line()
    place = waiting.join("a", 0, 0.0)

    def take(_: str) -> bool:
        waiting.leave(place)
        return True

    waiting.serve(take)
    assert len(waiting) == 0


def test_comers_and_goers_leave_nothing_behind() -> None:
    waiting = line()
    for _ in range(10_000):
        waiting.leave(waiting.join("x", 0, 0.0))
    assert len(waiting._heap) < 100


def test_a_full_line_refuses_and_says_when_to_come_back_at_its_measured_rate() -> None:
    clock = Clock()
    waiting = line(limit=4, clock=clock)
    for _ in range(10):
        clock.now_s += 2.0
        waiting.join("served", 0, 0.0)
        waiting.serve(lambda _: True)
    for _ in range(4):
        waiting.join("waits", 0, 0.0)
    with pytest.raises(PdserveError) as refused:
        waiting.join("one more", 0, 0.0)
    assert refused.value.code is ErrorCode.queue_full
    assert refused.value.retry_after_s == pytest.approx(2.0 * 9 / 10 * 5)
