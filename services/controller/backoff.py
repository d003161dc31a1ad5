"""How long a place is left alone after the workers in it have failed."""

import time
from collections.abc import Callable, Collection

from pdserve.cluster.placement import Slot

_FIRST_S = 1.0
_MAX_S = 30.0


class Backoff:
    """The first failure is cured at once; each one after it, before the place has been ready again, waits twice as long."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failures: dict[Slot, int] = {}
        self._until_s: dict[Slot, float] = {}

    def note_failure(self, slot: Slot) -> None:
        failures = self._failures[slot] = self._failures.get(slot, 0) + 1
        rest_s = 0.0 if failures == 1 else min(_MAX_S, _FIRST_S * 2 ** (failures - 2))
        self._until_s[slot] = self._now() + rest_s

    def clear(self, slot: Slot) -> None:
        """A worker has been ready there."""
        self._failures.pop(slot, None)
        self._until_s.pop(slot, None)

    def resting(self) -> Collection[Slot]:
        now_s = self._now()
        return {slot for slot, until_s in self._until_s.items() if now_s < until_s}
