"""One question, and every way its answer can end, against a server that plays a script."""

import argparse
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from pdserve.cli.commands import make_parser
from pdserve.cli.generate import DEFAULT_MAX_TOKENS, ask, run_generate
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
    """Starts a server that answers each chat with this body; returns its URL. `asked` gathers the requests.

    `context_tokens` is all that the server has room for.
    """
    servers: list[TestServer] = []

    async def start(
        body: str, status: int = 200, asked: list[Any] | None = None, context_tokens: int | None = None
    ) -> str:
        async def chat(request: web.Request) -> web.Response:
            question = await request.json()
            if asked is not None:
                asked.append(question)
            if context_tokens is not None and question.get("max_tokens", 0) > context_tokens:
                error = {"message": "too long", "code": "context_length_exceeded"}
                return web.json_response({"error": error}, status=400)
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


# Parsed here, before any event loop runs: argparse looks for translations on disk.
TYPED = make_parser().parse_args(["generate", "Hello"])


async def answer_of(url: str, stream: bool, **body: Any) -> list[str]:
    return [piece.text async for piece in ask(url, "Hello", stream=stream, **body)]


async def run(url: str, **options: Any) -> int:
    return await run_generate(argparse.Namespace(**vars(TYPED) | {"url": url} | options))


async def test_a_streamed_answer_comes_piece_by_piece(serve: Serve) -> None:
    asked: list[Any] = []
    body = chunk("") + ": keepalive\n\n" + chunk("Pa") + chunk("ris") + chunk(finish="stop") + CLOSING
    assert await answer_of(await serve(body, asked=asked), stream=True, max_tokens=3) == ["Pa", "ris", ""]
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
    with pytest.raises(PdserveError, match=r"answers 502 .* check the URL"):
        await answer_of(await serve("<html>", status=502), stream=False)


async def test_nobody_there_is_said_with_the_address(unused_tcp_port: int) -> None:
    with pytest.raises(PdserveError, match=rf"no connection to http://127.0.0.1:{unused_tcp_port} .*pdserve up"):
        await answer_of(f"http://127.0.0.1:{unused_tcp_port}", stream=True)


WHOLE = json.dumps({"choices": [{"message": {"content": "Paris"}, "finish_reason": "stop"}]} | USAGE)


async def test_an_answer_is_streamed_unless_it_is_wanted_whole(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    url = await serve(chunk("Pa") + chunk("ris") + chunk(finish="stop") + CLOSING, asked=asked)
    assert await run(url) == 0
    assert await run(await serve(WHOLE, asked=asked), stream=False) == 0
    assert capsys.readouterr().out == "Paris\n" * 2
    assert [question["stream"] for question in asked] == [True, False]
    assert {question["max_tokens"] for question in asked} == {DEFAULT_MAX_TOKENS}


async def test_an_answer_that_the_default_limit_ends_says_so(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    url = await serve(chunk("Pa") + chunk(finish="length") + CLOSING)
    assert await run(url) == 0
    assert capsys.readouterr() == (
        "Pa\n",
        f"pdserve: the answer stops here: it has {DEFAULT_MAX_TOKENS} tokens; --max-tokens N allows more\n",
    )
    assert await run(url, max_tokens=1) == 0
    assert capsys.readouterr() == ("Pa\n", "")


async def test_where_the_context_leaves_less_than_the_default_limit_it_is_the_limit(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    url = await serve(chunk("Pa") + chunk(finish="length") + CLOSING, asked=asked, context_tokens=100)
    assert await run(url) == 0
    assert capsys.readouterr() == ("Pa\n", "pdserve: the answer stops here: the model's context is full\n")
    assert [question.get("max_tokens") for question in asked] == [DEFAULT_MAX_TOKENS, None]
    with pytest.raises(PdserveError, match="too long"):
        await run(url, max_tokens=101)


async def test_a_failure_begins_on_a_line_of_its_own(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PdserveError, match="the answer was cut"):
        await run(await serve(chunk("Pa")))
    assert capsys.readouterr().out == "Pa\n"
