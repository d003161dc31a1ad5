"""The HTTP application: routes, request ids, and errors in the API's envelope."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from math import ceil
from uuid import uuid4

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Middleware

from pdserve.config import FrontendConfig
from pdserve.core.errors import ErrorCode, Fault, PdserveError, internal_error
from services.frontend.bodies import error_body
from services.frontend.connections import send_whole
from services.frontend.generate import GenerateHandler
from services.frontend.openapi import OPERATIONS, REQUEST_ID_PATTERN, make_document
from services.frontend.pages import Pages
from services.frontend.responses import json_response
from services.frontend.tokenize import TokenizeHandler

_REQUEST_ID = web.RequestKey("request_id", str)
_CLIENT_ID = re.compile(REQUEST_ID_PATTERN)
_HTTP_CODES = {
    404: ErrorCode.not_found,
    405: ErrorCode.method_not_allowed,
    413: ErrorCode.body_too_large,
    415: ErrorCode.unsupported_media_type,
}
# After a body that is late nobody knows where a next request would begin; a server that stops takes none.
_LAST_WORDS = frozenset({ErrorCode.body_timeout, ErrorCode.shutting_down})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_logger = logging.getLogger(__name__)


def make_app(
    generate: GenerateHandler, tokenize: TokenizeHandler, pages: Pages, config: FrontendConfig
) -> web.Application:
    """All routes of a frontend: those of the OpenAPI document, and no others."""
    document = make_document(pages.served.name)

    async def openapi(_: web.Request) -> web.Response:
        return json_response(document)

    handlers: dict[str, Handler] = {
        "chat": generate.chat,
        "completion": generate.completion,
        "tokenize": tokenize.tokenize,
        "detokenize": tokenize.detokenize,
        "models": pages.models,
        "model": pages.model,
        "health": pages.health,
        "ready": pages.ready,
        "metrics": pages.metrics,
        "version": pages.version,
        "openapi": openapi,
    }
    app = web.Application(
        middlewares=[_deliver_within(config.body_timeout_s), _errors], client_max_size=config.max_body_bytes
    )
    app.on_response_prepare.append(_add_request_id)
    for operation in OPERATIONS:
        handler = handlers[operation.name]
        if operation.method == "GET":
            app.router.add_get(operation.path, handler)
        else:
            app.router.add_post(operation.path, handler, expect_handler=_expect)
    return app


def error_response(error: PdserveError) -> web.Response:
    """An error with its own status."""
    headers = {}
    if error.retry_after_s is not None or error.spec.fault is Fault.CAPACITY:
        headers["Retry-After"] = str(max(1, ceil(error.retry_after_s or 0)))
    return json_response(error_body(error), status=error.spec.http_status, headers=headers)


def _deliver_within(timeout_s: float) -> Middleware:
    """A client that does not take a whole response in time is gone. (Generated answers have deadlines of their own.)"""

    @web.middleware
    async def deliver(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        if isinstance(response, web.Response) and not response.prepared:
            try:
                async with asyncio.timeout(timeout_s):
                    await send_whole(request, response)
            except TimeoutError:
                _logger.info("a client is given up: it did not take a response within %g s", timeout_s)
                if request.transport is not None:
                    request.transport.abort()
        return response

    return deliver


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    client_id = request.headers.get("x-request-id", "")
    request[_REQUEST_ID] = client_id if _CLIENT_ID.fullmatch(client_id) else uuid4().hex
    try:
        return await handler(request)
    except PdserveError as error:
        if error.spec.http_status >= 500:
            _logger.warning("%s", error, extra={"request": request[_REQUEST_ID], "code": error.code.value})
        response = error_response(error)
        if error.code in _LAST_WORDS or request.content.exception() is not None:
            response.force_close()
        return response
    except web.HTTPException as error:
        allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        code = _HTTP_CODES.get(error.status, ErrorCode.invalid_request)
        response = error_response(PdserveError(code, f"{request.method} {request.path[:200]}: {error.reason}"))
        response.headers.update(allowed)
        return response
    except ConnectionError:
        # The client is gone, and with it whoever would read a response.
        return error_response(PdserveError(ErrorCode.client_gone, "the client left"))
    except Exception:
        _logger.exception("a request failed", extra={"request": request[_REQUEST_ID]})
        return error_response(internal_error())


async def _add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-request-id"] = request.get(_REQUEST_ID, "") or uuid4().hex


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """A client that waits to be told to send its body is told; another expectation is not understood."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        return error_response(PdserveError(ErrorCode.invalid_request, "the header Expect may only be 100-continue"))
    if request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # The response itself has not begun.
        request.writer.output_size = 0
    return None
