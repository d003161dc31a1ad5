"""A server of OpenAI's streams with a fault on request: what the generator is tested against.

Run as a program, `--port P` among any other arguments makes it serve there.
"""

import asyncio
import json
import socket
import sys
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

MODEL = "fake"


@dataclass
class FakeServer:
    """Answers every completion with `max_tokens` tokens.

    Attributes:
        fault: what goes wrong after half of the tokens, "" for nothing; "503" and "400" refuse outright.
        tokens_per_event: tokens that share an event.
        step_s: the pause before each event after the first.
        cached_tokens: what usage claims.
        buffer_bytes: about what the kernel and this process each hold of a stream; None is much. With it, tokens that
            come while a stream is not writable share its next event.
        patience_s: how long such a stream may take nothing before it is reset.
        bodies: every request's body, in order.
    """

    fault: str = ""
    tokens_per_event: int = 1
    step_s: float = 0.0
    cached_tokens: int = 0
    buffer_bytes: int | None = None
    patience_s: float = 60.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    open_now: int = 0
    open_at_most: int = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        return app

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(text="ready")

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.fault.isdigit():
            error = {"message": "no", "type": "t", "param": None, "code": "c"}
            return web.json_response({"error": error}, status=int(self.fault))
        self.open_now += 1
        self.open_at_most = max(self.open_at_most, self.open_now)
        try:
            return await self._stream(request, body)
        finally:
            self.open_now -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.buffer_bytes is None:
            await self._write_tokens(request, response, body["max_tokens"])
        else:
            await self._write_as_they_come(request, response, body["max_tokens"], self.buffer_bytes)
        if self.fault == "hang":
            await asyncio.sleep(3600)
        if self.fault == "reset":
            assert request.transport is not None
            request.transport.abort()
        if self.fault == "cut":
            await response.write(b'data: {"choices": [{"te')
        if self.fault == "garbage":
            await response.write(b"data: {not json\n\n")
        if self.fault == "error":
            await response.write(_event({"error": {"message": "worker lost", "code": "worker_lost"}}))
        if self.fault in ("", "no_done"):
            await response.write(_event({"choices": [_choice(request, 0, "length")]}))
            await response.write(_event({"choices": [], "usage": self._usage(body)}))
        if self.fault in ("", "no_finish"):
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _write_tokens(self, request: web.Request, response: web.StreamResponse, total: int) -> None:
        for first in range(0, total, self.tokens_per_event):
            count = min(self.tokens_per_event, total - first)
            if first:
                await asyncio.sleep(self.step_s)
            if self.fault and first * 2 >= total:
                break
            await response.write(_event({"choices": [_choice(request, count, None)]}))

    async def _write_as_they_come(
        self, request: web.Request, response: web.StreamResponse, total: int, buffer_bytes: int
    ) -> None:
        transport = request.transport
        assert transport is not None
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        transport.set_write_buffer_limits(buffer_bytes)
        here, written, more = 0, 0, asyncio.Event()

        async def make_tokens() -> None:
            """One a pause, however long that was on a busy machine."""
            nonlocal here
            while here < total:
                await asyncio.sleep(self.step_s)
                here += 1
                more.set()

        making = asyncio.create_task(make_tokens())
        try:
            while written < total:
                await more.wait()
                more.clear()
                event = _event({"choices": [_choice(request, here - written, None)], "padding": " " * buffer_bytes})
                written = here
                async with asyncio.timeout(self.patience_s):
                    await response.write(event)
        except TimeoutError:
            transport.abort()
            raise ConnectionResetError("the client took nothing") from None
        finally:
            making.cancel()

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        return {
            "prompt_tokens": len(prompt.split()),
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def _choice(request: web.Request, tokens: int, finish_reason: str | None) -> dict[str, Any]:
    text = " word" * tokens
    choice = {"index": 0, "token_ids": list(range(tokens)), "finish_reason": finish_reason}
    return choice | ({"delta": {"content": text}} if "chat" in request.path else {"text": text})


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


if __name__ == "__main__":
    web.run_app(FakeServer().app(), host="127.0.0.1", port=int(sys.argv[sys.argv.index("--port") + 1]), print=None)
