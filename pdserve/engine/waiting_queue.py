"""What waits for its turn: first by priority, then by age."""

import heapq
from collections.abc import Iterator
from itertools import count

from pdserve.engine.attempt import Attempt


class WaitingQueue:
    """Attempts in the order in which they are to be admitted.

    Adding costs O(log n). Removing only forgets: the attempt's place in the heap goes when it comes to the front, or when
    more than half of the heap is such places. So no operation's cost grows with what has been removed.

    Attributes:
        prompt_tokens: what all of them have to compute.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self._heap: list[tuple[int, float, int, Attempt]] = []
        self._places: dict[Attempt, int] = {}
        self._next_place = count()

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Attempt]:
        """In no particular order."""
        return iter(self._places)

    def add(self, attempt: Attempt) -> None:
        place = next(self._next_place)
        self._places[attempt] = place
        self.prompt_tokens += attempt.uncomputed_tokens
        group = attempt.group
        heapq.heappush(self._heap, (group.priority, group.arrival_s, place, attempt))

    def remove(self, attempt: Attempt) -> None:
        """Raises KeyError if it does not wait."""
        del self._places[attempt]
        self.prompt_tokens -= attempt.uncomputed_tokens
        if len(self._heap) > 2 * len(self._places) + 16:
            self._heap = [entry for entry in self._heap if entry[3] in self._places]
            heapq.heapify(self._heap)

    def first(self) -> Attempt | None:
        """Whose turn it is, if anyone waits."""
        while self._heap and self._heap[0][3] not in self._places:
            heapq.heappop(self._heap)
        return self._heap[0][3] if self._heap else None
