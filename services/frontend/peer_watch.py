"""Whether a client's machine is still there, by what the kernel knows of the connection.

TCP_USER_TIMEOUT would say it too, but not to be trusted: Linux counts it on from one pause of a slow reader to the next,
where the window did not open wide in between, and resets readers that are alive.
"""

import socket
import struct
from typing import NamedTuple

# struct tcp_info of linux/tcp.h, as far as it is read here: eight bytes, then 32-bit numbers.
_TCP_INFO = struct.Struct("=8B13I")
_PROBES, _UNACKED, _LAST_ACK_RECV = 3, 8 + 4, 8 + 12
_LOOKS_PER_TIMEOUT = 8


class PeerNews(NamedTuple):
    """What the kernel says.

    Attributes:
        is_awaited: something has been sent, data or a probe of a closed window, and not been acknowledged.
        heard_ago_s: since the last acknowledgement.
    """

    is_awaited: bool
    heard_ago_s: float


def ask_kernel(connection: socket.socket) -> PeerNews | None:
    """None where the kernel does not say: another system, or a socket that is closed."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = _TCP_INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    except OSError:
        return None
    return PeerNews(bool(info[_PROBES] or info[_UNACKED]), info[_LAST_ACK_RECV] / 1000)


class PeerWatch:
    """One connection's peer. While nothing is sent, the kernel's own keepalive probes watch it.

    Args:
        timeout_s: how long an answer of its kernel may be awaited.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._next_look_s = 0.0
        self._awaited_since_s: float | None = None

    def is_due(self, now_s: float) -> bool:
        """Whether to ask the kernel again."""
        return now_s >= self._next_look_s

    def has_vanished(self, news: PeerNews | None, now_s: float) -> bool:
        """Learn what the kernel says; whether its peer has been silent for too long."""
        self._next_look_s = now_s + self._timeout_s / _LOOKS_PER_TIMEOUT
        if news is None or not news.is_awaited:
            self._awaited_since_s = None
            return False
        # It may have acknowledged something since, and be awaited for what was sent after that.
        since_s = self._awaited_since_s if self._awaited_since_s is not None else now_s
        self._awaited_since_s = max(since_s, now_s - news.heard_ago_s)
        return now_s - self._awaited_since_s >= self._timeout_s
