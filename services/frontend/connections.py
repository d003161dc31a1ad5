"""Connections on which something comes that is not HTTP: an answer in the API's envelope, then the end."""

import asyncio
import logging
import socket
from typing import Any
from uuid import uuid4

from aiohttp import web

from pdserve.core.errors import ErrorCode, PdserveError, internal_error
from services.frontend.bodies import error_body
from services.frontend.responses import json_response

_ECHO_CHARACTERS = 200

_logger = logging.getLogger(__name__)


class Connection(web.RequestHandler):
    """One connection. What aiohttp refuses before there is a request is answered here."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """See RequestHandler. `status` is 400 for malformed HTTP, and 500 for a defect."""
        if status < 500:
            reason = " ".join((message or "").split())[:_ECHO_CHARACTERS]
            _logger.info("a connection from %s brought no HTTP: %s", request.remote, reason)
            error = PdserveError(ErrorCode.invalid_request, f"this is not a valid HTTP request: {reason}")
        else:
            _logger.error("a connection failed", exc_info=exc)
            error = internal_error()
        if request.writer.output_size > 0:
            raise ConnectionError("a response had begun")
        headers = {"x-request-id": uuid4().hex}
        response = json_response(error_body(error), status=error.spec.http_status, headers=headers)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """See RequestHandler. A body that cannot be read was answered; that its rest cannot either is no defect."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kwargs)


async def send_whole(request: web.Request, response: web.Response) -> None:
    """Send a response until the kernel has taken its last byte; aiohttp would return with some of it in this process."""
    if request.transport is not None:
        request.transport.set_write_buffer_limits(high=0)
    await response.prepare(request)
    await response.write_eof()


class Site(web.BaseSite):
    """Takes connections from a listening socket.

    Args:
        keepalive_s: how long one may be open without a request whose head is whole.
    """

    def __init__(self, runner: web.AppRunner, listener: socket.socket, backlog: int, keepalive_s: float) -> None:
        super().__init__(runner, backlog=backlog)
        self._listener = listener
        self._keepalive_s = keepalive_s

    @property
    def name(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://{host}:{port}"

    async def start(self) -> None:
        await super().start()
        self._server = await asyncio.get_running_loop().create_server(
            self._connect, sock=self._listener, backlog=self._backlog
        )

    def _connect(self) -> Connection:
        server = self._runner.server
        if server is None:
            raise RuntimeError("the site outlives its runner")
        # None is aiohttp's own word for no access log.
        return Connection(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=self._keepalive_s,
        )
