"""The grpc.aio server and channels of every process.

Exactly one event loop of a process may touch grpc.aio.
"""

import asyncio
import errno
import socket
from collections.abc import Callable
from functools import cache
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.core.errors import StartupError

# A message stays under 1 MiB and a frame is about that, so this is never reached by a peer that keeps the rules.
_MESSAGE_BYTES = 4 << 20

_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    *_OPTIONS,
    # Channels to one address would share one connection otherwise, and one flow-control window.
    ("grpc.use_local_subchannel_pool", 1),
    # Workers are reached directly, whatever proxy the environment names.
    ("grpc.enable_http_proxy", 0),
    # A worker that comes back is reached again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    *_OPTIONS,
    # Two processes on one port would each get some of the connections; a busy port has to be an error.
    ("grpc.so_reuseport", 0),
    # Clients ping an idle connection more often than gRPC lets them by default.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


def dial(address: str) -> grpc.aio.Channel:
    """A channel of its own connection to host:port. Connects when it is first used."""
    _keep_polling()
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


@cache
def _keep_polling() -> None:
    """Hold on to grpc.aio's one poller thread: with the last channel it would be stopped and joined, on the loop."""
    grpc.aio.init_grpc_aio()


class GrpcServer:
    """A server with health service and reflection. Not serving, to health checks, until `set_serving(True)`."""

    def __init__(self) -> None:
        self._services: list[tuple[str, Callable[[Any, grpc.aio.Server], None], Any]] = []
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    def add(self, service_name: str, adder: Callable[[Any, grpc.aio.Server], None], servicer: Any) -> None:
        """Serve `servicer` from the start on.

        Args:
            service_name: full name, as in the proto: "pdserve.rpc.v1.AdminService".
            adder: the generated add_…_to_server.
        """
        self._services.append((service_name, adder, servicer))

    async def start(self, host: str, port: int) -> int:
        """Listen on this address; 0 takes a free port.

        Returns: the port.
        Raises:
            StartupError: the address cannot be listened on; says what to do.
        """
        server = grpc.aio.server(options=SERVER_OPTIONS)
        for _, adder, servicer in self._services:
            adder(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            [name for name, _, _ in self._services] + [health.SERVICE_NAME, reflection.SERVICE_NAME], server
        )
        await self.set_serving(False)
        # gRPC says only that it could not listen, and that on stderr.
        await asyncio.to_thread(_check_listens, host, port)
        try:
            bound_port = server.add_insecure_port(format_address(host, port))
        except RuntimeError as error:
            raise StartupError(f"cannot listen on {format_address(host, port)}: {error}") from None
        await server.start()
        self._server = server
        return bound_port

    async def set_serving(self, serving: bool) -> None:
        """What health checks are told, for the server ("") and each of its services. Without effect after `stop`."""
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if serving else statuses.NOT_SERVING
        for name in ["", *(name for name, _, _ in self._services)]:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls; those that haven't ended after `grace_s` are cut off. Legal at any time."""
        await self._health.enter_graceful_shutdown()
        if self._server is not None:
            await self._server.stop(grace_s)


def format_address(host: str, port: int) -> str:
    """host:port, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_listens(host: str, port: int) -> None:
    """
    Raises:
        StartupError: nothing can listen there now; says what to do.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                message = (
                    f"port {port} on {host} is taken: stop what listens there, or set another port (0 is any free one)"
                )
            else:
                message = f"cannot listen on {format_address(host, port)}: {error.strerror}; check the host setting"
            raise StartupError(message) from None
