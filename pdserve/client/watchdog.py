"""A deadline over several blocking reads."""

import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

import httpx


class Watchdog:
    """Ends a blocking read whose time is up, by shutting the connection down from a thread of its own.

    A socket's own timeout starts anew with every byte, so a server's heartbeats would hold it off for ever.

    Args:
        response: whose connection is watched; one of another transport has none, and is looked at between pieces.
        shortest_s: no limit is shorter.
    """

    def __init__(self, response: httpx.Response, shortest_s: float) -> None:
        stream: Any = response.extensions.get("network_stream")
        self._socket: socket.socket | None = stream.get_extra_info("socket") if stream is not None else None
        self._shortest_s = shortest_s
        self._deadline_s = math.inf
        self._bitten = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pdserve-client-watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._socket is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The connection is about to serve somebody else.
        self._closed.set()
        if self._socket is not None:
            self._thread.join()

    @contextmanager
    def limit(self, limit_s: float) -> Iterator[None]:
        """
        Raises:
            TimeoutError: in place of whatever the connection's end looks like.
        """
        self._deadline_s = time.monotonic() + limit_s
        try:
            yield
        except httpx.HTTPError as error:
            if self._bitten:
                raise TimeoutError from error
            raise
        finally:
            self._deadline_s = math.inf
        # Without a length or chunks, a connection that was shut down looks like an end in order.
        if self._bitten:
            raise TimeoutError

    def check(self) -> None:
        """
        Raises:
            TimeoutError: the time is up.
        """
        if time.monotonic() >= self._deadline_s:
            raise TimeoutError

    def _watch(self) -> None:
        assert self._socket is not None
        # A limit that is set during a wait ends after it: none is shorter.
        while not self._closed.wait(min(self._shortest_s, self._deadline_s - time.monotonic())):
            if time.monotonic() >= self._deadline_s:
                self._bitten = True
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                return
