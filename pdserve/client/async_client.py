"""The client for asyncio."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import httpx

from pdserve.client.answers import Answer, Delta
from pdserve.client.calls import Call, Messages, Prompt, chat_call, completion_call
from pdserve.client.connection import (
    DRAIN_S,
    STREAM_HEADERS,
    Tries,
    base_url,
    http_options,
    httpx_timeout,
    reading_body,
    reading_event,
)
from pdserve.client.errors import IdleTimeout
from pdserve.client.models import read_models
from pdserve.client.policy import Retries, Timeouts
from pdserve.client.reader import AnswerReader, read_whole


class AsyncClient:
    """Asks a server of OpenAI's API, and never takes a part of an answer for the whole.

    Fields of a request beyond the named ones go into its body as they are; `model` is by default the first one that
    the server names. Everything raises a ClientError; pdserve.client.errors draws their tree.

    Args:
        url: of the server, with or without the API's /v1.
        transport: instead of connections.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = base_url(url)
        self.timeouts = timeouts or Timeouts()
        self.retries = retries or Retries()
        self._model = ""
        self._http = httpx.AsyncClient(transport=transport, **http_options(self.url, api_key, self.timeouts))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def chat(self, messages: Messages, **fields: Any) -> Answer:
        """The whole answer to a conversation, or to one message of the user."""
        return await self._whole(chat_call(messages, stream=False, fields=fields))

    async def complete(self, prompt: Prompt, **fields: Any) -> Answer:
        """The whole continuation of one prompt or several, as text or as token ids."""
        return await self._whole(completion_call(prompt, stream=False, fields=fields))

    def stream_chat(self, messages: Messages, **fields: Any) -> "AsyncAnswerStream":
        """The answer to a conversation as it comes: `async with` the result, then `async for`."""
        return AsyncAnswerStream(self, chat_call(messages, stream=True, fields=fields))

    def stream_completion(self, prompt: Prompt, **fields: Any) -> "AsyncAnswerStream":
        """The continuation of a prompt as it comes: `async with` the result, then `async for`."""
        return AsyncAnswerStream(self, completion_call(prompt, stream=True, fields=fields))

    async def models(self) -> list[str]:
        """Names of the models that are served."""
        timeout = httpx_timeout(self.timeouts, self.timeouts.idle_s)
        request = self._http.build_request("GET", "/v1/models", timeout=timeout)
        response = await self._send(request, self.timeouts.idle_s)
        return read_models(self.url, await self._read(response))

    async def open(self, call: Call, within_s: float, headers: dict[str, str] | None = None) -> httpx.Response:
        """Send a call until it is answered with 200; the body is still to be read, and the response to be closed.

        Args:
            within_s: of each try, up to the response's headers.
        """
        model = call.model or self._model
        if not model:
            model = self._model = (await self.models())[0]
        timeout = httpx_timeout(self.timeouts, within_s)
        request = self._http.build_request("POST", call.path, json=call.body(model), headers=headers, timeout=timeout)
        return await self._send(request, within_s)

    async def _whole(self, call: Call) -> Answer:
        response = await self.open(call, self.timeouts.whole_s)
        return read_whole(call, await self._read(response), response.headers.get("x-request-id", ""))

    async def _send(self, request: httpx.Request, within_s: float) -> httpx.Response:
        tries = Tries(self.url, self.retries)
        while True:
            try:
                async with asyncio.timeout(within_s):
                    response = await self._http.send(request, stream=True)
            except TimeoutError as error:
                raise IdleTimeout(f"no response from {self.url} within {within_s:g} s") from error
            except httpx.HTTPError as error:
                wait_s = tries.after_failure(error)
            else:
                if response.status_code == httpx.codes.OK:
                    return response
                wait_s = tries.after_refusal(response, await self._read(response))
            await asyncio.sleep(wait_s)

    async def _read(self, response: httpx.Response) -> bytes:
        try:
            with reading_body(self.url):
                return await response.aread()
        finally:
            await response.aclose()


class AsyncAnswerStream:
    """One streamed answer: a context, and inside it an iterator over its deltas that ends only if it came whole.

    Attributes:
        started_s: when the request was sent first, on time.monotonic's clock.
    """

    def __init__(self, client: AsyncClient, call: Call) -> None:
        self.started_s = 0.0
        self._client = client
        self._call = call
        self._reader = AnswerReader(call)
        self._response: httpx.Response | None = None

    @property
    def answer(self) -> Answer:
        """What has come so far."""
        return self._reader.answer

    async def __aenter__(self) -> Self:
        self.started_s = time.monotonic()
        self._response = await self._client.open(self._call, self._client.timeouts.first_event_s, STREAM_HEADERS)
        self._reader = AnswerReader(self._call, self._response.headers.get("x-request-id", ""))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._response is not None:
            await self._response.aclose()

    async def read_all(self) -> Answer:
        """The whole answer."""
        async for _ in self:
            pass
        return self.answer

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """
        Raises:
            ServerError: the server ended the stream with an error.
            IncompleteAnswer: the stream ended otherwise, or fell silent; `answer` is what came.
        """
        assert self._response is not None, "a stream is entered before it is read"
        pieces = self._response.aiter_bytes()
        while not self._reader.ended:
            for delta in await self._next_event(pieces):
                yield delta
        if self._reader.done:
            await _drain(pieces)
        self._reader.finish()

    async def _next_event(self, pieces: AsyncIterator[bytes]) -> list[Delta]:
        """The deltas of the next piece that has an event; none at the end."""
        reader, timeouts, url = self._reader, self._client.timeouts, self._client.url
        before = reader.events
        limit_s = timeouts.event_s(before)
        # One deadline over all pieces: a heartbeat is a piece, but no event.
        with reading_event(url, reader, limit_s):
            async with asyncio.timeout(limit_s):
                async for piece in pieces:
                    deltas = reader.read(piece, time.monotonic())
                    if reader.events > before:
                        return deltas
        reader.read_end()
        return []


async def _drain(pieces: AsyncIterator[bytes]) -> None:
    # The answer is whole: what goes wrong from here on costs a connection and nothing else.
    with suppress(TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(DRAIN_S):
            async for _ in pieces:
                pass
