"""The line of those who wait for a worker: bounded, the most urgent and then the oldest first."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from pdserve.core.errors import ErrorCode, PdserveError

_MEASURED_DEPARTURES = 32
_SPARE_PLACES = 64
_LEAST_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0

T = TypeVar("T")


@dataclass(order=True, slots=True)
class Place(Generic[T]):
    """A place in the line. `gone` marks one that was given up; it leaves when its turn comes."""

    priority: int
    arrival_s: float
    number: int
    who: T = field(compare=False)
    gone: bool = field(default=False, compare=False)


class WaitingLine(Generic[T]):
    """Whoever waits for a worker.

    Args:
        limit: places at most.
        clock: the loop's time, in seconds.
    """

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._numbers = count()
        self._heap: list[Place[T]] = []
        self._length = 0
        self._departures_s: deque[float] = deque(maxlen=_MEASURED_DEPARTURES)

    def __len__(self) -> int:
        return self._length

    @property
    def retry_after_s(self) -> float:
        """When one more could be served, at the rate at which the line moved lately."""
        departures_s = self._departures_s
        if len(departures_s) < 2:
            return _LEAST_RETRY_S
        interval_s = (self._clock() - departures_s[0]) / len(departures_s)
        return min(max(interval_s * (self._length + 1), _LEAST_RETRY_S), _LONGEST_RETRY_S)

    def join(self, who: T, priority: int, arrival_s: float, *, beyond_limit: bool = False) -> Place[T]:
        """
        Args:
            beyond_limit: take a place even where none is left.
        Raises:
            PdserveError: queue_full, and when to come back.
        """
        if self._length >= self._limit and not beyond_limit:
            raise PdserveError(
                ErrorCode.queue_full,
                f"{self._length} requests wait for a worker already; try again later",
                retry_after_s=self.retry_after_s,
            )
        place = Place(priority, arrival_s, next(self._numbers), who)
        heappush(self._heap, place)
        self._length += 1
        return place

    def leave(self, place: Place[T]) -> None:
        """Give a place up. A second time changes nothing."""
        if not place.gone:
            place.gone = True
            self._length -= 1
            if len(self._heap) > 2 * self._length + _SPARE_PLACES:
                self._heap = [place for place in self._heap if not place.gone]
                heapify(self._heap)

    def serve(self, take: Callable[[T], bool]) -> None:
        """Offer everyone a worker, in order. Whoever `take` returns True for has left the line."""
        staying = []
        heap, self._heap = self._heap, []
        try:
            while heap:
                place = heappop(heap)
                if place.gone:
                    continue
                if take(place.who):
                    self.leave(place)
                    self._departures_s.append(self._clock())
                else:
                    staying.append(place)
        finally:
            # Whoever joined meanwhile is in the line already; if `take` raised, the rest have not been asked.
            self._heap += staying + heap
            heapify(self._heap)
