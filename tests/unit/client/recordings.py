"""Response bodies as servers send them, and transports that play them."""

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from pdserve.client.async_client import AsyncClient
from pdserve.client.policy import Retries
from pdserve.client.sync_client import Client

URL = "http://127.0.0.1:8000"
KEEPALIVE = b": keepalive\n\n"
DONE = b"data: [DONE]\n\n"
ERROR = {"message": "no worker", "type": "service_unavailable", "param": None, "code": "worker_lost"}
NO_RETRIES = Retries(count=0)


def event(choices: Sequence[dict[str, Any]] = (), **fields: Any) -> bytes:
    value = {"id": "r-1", "choices": list(choices)} | fields
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def chat(text: str | None = None, index: int = 0, finish: str | None = None, ids: Sequence[int] = ()) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {"index": index, "delta": delta, "finish_reason": finish} | ({"token_ids": list(ids)} if ids else {})


def text(text: str, index: int = 0, finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": finish}


def usage(completion_tokens: int) -> dict[str, Any]:
    counts = {"prompt_tokens": 3, "completion_tokens": completion_tokens}
    return {"usage": counts | {"prompt_tokens_details": {"cached_tokens": 2}}}


TWO_CHATS = b"".join(
    [
        event([chat("", 0)]),
        event([chat("", 1)]),
        event([chat("Pa", 0)]),
        KEEPALIVE,
        event([chat("Ly\u2028on \U0001f600", 1)]),
        event([chat("ris", 0)]),
        event([chat(None, 0, "stop")]),
        event([chat(None, 1, "length")]),
        event(**usage(5)),
        DONE,
    ]
)
ONE_CHAT = event([chat("Pa")]) + event([chat("ris")]) + event([chat(finish="stop")]) + event(**usage(2)) + DONE
COMPLETION = event([text("Par")]) + event([text("is", finish="stop")]) + event(**usage(2)) + DONE
FAILED_CHAT = KEEPALIVE + event([chat("Pa")]) + b"data: " + json.dumps({"error": ERROR}).encode() + b"\n\n"
SILENT_CHAT = KEEPALIVE * 3 + ONE_CHAT.replace(b"\n\n", b"\r\n\r\n")


@dataclass
class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in pieces. After them it ends, or fails with `error`."""

    pieces: Sequence[bytes]
    error: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        yield from self.pieces
        if self.error is not None:
            raise self.error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece


def in_pieces(body: bytes, size_bytes: int, error: Exception | None = None) -> Body:
    return Body([body[i : i + size_bytes] for i in range(0, len(body), size_bytes)], error)


def stream_of(body: bytes) -> httpx.Response:
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=in_pieces(body, 64))


@dataclass
class Script:
    """A server in memory: the n-th request gets the n-th answer, and the last one stays.

    Attributes:
        asked: bodies of the requests that came.
    """

    answers: Sequence[Callable[[], httpx.Response]]
    asked: list[Any] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}, {"id": "other"}]})
        self.asked.append(json.loads(request.content))
        return self.answers[min(len(self.asked), len(self.answers)) - 1]()


def sync_client(script: Script, **options: Any) -> Client:
    return Client(URL, transport=httpx.MockTransport(script), **options)


def async_client(script: Script, **options: Any) -> AsyncClient:
    return AsyncClient(URL, transport=httpx.MockTransport(script), **options)
