"""What HTTP itself can get wrong: every answer is in the envelope and carries a request id, and the next request works."""

import asyncio
import gzip
import io
import json
import re
import threading
from typing import Any

import pytest

from pdserve.core.events import FinishReason
from services.frontend.strict_json import parse_body
from tests.contract.answering import answering
from tests.contract.documented import assert_envelope
from tests.fake_worker import MODEL
from tests.frontend_stack import Stack, frontend_with, ids_of, pair

BODY: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
JSON = {"Content-Type": "application/json"}
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


async def raw(stack: Stack, data: bytes, *, closes: bool = True) -> tuple[int, dict[str, str], bytes]:
    """Send bytes; the status, headers and body of the one answer. The server closes the connection if `closes`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.frontend.port)
    try:
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(5):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            status_line, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await reader.readexactly(int(headers["content-length"]))
            if closes:
                assert await reader.read() == b""
        return int(status_line.split()[1]), headers, body
    finally:
        writer.close()


async def post_long(stack: Stack, body: dict[str, Any]) -> tuple[int, Any]:
    """A completion whose body is megabytes long."""
    data = io.BytesIO(json.dumps(BODY | body).encode())
    async with stack.http.post(stack.url + "/v1/completions", data=data, headers=JSON) as response:
        return response.status, await response.json()


async def assert_works(stack: Stack) -> None:
    status, _ = await stack.post("/v1/completions", BODY)
    assert status == 200
    stack.assert_idle()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "data",
    [
        b"GET\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/9.9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: no\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64)),
    ],
    ids=[
        "no path",
        "nonsense",
        "version",
        "header",
        "long header",
        "long path",
        "length",
        "two lengths",
        "a TLS hello",
    ],
)
async def test_what_is_no_http_gets_the_envelope_and_the_connection_ends(data: bytes) -> None:
    async with frontend_with(*answering(ids_of("hi"))) as stack:
        status, headers, body = await raw(stack, data)
        assert_envelope(status, json.loads(body), "invalid_request")
        assert status == 400
        assert headers["content-type"].startswith("application/json")
        assert REQUEST_ID.fullmatch(headers["x-request-id"])
        await assert_works(stack)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        ({"Content-Type": "text/plain"}, b"{}", 415, "unsupported_media_type"),
        ({"Content-Type": "multipart/form-data; boundary=x"}, b"--x--", 415, "unsupported_media_type"),
        ({"Content-Type": "text/notjson"}, b"{}", 415, "unsupported_media_type"),
        (JSON, b"", 400, "invalid_request"),
        (JSON, b"{", 400, "invalid_request"),
        (JSON, b"[]", 400, "invalid_request"),
        (JSON, b'"x"', 400, "invalid_request"),
        (JSON, b"\xff\xfe", 400, "invalid_request"),
        (JSON, b'{"temperature": NaN}', 400, "invalid_request"),
        (JSON, b'{"temperature": Infinity}', 400, "invalid_request"),
        (JSON, b'{"temperature": 1e999}', 400, "invalid_request"),
        (JSON, b'{"prompt": "\\ud800"}', 400, "invalid_request"),
        (JSON, b'{"seed": ' + b"9" * 5000 + b"}", 400, "invalid_request"),
        (JSON, b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "invalid_request"),
        (JSON | {"Content-Encoding": "gzip"}, b"not gzip", 400, "invalid_request"),
        (JSON | {"Content-Encoding": "deflate"}, b"\x00\x01\x02", 400, "invalid_request"),
        (JSON | {"Expect": "a miracle"}, b"{}", 400, "invalid_request"),
        (JSON, b" " * 5000 + b"{}", 413, "body_too_large"),
        (JSON | {"Content-Encoding": "gzip"}, gzip.compress(b" " * 50_000), 413, "body_too_large"),
    ],
)
async def test_bodies_that_are_refused(headers: dict[str, str], body: bytes, status: int, code: str) -> None:
    limit_bytes = 4096 if status == 413 else 1 << 20
    async with frontend_with(*answering(ids_of("hi")), max_body_bytes=limit_bytes) as stack:
        async with stack.http.post(stack.url + "/v1/completions", data=body, headers=headers) as response:
            answer = await response.json()
            assert response.status == status, answer
            assert answer["error"]["code"] == code
            assert len(answer["error"]["message"]) < 500
            assert REQUEST_ID.fullmatch(response.headers["x-request-id"])
        await assert_works(stack)


@pytest.mark.asyncio
@pytest.mark.parametrize("media_type", ["application/json", "application/json; charset=utf-8", "application/x+json"])
async def test_json_by_any_of_its_names(media_type: str) -> None:
    async with frontend_with(*answering(ids_of("hi"))) as stack:
        headers = {"Content-Type": media_type, "Content-Encoding": "gzip"}
        data = gzip.compress(json.dumps(BODY).encode())
        async with stack.http.post(stack.url + "/v1/completions", data=data, headers=headers) as response:
            assert response.status == 200


@pytest.mark.asyncio
async def test_a_broken_chunked_body_is_refused() -> None:
    async with frontend_with(*answering(ids_of("hi"))) as stack:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        status, headers, body = await raw(stack, head + b"1\r\n{\r\nZZ\r\n")
        assert_envelope(status, json.loads(body), "invalid_request")
        assert status == 400
        assert headers["x-request-id"]
        await assert_works(stack)


@pytest.mark.asyncio
async def test_a_body_that_comes_too_slowly_is_a_408() -> None:
    async with frontend_with(*answering(ids_of("hi")), body_timeout_s=0.2) as stack:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n"
        )
        status, headers, body = await raw(stack, head + b"{", closes=False)
        assert_envelope(status, json.loads(body), "body_timeout")
        assert status == 408
        assert headers["connection"] == "close"
        assert headers["x-request-id"]
        await assert_works(stack)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("sent", "is_kept"),
    [
        ("mine-1.2_3", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("two words", False),
        ("", False),
        ("é", False),
        ("a/b", False),
        (None, False),
    ],
)
async def test_a_request_id_of_the_right_form_is_kept_and_any_other_replaced(sent: str | None, is_kept: bool) -> None:
    async with frontend_with(*answering(ids_of("hi"))) as stack:
        headers = {} if sent is None else {"x-request-id": sent}
        seen = set()
        for method, path, body in (
            ("POST", "/v1/completions", BODY),
            ("POST", "/v1/completions", BODY | {"stream": True}),
            ("POST", "/v1/completions", {}),
            ("GET", "/v1/models", None),
            ("GET", "/nowhere", None),
            ("PUT", "/health", None),
        ):
            async with stack.http.request(method, stack.url + path, json=body, headers=headers) as response:
                await response.read()
                seen.add(response.headers["x-request-id"])
        if is_kept:
            assert seen == {sent}
        else:
            assert len(seen) == 6
            assert all(REQUEST_ID.fullmatch(request_id) for request_id in seen)


@pytest.mark.asyncio
async def test_a_stream_has_its_headers_and_is_never_compressed() -> None:
    async with frontend_with(*answering(ids_of("hi"))) as stack:
        headers = {"Accept-Encoding": "gzip, deflate"}
        body = BODY | {"stream": True}
        async with stack.http.post(stack.url + "/v1/completions", json=body, headers=headers) as response:
            assert response.headers["Content-Type"] == "text/event-stream"
            assert response.headers["Cache-Control"] == "no-cache"
            assert response.headers["X-Accel-Buffering"] == "no"
            assert "Content-Encoding" not in response.headers


@pytest.mark.asyncio
async def test_a_client_that_waits_to_send_its_body_is_told_to() -> None:
    async with frontend_with(*answering(ids_of("hi"))) as stack:
        data = json.dumps(BODY).encode()
        async with stack.http.post(stack.url + "/v1/completions", data=data, headers=JSON, expect100=True) as response:
            assert response.status == 200


@pytest.mark.asyncio
async def test_long_bodies_are_parsed_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[int] = []

    def parse(body: bytes) -> dict[str, Any]:
        parsers.append(threading.get_ident())
        return parse_body(body)

    monkeypatch.setattr("services.frontend.intake.parse_body", parse)
    async with frontend_with(*answering(ids_of("hi"))) as stack:
        for padding in ("", " " * (64 << 10)):
            data = (padding + json.dumps(BODY)).encode()
            async with stack.http.post(stack.url + "/v1/completions", data=data, headers=JSON) as response:
                assert response.status == 200
    assert [parser == threading.get_ident() for parser in parsers] == [True, False]


@pytest.mark.asyncio
async def test_a_prompt_of_a_million_tokens_gets_through() -> None:
    prefill, decode = pair()
    async with frontend_with(prefill, decode, context_tokens=1_500_000) as stack:
        prompt = [7, 300, 12, 5] * 250_000
        request = asyncio.create_task(post_long(stack, {"prompt": prompt, "max_tokens": 1}))
        attempt = (await prefill.expect("run", timeout_s=30)).run.attempt
        assert prefill.prompts[attempt.group, attempt.attempt] == prompt
        prefill.tokens(attempt, ids_of("x")[:1], finish=FinishReason.LENGTH)
        status, body = await request
        assert status == 200
        assert body["usage"]["prompt_tokens"] == 1_000_000
        stack.assert_idle()


@pytest.mark.asyncio
async def test_a_prompt_beyond_the_context_is_refused_with_all_three_numbers() -> None:
    async with frontend_with(*pair()) as stack:
        status, body = await post_long(stack, {"prompt": [7] * 1_000_000, "max_tokens": 3})
        assert status == 400
        assert_envelope(status, body, "context_length_exceeded", "prompt")
        assert all(number in body["error"]["message"] for number in ("512", "1000000", "1000003"))
