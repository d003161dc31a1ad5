"""What both clients tell httpx, and how they read its failures."""

import ipaddress

import httpx

from pdserve.client.answers import Answer
from pdserve.client.errors import ClientError, IdleTimeout, NoConnection, TruncatedStream
from pdserve.client.policy import Timeouts

# As many streams as the caller opens: httpx's own limit is 100, and the next one would wait without a word.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=100)
# A compressing proxy would hold events back until a block of them is full.
STREAM_HEADERS = {"Accept": "text/event-stream", "Accept-Encoding": "identity"}
# For the end of a response whose answer is whole already, so that its connection can serve again.
DRAIN_S = 1.0

_UNREACHED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol, httpx.ProxyError)


def httpx_timeout(timeouts: Timeouts, read_s: float) -> httpx.Timeout:
    """Nobody waits for the pool: it has no limit."""
    return httpx.Timeout(None, connect=timeouts.connect_s, write=timeouts.write_s, read=read_s)


def auth_headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def is_loopback(url: str) -> bool:
    """A proxy that the environment names does not know what listens on this machine."""
    host = httpx.URL(url).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_unreached(error: Exception) -> bool:
    """Whether nothing was asked: another try cannot ask twice."""
    return isinstance(error, _UNREACHED)


def error_of_transport(error: httpx.HTTPError, url: str, answer: Answer | None = None) -> ClientError:
    """A failure of the connection, as this client raises it."""
    reason = str(error) or type(error).__name__
    if is_unreached(error):
        return NoConnection(f"no connection to {url} ({reason})")
    if isinstance(error, httpx.ReadTimeout):
        return IdleTimeout(f"nothing came from {url} for too long", answer=answer)
    return TruncatedStream(f"the answer was cut: the connection to {url} broke ({reason})", answer=answer)
