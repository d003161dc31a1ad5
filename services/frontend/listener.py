"""The socket that a frontend listens on; its connections inherit what is set on it."""

import errno
import resource
import socket

from pdserve.config import FrontendConfig
from pdserve.core.errors import StartupError

_KEEPALIVE_PROBES = 4


def open_listener(config: FrontendConfig) -> socket.socket:
    """A socket for `frontend.host` and `frontend.port`, not listening yet.

    Its connections have send buffers of `send_buffer_bytes`: a reader that has stopped is to be noticed by its stream,
    and not to fill this machine's memory. They break when their peer has been away for `vanished_timeout_s` and nothing
    is being sent to it (keepalive probes, in whole seconds); see `PeerWatch` for what is being sent.

    Raises:
        StartupError: the port is taken, or the address is none of this machine's.
    """
    host, port = config.host, config.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.send_buffer_bytes)
        for option, value in _keepalive_options(config.vanished_timeout_s).items():
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.bind((host, port))
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"port {port} on {host} is taken: stop what listens there, or set frontend.port"
            ) from None
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}; check frontend.host") from None
    return listener


def raise_file_limit() -> None:
    """Let this process have as many open files as it may: every stream is one, and shells often allow 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _keepalive_options(timeout_s: float) -> dict[int, int]:
    values = {
        "TCP_KEEPIDLE": max(1, int(timeout_s / 3)),
        "TCP_KEEPINTVL": max(1, int(timeout_s / 3 / _KEEPALIVE_PROBES)),
        "TCP_KEEPCNT": _KEEPALIVE_PROBES,
    }
    # Not every system has all of them.
    return {getattr(socket, name): value for name, value in values.items() if hasattr(socket, name)}
