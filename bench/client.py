"""One streaming request to an OpenAI-compatible server, read as cheaply as possible."""

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Literal

import aiohttp

from bench.samples import Reply
from bench.sse import EventSplitter

Api = Literal["chat", "completions"]
PATHS: Mapping[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
ERROR_BODY_BYTES = 4096
READ_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what they all have in common.

    Attributes:
        fields: body fields of every request, over the generator's own.
        timeout_s: the longest a request may take in all; one that takes longer counts as failed.
    """

    url: str
    model: str
    api: Api = "completions"
    api_key: str = ""
    timeout_s: float = 600.0
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """One request: its body is encoded before the run, so that sending costs nothing."""

    body: bytes


def make_request(target: Target, prompt: str, max_tokens: int) -> Request:
    """A greedy request that runs to its last token, with usage and token ids in its stream."""
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if target.api == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    return Request(json.dumps(body | dict(target.fields)).encode())


def open_session(buffer_bytes: int | None = None) -> aiohttp.ClientSession:
    """A client session that never makes a request wait for a connection and never decompresses.

    Args:
        buffer_bytes: about what the kernel and this process each take of a response that is not read; None is much.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, socket_factory=None if buffer_bytes is None else partial(_make_socket, buffer_bytes)
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        auto_decompress=False,
        skip_auto_headers=("Accept-Encoding",),
        read_bufsize=READ_BYTES if buffer_bytes is None else buffer_bytes,
    )


def _make_socket(buffer_bytes: int, address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    connection = socket.socket(family, kind, protocol)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)  # no effect once it is connected
    return connection


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The id of the first model that the server lists."""
    async with session.get(f"{url}/v1/models") as response:
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])


async def stream(
    session: aiohttp.ClientSession,
    target: Target,
    request: Request,
    *,
    due_s: float | None = None,
    on_first: Callable[[], None] | None = None,
    may_read: asyncio.Event | None = None,
) -> Reply:
    """Send one request and read its stream to the end. Failures are part of the reply, never raised.

    Args:
        due_s: when it should have been sent, by `perf_counter`; now if None.
        on_first: called when the first event has arrived.
        may_read: nothing of the stream is read before it is set; None reads at once.
    """
    sent_s = perf_counter()
    reply = Reply(due_s=sent_s if due_s is None else due_s, sent_s=sent_s)
    try:
        async with asyncio.timeout(target.timeout_s):
            await _read(session, target, request, reply, on_first, may_read)
    except TimeoutError:
        reply.timed_out = True
        reply.broken = f"no end within {target.timeout_s:g} s"
    except (aiohttp.ClientError, OSError) as error:
        reply.broken = f"{type(error).__name__}: {error}"
    reply.ended_s = perf_counter()
    return reply


async def _read(
    session: aiohttp.ClientSession,
    target: Target,
    request: Request,
    reply: Reply,
    on_first: Callable[[], None] | None,
    may_read: asyncio.Event | None,
) -> None:
    headers = {"Content-Type": "application/json"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    async with session.post(target.url + PATHS[target.api], data=request.body, headers=headers) as response:
        reply.status = response.status
        if response.status != 200:
            reply.body = await response.content.read(ERROR_BODY_BYTES)
            return
        if may_read is not None:
            await may_read.wait()
        splitter = EventSplitter()
        times_s, payloads = reply.times_s, reply.payloads
        try:
            while chunk := await response.content.readany():
                now_s = perf_counter()
                for payload in splitter.feed(chunk):
                    times_s.append(now_s)
                    payloads.append(payload)
                if on_first is not None and payloads:
                    on_first()
                    on_first = None
        finally:
            reply.cut = splitter.pending
