"""What both clients ask, return, raise and try again, against a server in memory."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from pdserve.client.answers import Answer, Usage
from pdserve.client.async_client import AsyncClient
from pdserve.client.errors import (
    BadResponse,
    IdleTimeout,
    NoConnection,
    Overloaded,
    RequestRefused,
    ServerFailed,
    TruncatedStream,
    UsageMismatch,
)
from pdserve.client.policy import Retries, Timeouts
from pdserve.client.sync_client import Client
from tests.unit.client.recordings import (
    DONE,
    ERROR,
    KEEPALIVE,
    NO_RETRIES,
    ONE_CHAT,
    TWO_CHATS,
    Script,
    async_client,
    chat,
    event,
    in_pieces,
    stream_of,
    sync_client,
    usage,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.parametrize("kind", ["sync", "async"])]

AT_ONCE = Retries(count=2, base_s=0.0)


OPTIONS = ("retries", "timeouts", "api_key")
VERBS = {
    ("chat", True): "stream_chat",
    ("chat", False): "chat",
    ("complete", True): "stream_completion",
    ("complete", False): "complete",
}


async def ask(
    kind: str, script: Script, *, stream: bool = True, verb: str = "chat", asked: Any = "Hello", **fields: Any
) -> Answer:
    """One answer, read to its end."""
    options = {name: fields.pop(name) for name in OPTIONS if name in fields}
    name = VERBS[verb, stream]
    if kind == "sync":
        return await asyncio.to_thread(ask_sync, sync_client(script, **options), name, stream, asked, fields)
    answer: Answer
    async with async_client(script, **options) as client:
        if not stream:
            answer = await getattr(client, name)(asked, **fields)
            return answer
        async with getattr(client, name)(asked, **fields) as events:
            answer = await events.read_all()
            return answer


def ask_sync(client: Client, name: str, stream: bool, asked: Any, fields: dict[str, Any]) -> Answer:
    answer: Answer
    with client:
        if not stream:
            answer = getattr(client, name)(asked, **fields)
            return answer
        with getattr(client, name)(asked, **fields) as events:
            answer = events.read_all()
            return answer


def json_of(body: Any, status: int = 200, **headers: str) -> Callable[[], httpx.Response]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda: httpx.Response(status, json=body, headers=named)


def whole_chat(**changes: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"content": "Paris"}, "finish_reason": "stop", "token_ids": [5, 6]}
    return {"id": "r-1", "model": "tiny", "choices": [choice | changes], **usage(2)}


async def test_streamed_and_whole_answers_are_of_one_kind(kind: str) -> None:
    def with_id() -> httpx.Response:
        response = stream_of(ONE_CHAT)
        response.headers["x-request-id"] = "q-1"
        return response

    streamed = await ask(kind, Script([with_id]))
    whole = await ask(kind, Script([json_of(whole_chat(token_ids=None), x_request_id="q-1")]), stream=False)
    assert (streamed.text, streamed.usage, streamed.request_id) == (whole.text, whole.usage, whole.request_id)
    assert streamed.usage == Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=2)
    assert streamed.choices == whole.choices


async def test_deltas_come_in_the_servers_order(kind: str) -> None:
    script, seen = Script([lambda: stream_of(TWO_CHATS)]), []
    if kind == "sync":
        with sync_client(script) as client, client.stream_chat("Hello", n=2) as events:
            seen = [(delta.index, delta.text) for delta in events if delta.text]
    else:
        async with async_client(script) as other, other.stream_chat("Hello", n=2) as parts:
            seen = [(delta.index, delta.text) async for delta in parts if delta.text]
    assert seen == [(0, "Pa"), (1, "Ly\u2028on \U0001f600"), (0, "ris")]


async def test_usage_is_always_asked_for_and_the_first_model_is_the_default(kind: str) -> None:
    script = Script([lambda: stream_of(ONE_CHAT), json_of(whole_chat())])
    await ask(kind, script, max_tokens=3, stream_options={"include_timings": True})
    await ask(kind, script, stream=False, model="other")
    message = [{"role": "user", "content": "Hello"}]
    options = {"include_timings": True, "include_usage": True}
    assert script.asked == [
        {"model": "tiny", "messages": message, "max_tokens": 3, "stream": True, "stream_options": options},
        {"model": "other", "messages": message, "stream": False},
    ]


async def test_each_of_several_prompts_has_its_answers(kind: str) -> None:
    choice = {"text": "x", "finish_reason": "length"}
    body = {"choices": [choice | {"index": index} for index in range(4)], **usage(4)}
    answer = await ask(kind, Script([json_of(body)]), stream=False, verb="complete", asked=[[1, 2], [3]], n=2)
    assert [part.index for part in answer.choices] == [0, 1, 2, 3]
    with pytest.raises(TruncatedStream):
        await ask(kind, Script([json_of(body)]), stream=False, verb="complete", asked=[[1], [2], [3]], n=2)


async def test_an_answer_without_usage_is_not_trusted(kind: str) -> None:
    with pytest.raises(UsageMismatch) as raised:
        await ask(kind, Script([lambda: stream_of(ONE_CHAT.replace(event(**usage(2)), b""))]))
    assert raised.value.answer is not None
    assert raised.value.answer.text == "Paris"


@pytest.mark.parametrize("stream", [True, False])
async def test_with_token_ids_the_count_is_checked(kind: str, stream: bool) -> None:
    def body(count: int) -> Callable[[], httpx.Response]:
        events = (
            event([chat("Pa", ids=[5])]) + event([chat("ris", finish="stop", ids=[6])]) + event(**usage(count)) + DONE
        )
        return (lambda: stream_of(events)) if stream else json_of(whole_chat() | usage(count))

    answer = await ask(kind, Script([body(2)]), stream=stream, return_token_ids=True)
    assert answer.choices[0].token_ids == (5, 6)
    with pytest.raises(UsageMismatch, match="2 tokens came, and the server counted 3"):
        await ask(kind, Script([body(3)]), stream=stream, return_token_ids=True)


async def test_logprobs_of_a_stream_are_those_of_the_whole(kind: str) -> None:
    parts = [
        chat("Pa") | {"logprobs": {"content": [{"token": "Pa"}], "refusal": None}},
        chat("ris", finish="stop") | {"logprobs": {"content": [{"token": "ris"}], "refusal": None}},
    ]
    body = b"".join(event([part]) for part in parts) + event(**usage(2)) + DONE
    answer = await ask(kind, Script([lambda: stream_of(body)]))
    assert answer.choices[0].logprobs == {"content": [{"token": "Pa"}, {"token": "ris"}], "refusal": None}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_is_raised_in_the_servers_words_and_not_tried_again(kind: str, stream: bool) -> None:
    error = {
        "message": "n must be at least 1",
        "type": "invalid_request_error",
        "param": "n",
        "code": "invalid_request",
    }
    script = Script([json_of({"error": error}, 400, x_request_id="q-1")])
    with pytest.raises(RequestRefused, match="n must be at least 1") as raised:
        await ask(kind, script, stream=stream)
    refusal = raised.value
    assert (refusal.code, refusal.param, refusal.status, refusal.request_id) == ("invalid_request", "n", 400, "q-1")
    assert len(script.asked) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_is_asked_again(kind: str, stream: bool, status: int) -> None:
    busy = json_of({"error": {"message": "full", "code": "queue_full"}}, status, retry_after="0")
    script = Script([busy, busy, (lambda: stream_of(ONE_CHAT)) if stream else json_of(whole_chat())])
    assert (await ask(kind, script, stream=stream, retries=AT_ONCE)).text == "Paris"
    assert len(script.asked) == 3


@pytest.mark.parametrize(
    ("headers", "tries"), [({}, 3), ({"x_should_retry": "false"}, 1), ({"retry_after": "3600"}, 1)]
)
async def test_it_gives_up_after_so_many_tries_or_when_told(kind: str, headers: dict[str, str], tries: int) -> None:
    script = Script([json_of({"error": {"message": "full", "code": "queue_full"}}, 503, **headers)])
    with pytest.raises(Overloaded) as raised:
        await ask(kind, script, retries=AT_ONCE)
    assert len(script.asked) == tries
    assert raised.value.retry_after_s == (3600.0 if "retry_after" in headers else None)


async def test_nobody_there_is_asked_again_and_then_said(kind: str) -> None:
    def refuse() -> httpx.Response:
        raise httpx.ConnectError("refused")

    assert (await ask(kind, Script([refuse, lambda: stream_of(ONE_CHAT)]), retries=AT_ONCE)).text == "Paris"
    script = Script([refuse])
    with pytest.raises(NoConnection):
        await ask(kind, script, retries=AT_ONCE)
    assert len(script.asked) == 3


async def test_what_broke_after_it_was_asked_is_not_asked_again(kind: str) -> None:
    def broken() -> httpx.Response:
        return httpx.Response(200, stream=in_pieces(KEEPALIVE, 64, httpx.ReadError("reset")))

    def gone() -> httpx.Response:
        raise httpx.RemoteProtocolError("Server disconnected without sending a response.")

    for answer in (broken, gone):
        script = Script([answer])
        with pytest.raises(TruncatedStream):
            await ask(kind, script, retries=AT_ONCE)
        assert len(script.asked) == 1


async def test_a_failure_in_the_stream_is_not_asked_again(kind: str) -> None:
    script = Script(
        [lambda: stream_of(event([chat("Pa")]) + b"data: " + json.dumps({"error": ERROR}).encode() + b"\n\n")]
    )
    with pytest.raises(ServerFailed) as raised:
        await ask(kind, script, retries=AT_ONCE)
    assert raised.value.code == "worker_lost"
    assert raised.value.answer is not None
    assert raised.value.answer.text == "Pa"
    assert len(script.asked) == 1


@pytest.mark.parametrize("data", ["nonsense", "[]", "{}", '{"choices": 1}', '{"choices": [], "usage": {"a": 1}}'])
async def test_damage_is_named(kind: str, data: str) -> None:
    with pytest.raises(BadResponse, match="not OpenAI's API"):
        await ask(kind, Script([lambda: stream_of(f"data: {data}\n\n".encode())]))
    with pytest.raises(BadResponse, match="not OpenAI's API"):
        await ask(kind, Script([lambda: httpx.Response(200, content=data)]), stream=False)


async def test_a_url_may_have_the_apis_path(kind: str) -> None:
    clients = {"sync": Client, "async": AsyncClient}
    assert {clients[kind](f"http://h:1{end}").url for end in ("", "/", "/v1", "/v1/")} == {"http://h:1"}


async def test_the_key_is_sent(kind: str) -> None:
    seen = []

    class Watching(Script):
        def __call__(self, request: httpx.Request) -> httpx.Response:
            seen.append(request.headers.get("authorization"))
            return super().__call__(request)

    await ask(kind, Watching([lambda: stream_of(ONE_CHAT)]), model="tiny", api_key="secret")
    assert seen == ["Bearer secret"]


@contextmanager
def heartbeats_only(first: bytes) -> Iterator[str]:
    """A real server that says `first`, and after it nothing but heartbeats, until the client leaves."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"

    def serve() -> None:
        with listener.accept()[0] as connection:
            connection.recv(1 << 16)
            connection.sendall(head + first)
            connection.settimeout(0.02)
            while True:
                connection.sendall(KEEPALIVE)
                try:
                    if not connection.recv(1):
                        return
                except TimeoutError:
                    continue
                except ConnectionError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("first", [b"", event([chat("Pa")])])
