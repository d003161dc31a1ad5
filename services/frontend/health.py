"""Whether a worker that keeps failing is left alone: a circuit breaker for each worker."""

_FAILURES = 3
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class WorkerHealth:
    """Counts failures in a row. After three the worker is left alone, then tried again with one request."""

    def __init__(self) -> None:
        self._failures = 0
        self._paused_until_s = 0.0
        self._on_trial = False

    def allows(self, now_s: float) -> bool:
        """Whether the worker may get a request."""
        if self._failures < _FAILURES:
            return True
        return now_s >= self._paused_until_s and not self._on_trial

    def dispatched(self) -> None:
        if self._failures >= _FAILURES:
            self._on_trial = True

    def succeeded(self) -> None:
        self._failures = 0
        self._paused_until_s = 0.0
        self._on_trial = False

    def failed(self, now_s: float) -> None:
        """The worker failed a request by its own fault."""
        self._failures += 1
        self._on_trial = False
        if self._failures >= _FAILURES:
            doublings = min(self._failures - _FAILURES, 16)
            self._paused_until_s = now_s + min(_FIRST_PAUSE_S * 2**doublings, _LONGEST_PAUSE_S)

    def released(self) -> None:
        """The request on trial ended without telling anything: another may try."""
        self._on_trial = False
