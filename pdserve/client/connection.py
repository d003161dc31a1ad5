"""What both clients tell httpx, and what follows from what it brings: an answer, another try, or an error. No I/O."""

import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from pdserve.client.answers import Answer
from pdserve.client.errors import ClientError, IdleTimeout, NoConnection, TruncatedStream, error_of_response
from pdserve.client.policy import Retries, Timeouts
from pdserve.client.reader import AnswerReader

# A compressing proxy would hold events back until a block of them is full.
STREAM_HEADERS = {"Accept": "text/event-stream", "Accept-Encoding": "identity"}
# For the end of a response whose answer is whole already, so that its connection can serve again.
DRAIN_S = 1.0

# As many streams as the caller opens: httpx's own limit is 100, and the next one would wait without a word.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=100)
_UNREACHED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol, httpx.ProxyError)


class Tries:
    """The tries of one request: what follows when one has failed."""

    def __init__(self, url: str, retries: Retries) -> None:
        self._url = url
        self._retries = retries
        self._count = 0

    def after_failure(self, error: httpx.HTTPError) -> float:
        """No response came. Returns: seconds until the next try.

        Raises:
            ClientError: it was the last one.
        """
        self._count += 1
        wait_s = self._retries.wait_s(self._count) if _is_unreached(error) else None
        if wait_s is None:
            raise error_of_transport(error, self._url) from error
        return wait_s

    def after_refusal(self, response: httpx.Response, body: bytes) -> float:
        """A response came, and is no answer. Returns: seconds until the next try.

        Raises:
            ClientError: it was the last one.
        """
        self._count += 1
        wait_s = self._retries.wait_s(self._count, response.headers, response.status_code)
        if wait_s is None:
            raise error_of_response(self._url, response.status_code, response.headers, body)
        return wait_s


def base_url(url: str) -> str:
    """A server's address, given with or without the API's /v1."""
    return url.rstrip("/").removesuffix("/v1")


def http_options(url: str, api_key: str | None, timeouts: Timeouts) -> dict[str, Any]:
    """What an httpx client is made with, for asyncio or not."""
    return {
        "base_url": url,
        "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
        "limits": _LIMITS,
        "timeout": httpx_timeout(timeouts, timeouts.whole_s),
        "trust_env": not is_loopback(url),
    }


def httpx_timeout(timeouts: Timeouts, read_s: float) -> httpx.Timeout:
    """Nobody waits for the pool: it has no limit."""
    return httpx.Timeout(None, connect=timeouts.connect_s, write=timeouts.write_s, read=read_s)


def is_loopback(url: str) -> bool:
    """A proxy that the environment names does not know what listens on this machine."""
    host = httpx.URL(url).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def reading_body(url: str) -> Iterator[None]:
    """
    Raises:
        ClientError: in place of httpx's errors.
    """
    try:
        yield
    except httpx.HTTPError as error:
        raise error_of_transport(error, url) from error


@contextmanager
def reading_event(url: str, reader: AnswerReader, limit_s: float) -> Iterator[None]:
    """
    Raises:
        ClientError: in place of httpx's errors, and of the TimeoutError of whoever watches over `limit_s`.
    """
    try:
        yield
    except TimeoutError as error:
        raise IdleTimeout(f"no event came from {url} for {limit_s:g} s", answer=reader.answer) from error
    except httpx.HTTPError as error:
        raise error_of_transport(error, url, reader.answer) from error


def error_of_transport(error: httpx.HTTPError, url: str, answer: Answer | None = None) -> ClientError:
    """A failure of the connection, as this client raises it."""
    reason = str(error) or type(error).__name__
    if _is_unreached(error):
        return NoConnection(f"no connection to {url} ({reason})")
    if isinstance(error, httpx.ReadTimeout):
        return IdleTimeout(f"nothing came from {url} for too long", answer=answer)
    return TruncatedStream(f"the answer was cut: the connection to {url} broke ({reason})", answer=answer)


def _is_unreached(error: Exception) -> bool:
    """Whether nothing was asked: another try cannot ask twice."""
    return isinstance(error, _UNREACHED)
