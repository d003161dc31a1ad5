"""One question, and every way its answer can end, against a server that plays a script."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from pdserve.cli.generate import ask
from pdserve.core.errors import ErrorCode, PdserveError

pytestmark = pytest.mark.asyncio

Serve = Callable[..., Awaitable[str]]

USAGE = {"usage": {"prompt_tokens": 1, "completion_tokens": 2}}
CLOSING = "data: " + json.dumps({"choices": []} | USAGE) + "\n\ndata: [DONE]\n\n"


def chunk(content: str | None = None, finish: str | None = None) -> str:
    delta = {} if content is None else {"content": content}
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}) + "\n\n"


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server that answers each chat with this body; returns its URL. `asked` gathers the requests."""
    servers: list[TestServer] = []

    async def start(body: str, status: int = 200, asked: list[Any] | None = None) -> str:
        async def chat(request: web.Request) -> web.Response:
            if asked is not None:
                asked.append(await request.json())
            return web.Response(text=body, status=status)

        async def models(request: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": "tiny"}]})

        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", models)])
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return str(servers[-1].make_url(""))

    yield start
    for server in servers:
        await server.close()


async def answer_of(url: str, stream: bool, **body: Any) -> list[str]:
    return [text async for text in ask(url, "Hello", stream=stream, **body)]


async def test_a_streamed_answer_comes_piece_by_piece(serve: Serve) -> None:
    asked: list[Any] = []
    body = chunk("") + ": keepalive\n\n" + chunk("Pa") + chunk("ris") + chunk(finish="stop") + CLOSING
    assert await answer_of(await serve(body, asked=asked), stream=True, max_tokens=3) == ["Pa", "ris"]
    message = {"role": "user", "content": "Hello"}
    options = {"include_usage": True}
    assert asked == [
        {"model": "tiny", "messages": [message], "stream": True, "stream_options": options, "max_tokens": 3}
    ]


async def test_a_buffered_answer_comes_whole(serve: Serve) -> None:
    body = json.dumps({"choices": [{"message": {"content": "Paris"}, "finish_reason": "stop"}]} | USAGE)
    assert await answer_of(await serve(body), stream=False, model="tiny") == ["Paris"]


@pytest.mark.parametrize(
    "body",
    [
        chunk("Pa"),
        chunk("Pa") + chunk(finish="stop"),
        chunk("Pa") + CLOSING,
    ],
)
async def test_a_stream_without_finish_reason_and_done_is_cut(serve: Serve, body: str) -> None:
    with pytest.raises(PdserveError, match="the answer was cut"):
        await answer_of(await serve(body), stream=True)


async def test_an_error_in_the_stream_is_raised_with_its_code(serve: Serve) -> None:
    error = {"error": {"message": "no worker", "type": "service_unavailable", "param": None, "code": "worker_lost"}}
    with pytest.raises(PdserveError, match="no worker") as raised:
        await answer_of(await serve(chunk("Pa") + f"data: {json.dumps(error)}\n\n"), stream=True)
    assert raised.value.code is ErrorCode.worker_lost


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_is_raised_as_the_server_words_it(serve: Serve, stream: bool) -> None:
    error = {"error": {"message": "max_tokens must be at least 1", "code": "invalid_request"}}
    with pytest.raises(PdserveError, match="max_tokens must be at least 1") as raised:
        await answer_of(await serve(json.dumps(error), status=400), stream=stream)
    assert raised.value.code is ErrorCode.invalid_request


async def test_another_kind_of_server_is_named(serve: Serve) -> None:
    with pytest.raises(PdserveError, match=r"answers 502 .* check --url"):
        await answer_of(await serve("<html>", status=502), stream=False)


async def test_nobody_there_is_said_with_the_address(unused_tcp_port: int) -> None:
    with pytest.raises(PdserveError, match=rf"no whole answer from http://127.0.0.1:{unused_tcp_port} .*pdserve up"):
        await answer_of(f"http://127.0.0.1:{unused_tcp_port}", stream=True)
