"""Whether one line of attempts may try once more, and when."""

from pdserve.config import FrontendConfig
from pdserve.core.errors import Fault, PdserveError

_LONGEST_BACKOFF_S = 5.0


class RetryBudget:
    """Failures are bounded by their number. Want of room is no failure: it is bounded by time, which begins when room is
    first wanted in vain, and ends with an attempt's progress.

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

    def allows(self, error: PdserveError, now_s: float) -> bool:
        """Whether another attempt may follow one that ended with this error."""
        if not error.spec.retryable:
            return False
        if error.spec.fault is Fault.CAPACITY:
            return self.room_wait_s(now_s) > 0
        return self.failures + 1 < self._config.max_attempts

    def spend(self, error: PdserveError) -> float:
        """Another attempt follows. Returns: seconds to back off before it."""
        if error.spec.fault is Fault.CAPACITY:
            return 0.0
        backoff_s: float = min(self._config.retry_backoff_s * 2**self.failures, _LONGEST_BACKOFF_S)
        self.failures += 1
        return backoff_s

    def room_wait_s(self, now_s: float) -> float:
        """How long the attempts may wait for room from now on."""
        if self._no_room_since_s is None:
            self._no_room_since_s = now_s
        return max(self._no_room_since_s + self._config.wait_s - now_s, 0.0)
