"""Whether one line of attempts may try once more, and when."""

from pdserve.config import FrontendConfig
from pdserve.core.errors import Fault, PdserveError

_LONGEST_BACKOFF_S = 5.0


class RetryBudget:
    """Failures are bounded by their number. Want of room is no failure: it is bounded by time, which begins when room is
    first wanted in vain, ends with an attempt's progress, and begins anew with that of another answer to the request:
    one of thousands of prompts may hold all the room that its last ones wait for.

    Attributes:
        failures: attempts that have failed.
    """

    def __init__(self, config: FrontendConfig, failures: int = 0) -> None:
        self.failures = failures
        self._config = config
        self._no_room_since_s: float | None = None

    def progressed(self) -> None:
        """An attempt brought a token, whatever failed before."""
        self._no_room_since_s = None

    def allows(self, error: PdserveError, now_s: float, grown_s: float | None = None) -> bool:
        """Whether another attempt may follow one that ended with this error; for `grown_s` see `room_wait_s`."""
        if not error.spec.retryable:
            return False
        if error.spec.fault is Fault.CAPACITY:
            return self.room_wait_s(now_s, grown_s) > 0
        return self.failures + 1 < self._config.max_attempts

    def spend(self, error: PdserveError) -> float:
        """Another attempt follows. Returns: seconds to back off before it."""
        if error.spec.fault is Fault.CAPACITY:
            return 0.0
        backoff_s: float = min(self._config.retry_backoff_s * 2**self.failures, _LONGEST_BACKOFF_S)
        self.failures += 1
        return backoff_s

    def room_wait_s(self, now_s: float, grown_s: float | None = None) -> float:
        """How long the attempts may wait for room from now on.

        Args:
            grown_s: when an answer to the same request got its last token; None if none has one.
        """
        if self._no_room_since_s is None:
            self._no_room_since_s = now_s
        since_s = self._no_room_since_s if grown_s is None else max(self._no_room_since_s, grown_s)
        return max(since_s + self._config.wait_s - now_s, 0.0)