async def test_heartbeats_are_no_events(kind: str, first: bytes) -> None:
    short, long = 0.3, 30.0
    timeouts = Timeouts(first_event_s=long, idle_s=short) if first else Timeouts(first_event_s=short, idle_s=long)
    with heartbeats_only(first) as url, pytest.raises(IdleTimeout) as raised:
        await read_from(kind, url, timeouts)
    assert raised.value.answer is not None
    assert raised.value.answer.text == ("Pa" if first else "")


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n: x\n\n"])
async def test_silence_ends_at_the_same_limit(kind: str, said: bytes) -> None:
    timeouts = Timeouts(first_event_s=0.2, idle_s=0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        accepted: list[socket.socket] = []

        def accept() -> None:
            accepted.append(listener.accept()[0])
            accepted[0].sendall(said)

        answer = threading.Thread(target=accept)
        answer.start()
        with pytest.raises(IdleTimeout):
            await read_from(kind, url, timeouts)
        answer.join()
        accepted[0].close()


async def test_a_slow_reader_is_no_silent_server(kind: str) -> None:
    script, timeouts = Script([lambda: stream_of(ONE_CHAT)]), Timeouts(first_event_s=0.5, idle_s=0.5)
    if kind == "sync":
        with sync_client(script, timeouts=timeouts) as client, client.stream_chat("Hello") as events:
            for delta in events:
                time.sleep(0.6 if delta.text == "Pa" else 0)
            assert events.answer.text == "Paris"
    else:
        async with async_client(script, timeouts=timeouts) as other, other.stream_chat("Hello") as parts:
            async for delta in parts:
                await asyncio.sleep(0.6 if delta.text == "Pa" else 0)
            assert parts.answer.text == "Paris"


async def test_more_than_a_hundred_streams_wait_for_nothing(kind: str) -> None:
    client = Client("http://127.0.0.1:9") if kind == "sync" else AsyncClient("http://127.0.0.1:9")
    transport: Any = client._http._transport
    assert transport._pool._max_connections > 10_000
    if isinstance(client, Client):
        client.close()
    else:
        await client.close()


async def read_from(kind: str, url: str, timeouts: Timeouts) -> None:
    if kind == "sync":
        client = Client(url, timeouts=timeouts, retries=NO_RETRIES)
        await asyncio.to_thread(ask_sync, client, "stream_chat", True, "Hello", {"model": "tiny"})
        return
    other = AsyncClient(url, timeouts=timeouts, retries=NO_RETRIES)
    async with other, other.stream_chat("Hello", model="tiny") as stream:
        await stream.read_all()
