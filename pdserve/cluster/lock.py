"""The controllers' lock: who may place and replace workers, and how many there should be."""

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counts:
    """How many workers of each role."""

    prefill: int
    decode: int


class Lease:
    """One owner at a time, for as long as it renews. Lives in a named, detached actor, and so outlasts every controller.

    Besides the owner it keeps what an operator has asked for, so that a new controller goes on with that.
    """

    def __init__(self) -> None:
        self._owner = ""
        self._expires_s = 0.0
        self._configured: Counts | None = None
        self._desired: Counts | None = None

    def acquire(self, owner: str, lease_s: float) -> str:
        """Take or renew the lease for `lease_s` from now. Returns: who has it then."""
        now_s = time.monotonic()
        if owner == self._owner or now_s >= self._expires_s:
            self._owner, self._expires_s = owner, now_s + lease_s
        return self._owner

    def release(self, owner: str) -> None:
        if owner == self._owner:
            self._owner, self._expires_s = "", 0.0

    def configure(self, configured: Counts) -> Counts:
        """What should run: the last `scale`, unless the settings have changed since."""
        if configured != self._configured or self._desired is None:
            self._configured = self._desired = configured
        return self._desired

    def scale(self, desired: Counts) -> None:
        self._desired = desired
