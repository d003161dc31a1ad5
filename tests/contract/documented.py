"""The OpenAPI document of a running frontend, as the judge of what it sends."""

import json
from typing import Any

import jsonschema_rs

from tests.frontend_stack import Stack

ENVELOPE_KEYS = {"message", "type", "param", "code"}


class Documented:
    """Validates responses against `/openapi.json`."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def request_schema(self, path: str) -> dict[str, Any]:
        schema: dict[str, Any] = self._operation("POST", path)["requestBody"]["content"]["application/json"]["schema"]
        name = schema["$ref"].rpartition("/")[2]
        found: dict[str, Any] = self.document["components"]["schemas"][name]
        return found

    def check_body(self, method: str, path: str, status: int, body: Any) -> None:
        """Raises jsonschema_rs.ValidationError when the document promises something else."""
        response = self._operation(method, path)["responses"][str(status)]
        self._validate(response["content"]["application/json"]["schema"], body)

    def check_events(self, path: str, events: list[str]) -> None:
        """The events of a stream that ended in order."""
        assert events[-1] == "[DONE]"
        for event in events[:-1]:
            self._validate(self._operation("POST", path)["responses"]["200"]["x-event-schema"], json.loads(event))

    def _operation(self, method: str, path: str) -> dict[str, Any]:
        found: dict[str, Any] = self.document["paths"][path][method.lower()]
        return found

    def _validate(self, schema: dict[str, Any], value: Any) -> None:
        jsonschema_rs.validate(schema | {"components": self.document["components"]}, value)


async def documented(stack: Stack) -> Documented:
    async with stack.http.get(stack.url + "/openapi.json") as response:
        assert response.status == 200
        return Documented(await response.json())


def assert_envelope(status: int, body: Any, code: str, param: str | None = None) -> None:
    """An error of this code in the API's envelope."""
    assert set(body) == {"error"}, body
    error = body["error"]
    assert set(error) == ENVELOPE_KEYS
    assert (error["code"], error["param"]) == (code, param), error
    assert status >= 400
    assert error["message"]
    assert error["type"]
