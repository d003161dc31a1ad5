"""What a connection to a frontend inherits from its listener."""

import socket

import pytest

from pdserve.config import FrontendConfig
from pdserve.core.errors import StartupError
from services.frontend.listener import open_listener


def accepted(config: FrontendConfig) -> socket.socket:
    with open_listener(config) as listener, socket.socket() as client:
        listener.listen()
        client.connect(listener.getsockname())
        listener.setblocking(True)
        connection, _ = listener.accept()
        return connection


def test_connections_have_small_send_buffers_and_probe_a_silent_peer() -> None:
    with accepted(FrontendConfig(port=0, send_buffer_bytes=8192, vanished_timeout_s=12)) as connection:
        # Linux doubles it, for its own bookkeeping.
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * 8192
        idle_s = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        interval_s = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        probes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        assert idle_s + interval_s * probes <= 12


def test_a_port_that_is_taken_is_said_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"port {port} .* is taken"):
            open_listener(FrontendConfig(port=port))


def test_an_address_of_another_machine_is_said_so() -> None:
    with pytest.raises(StartupError, match=r"frontend\.host"):
        open_listener(FrontendConfig(host="192.0.2.1", port=0))
