"""The OpenAPI document, made from the types that requests are parsed into and responses are built as."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from pdserve.core.errors import ERROR_TABLE, ErrorCode, Fault
from pdserve.core.version import VERSION
from services.frontend.bodies import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    Detokenized,
    ErrorEnvelope,
    Health,
    ModelCard,
    ModelList,
    Readiness,
    Tokenized,
    Version,
)
from services.frontend.schemas import ChatBody, CompletionBody
from services.frontend.tokenize import DetokenizeBody, TokenizeBody

REQUEST_ID_PATTERN = "[A-Za-z0-9._-]{1,128}"
_REFERENCE = "#/components/schemas/{model}"
_BODY_ERRORS = (
    ErrorCode.invalid_request,
    ErrorCode.model_not_found,
    ErrorCode.body_timeout,
    ErrorCode.body_too_large,
    ErrorCode.unsupported_media_type,
    ErrorCode.queue_full,
    ErrorCode.internal,
)
_REQUEST_ID = {
    "description": "The client's own id if it has this form, else a new one.",
    "schema": {"type": "string", "pattern": f"^{REQUEST_ID_PATTERN}$"},
}
_RETRY_AFTER = {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One route.

    Attributes:
        name: of its handler, and the document's operationId.
        body: what a request is parsed into.
        answers: the type of a JSON body, by status.
        events: the type of a stream's events.
        text: media type of a body that is no JSON.
        errors: what may go wrong.
    """

    method: Literal["GET", "POST"]
    path: str
    name: str
    summary: str
    body: type[Any] | None = None
    answers: Mapping[int, Any]
    events: Any = None
    text: str | None = None
    errors: tuple[ErrorCode, ...] = ()


_GENERATE_ERRORS = (*_BODY_ERRORS, ErrorCode.total_timeout)

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        name="chat",
        summary="Answer a conversation.",
        body=ChatBody,
        answers={200: ChatCompletion},
        events=ChatChunk,
        errors=_GENERATE_ERRORS,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        name="completion",
        summary="Continue prompts.",
        body=CompletionBody,
        answers={200: Completion},
        events=CompletionChunk,
        errors=_GENERATE_ERRORS,
    ),
    Operation(
        method="POST",
        path="/tokenize",
        name="tokenize",
        summary="The token ids of a prompt or a conversation.",
        body=TokenizeBody,
        answers={200: Tokenized},
        errors=_BODY_ERRORS,
    ),
    Operation(
        method="POST",
        path="/detokenize",
        name="detokenize",
        summary="The text of token ids.",
        body=DetokenizeBody,
        answers={200: Detokenized},
        errors=_BODY_ERRORS,
    ),
    Operation(method="GET", path="/v1/models", name="models", summary="What is served.", answers={200: ModelList}),
    Operation(
        method="GET",
        path="/v1/models/{id}",
        name="model",
        summary="One model.",
        answers={200: ModelCard},
        errors=(ErrorCode.model_not_found,),
    ),
    Operation(method="GET", path="/health", name="health", summary="The process is alive.", answers={200: Health}),
    Operation(
        method="GET",
        path="/ready",
        name="ready",
        summary="A request that came now would be served.",
        answers={200: Readiness, 503: Readiness},
    ),
    Operation(
        method="GET", path="/metrics", name="metrics", summary="Prometheus's metrics.", answers={}, text="text/plain"
    ),
    Operation(method="GET", path="/version", name="version", summary="The version.", answers={200: Version}),
    Operation(method="GET", path="/openapi.json", name="openapi", summary="This document.", answers={200: Json}),
)


def make_document(model: str) -> Json:
    """The OpenAPI 3.1 document of a frontend that serves this model."""
    schemas = _Schemas(
        [
            kind
            for operation in OPERATIONS
            for kind in (operation.body, *operation.answers.values(), operation.events, ErrorEnvelope)
            if kind is not None
        ]
    )
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _describe(operation, schemas, model)
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": VERSION},
        "paths": paths,
        "components": {"schemas": schemas.definitions},
    }


class _Schemas:
    """The JSON schemas of types, each defined once."""

    def __init__(self, kinds: Iterable[Any]) -> None:
        self._kinds = list(kinds)
        found, shared = TypeAdapter.json_schemas(
            [(index, "validation", TypeAdapter(kind)) for index, kind in enumerate(self._kinds)],
            ref_template=_REFERENCE,
        )
        self.definitions: Json = shared.get("$defs", {})
        self._found = found

    def of(self, kind: Any) -> Json:
        return dict(self._found[(self._kinds.index(kind), "validation")])


def _describe(operation: Operation, schemas: _Schemas, model: str) -> Json:
    parameters: list[Json] = [{"name": "x-request-id", "in": "header", "schema": {"type": "string"}}]
    if "{id}" in operation.path:
        parameters.append(
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}, "example": model}
        )
    described: Json = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": parameters,
        "responses": _responses(operation, schemas),
    }
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas.of(operation.body)}},
        }
    return described


def _responses(operation: Operation, schemas: _Schemas) -> Json:
    responses = {
        str(status): _response("As asked for.", {"application/json": {"schema": schemas.of(kind)}})
        for status, kind in operation.answers.items()
    }
    if operation.events is not None:
        # What an event's data is has no place of its own in OpenAPI 3.1.
        responses["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
        responses["200"]["x-event-schema"] = schemas.of(operation.events)
    if operation.text is not None:
        responses["200"] = _response("As asked for.", {operation.text: {"schema": {"type": "string"}}})
    envelope = {"application/json": {"schema": schemas.of(ErrorEnvelope)}}
    for status in sorted({ERROR_TABLE[code].http_status for code in operation.errors}):
        codes = [code for code, spec in ERROR_TABLE.items() if spec.http_status == status]
        error = _response(", ".join(codes), envelope)
        if any(ERROR_TABLE[code].fault is Fault.CAPACITY for code in codes):
            error["headers"]["Retry-After"] = _RETRY_AFTER
        responses[str(status)] = error
    return responses


def _response(description: str, content: Json) -> Json:
    return {"description": description, "headers": {"x-request-id": _REQUEST_ID}, "content": content}
