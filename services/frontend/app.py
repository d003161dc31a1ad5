"""The HTTP application: routes, request ids, and errors in the API's envelope."""

import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import ceil
from uuid import uuid4

from aiohttp import web
from prometheus_client import CollectorRegistry

from pdserve.core.errors import ErrorCode, Fault, PdserveError
from pdserve.core.events import Role
from pdserve.core.version import VERSION
from pdserve.telemetry.metrics import CONTENT_TYPE, render
from services.frontend.admission import ServedModel
from services.frontend.generate import GenerateHandler
from services.frontend.membership import Membership
from services.frontend.responses import encode_json
from services.frontend.schemas import error_body

_REQUEST_ID = web.RequestKey("request_id", str)
_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_HTTP_CODES = {
    404: ErrorCode.not_found,
    405: ErrorCode.method_not_allowed,
    413: ErrorCode.body_too_large,
    415: ErrorCode.unsupported_media_type,
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_logger = logging.getLogger(__name__)


def make_app(
    generate: GenerateHandler, model: ServedModel, membership: Membership, registry: CollectorRegistry
) -> web.Application:
    """All routes of a frontend."""
    pages = Pages(generate, model, membership, registry)
    app = web.Application(middlewares=[_errors], client_max_size=generate.config.max_body_bytes)
    app.on_response_prepare.append(_add_request_id)
    app.add_routes(
        [
            web.post("/v1/chat/completions", generate.chat),
            web.post("/v1/completions", generate.completion),
            web.get("/v1/models", pages.models),
            web.get("/v1/models/{id}", pages.model),
            web.get("/health", pages.health),
            web.get("/ready", pages.ready),
            web.get("/metrics", pages.metrics),
            web.get("/version", pages.version),
        ]
    )
    return app


@dataclass(frozen=True, slots=True)
class Pages:
    """What can be read without generating anything."""

    generate: GenerateHandler
    served: ServedModel
    membership: Membership
    registry: CollectorRegistry

    async def models(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if name != self.served.name:
            raise PdserveError(
                ErrorCode.model_not_found,
                f"the model {name[:200]!r} is not served here; {self.served.name!r} is",
                param="model",
            )
        return _json(self._model_card())

    async def health(self, _: web.Request) -> web.Response:
        """The process is alive."""
        return _json({"status": "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        """A request that came now would be served."""
        ready = [worker for worker in self.membership if worker.ready]
        counts = {str(role): sum(worker.role is role for worker in ready) for role in Role}
        serves = all(counts.values()) or any(worker.colocated for worker in ready)
        if self.generate.stopping or not serves:
            status = "stopping" if self.generate.stopping else "waiting for workers"
            return _json({"status": status, "ready": counts}, status=503)
        return _json({"status": "ready", "ready": counts})

    async def metrics(self, _: web.Request) -> web.Response:
        self.generate.metrics.set_queue_depth(self.generate.admission.queue_depth)
        return web.Response(body=render(self.registry), headers={"Content-Type": CONTENT_TYPE})

    async def version(self, _: web.Request) -> web.Response:
        return _json({"version": VERSION})

    def _model_card(self) -> dict[str, object]:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self.served.created,
            "owned_by": "pdserve",
            "max_model_len": self.served.max_context_tokens,
        }


def error_response(error: PdserveError) -> web.Response:
    """An error with its own status."""
    headers = {}
    if error.retry_after_s is not None or error.spec.fault is Fault.CAPACITY:
        headers["Retry-After"] = str(max(1, ceil(error.retry_after_s or 0)))
    return _json(error_body(error), status=error.spec.http_status, headers=headers)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    client_id = request.headers.get("x-request-id", "")
    request[_REQUEST_ID] = client_id if _CLIENT_ID.fullmatch(client_id) else uuid4().hex
    try:
        return await handler(request)
    except PdserveError as error:
        if error.spec.http_status >= 500:
            _logger.warning("%s", error, extra={"request": request[_REQUEST_ID], "code": error.code.value})
        return error_response(error)
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
        return error_response(PdserveError(ErrorCode.internal, "the server failed; the error is in its log"))


async def _add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-request-id"] = request.get(_REQUEST_ID, "") or uuid4().hex


def _json(value: dict[str, object], status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=encode_json(value), status=status, headers=headers, content_type="application/json", charset="utf-8"
    )
