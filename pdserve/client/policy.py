"""How long this client waits, and how often it tries."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.client.errors import BUSY_STATUSES, parse_retry_after


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. A heartbeat is no event, and moves none of these.

    Attributes:
        connect_s: to open a connection.
        write_s: for the server to take a part of the request.
        first_event_s: from the request to a stream's first event; a long prompt may compute for minutes.
        idle_s: from the reader's wait for an event to that event.
        whole_s: from the request to a buffered answer.
    """

    connect_s: float = 5.0
    write_s: float = 60.0
    first_event_s: float = 600.0
    idle_s: float = 120.0
    whole_s: float = 3600.0

    def event_s(self, events: int) -> float:
        """How long the next event may take after so many."""
        return self.idle_s if events else self.first_event_s


@dataclass(frozen=True, slots=True)
class Retries:
    """Tries again while not one byte of a response's body was read: nobody answered the connection, or 429 or 503.

    Attributes:
        count: tries after the first.
        base_s: the mean wait before the first of them; doubles with each one.
        max_wait_s: of one wait. A server that asks for more is not waited for.
    """

    count: int = 2
    base_s: float = 0.5
    max_wait_s: float = 30.0

    def wait_s(self, tries: int, headers: Mapping[str, str] | None = None, status: int | None = None) -> float | None:
        """The wait after the `tries`-th try has failed, or None to give up.

        Args:
            headers, status: of the response, if one came.
        """
        if tries > self.count or (status is not None and status not in BUSY_STATUSES):
            return None
        headers = headers or {}
        if headers.get("x-should-retry", "").lower() == "false":
            return None
        asked_s = parse_retry_after(headers.get("retry-after", "")) or 0.0
        if asked_s > self.max_wait_s:
            return None
        # Never sooner than asked, and never all clients at once.
        backoff_s: float = min(self.base_s * 2.0 ** (tries - 1), self.max_wait_s)
        return asked_s + backoff_s * random.uniform(0.5, 1.5)
