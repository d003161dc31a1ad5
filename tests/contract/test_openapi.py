"""The document at /openapi.json says what the server does: all of it, and nothing else."""

from collections.abc import Iterator
from typing import Any

import pytest

from services.frontend.openapi import OPERATIONS
from tests.contract.answering import answering
from tests.contract.documented import Documented, assert_envelope, documented
from tests.fake_worker import MODEL
from tests.frontend_stack import frontend_with, ids_of

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
COMPLETION: dict[str, Any] = {"prompt": "hello", "max_tokens": 20}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
VARIATIONS: list[tuple[str, dict[str, Any]]] = [
    (path, extra)
    for path, logprobs in (
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 3}),
        ("/v1/completions", {"logprobs": 3, "echo": False}),
    )
    for extra in (
        {},
        {"n": 2},
        {"return_token_ids": True, "n": 2},
        logprobs,
        logprobs | {"return_token_ids": True, "stop": "quick"},
    )
]
STREAM_OPTIONS = (
    None,
    {"include_usage": True},
    {"include_usage": True, "continuous_usage_stats": True, "include_timings": True},
)


@pytest.mark.asyncio
async def test_every_route_is_documented_and_every_documented_one_exists() -> None:
    prefill, decode = answering(ids_of("hi"))
    async with frontend_with(prefill, decode) as stack:
        document = (await documented(stack)).document
        described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
        assert described == {(operation.method, operation.path) for operation in OPERATIONS}
        for method, path in described:
            url = stack.url + path.replace("{id}", MODEL)
            async with stack.http.request(method, url, json={} if method == "POST" else None) as response:
                assert response.status in (200, 400), (method, path)


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "extra"), VARIATIONS)
async def test_bodies_and_events_are_as_documented(path: str, extra: dict[str, Any]) -> None:
    prefill, decode = answering(ids_of("The quick brown fox 😀"))
    async with frontend_with(prefill, decode) as stack:
        judge = await documented(stack)
        status, body = await stack.post(path, BODIES[path] | extra)
        assert status == 200
        judge.check_body("POST", path, status, body)
        for options in STREAM_OPTIONS:
            judge.check_events(path, await stack.stream(path, BODIES[path] | extra | {"stream_options": options}))


@pytest.mark.asyncio
async def test_pages_and_errors_are_as_documented() -> None:
    prefill, decode = answering(ids_of("hi"))
    async with frontend_with(prefill, decode) as stack:
        judge = await documented(stack)
        for path in ("/v1/models", "/v1/models/{id}", "/health", "/ready", "/version", "/openapi.json"):
            async with stack.http.get(stack.url + path.replace("{id}", MODEL)) as response:
                judge.check_body("GET", path, response.status, await response.json())
        for path in BODIES:
            status, body = await stack.post(path, {})
            assert status == 400
            judge.check_body("POST", path, status, body)
            status, body = await stack.post(path, BODIES[path] | {"model": "another"})
            assert status == 404
            judge.check_body("POST", path, status, body)


def _bounds(schema: Any) -> Iterator[tuple[str, float]]:
    for option in schema.get("anyOf", [schema]):
        for bound in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if bound in option:
                yield bound, option[bound]


def _judged(judge: Documented, path: str) -> list[tuple[str, str, float]]:
    properties = judge.request_schema(path)["properties"]
    return [(field, bound, limit) for field, schema in properties.items() for bound, limit in _bounds(schema)]


# What else a field at its bound needs to be accepted.
COMPANIONS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "best_of": {"n": 1},
}
# At the bound these ask for more than the tiny model's context, or depend on a setting.
BEYOND_THE_MODEL = {("max_tokens", "maximum"), ("max_completion_tokens", "maximum")}


@pytest.mark.asyncio
@pytest.mark.parametrize("path", BODIES)
async def test_documented_bounds_are_the_servers(path: str) -> None:
    prefill, decode = answering(ids_of("hi"))
    async with frontend_with(prefill, decode, max_logprobs=20) as stack:
        bounds = _judged(await documented(stack), path)
        assert len(bounds) > 20
        for field, bound, limit in bounds:
            step = -1 if "inimum" in bound else 1
            beyond = limit if bound.startswith("exclusive") else limit + step
            body = BODIES[path] | COMPANIONS.get(field, {})
            status, answer = await stack.post(path, body | {field: beyond})
            assert status == 400, (field, bound)
            assert answer["error"]["param"] == field
            if bound.startswith("exclusive") or (field, bound) in BEYOND_THE_MODEL:
                continue
            status, answer = await stack.post(path, body | {field: limit})
            assert status == 200, (field, bound, answer)


@pytest.mark.asyncio
async def test_unknown_paths_and_methods_are_in_the_envelope() -> None:
    prefill, decode = answering(ids_of("hi"))
    async with frontend_with(prefill, decode) as stack:
        async with stack.http.get(stack.url + "/v1/nothing") as response:
            assert response.status == 404
            assert_envelope(404, await response.json(), "not_found")
        async with stack.http.get(stack.url + "/v1/completions") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            assert_envelope(405, await response.json(), "method_not_allowed")
