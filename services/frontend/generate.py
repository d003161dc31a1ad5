"""POST /v1/chat/completions and /v1/completions."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from aiohttp import web

from pdserve.config import FrontendConfig
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.telemetry.metrics import FrontendMetrics
from services.frontend.admission import Admission
from services.frontend.answers import Answer
from services.frontend.choices import Piece
from services.frontend.exchanges import Exchange, Exchanges
from services.frontend.request import Endpoint, GenerateRequest
from services.frontend.responses import ResponseShape, encode_json, timings_of
from services.frontend.schemas import error_body, parse_body, parse_chat, parse_completion
from services.frontend.sse import EventStream
from services.frontend.tokenizer import TokenizerPool

# A longer body is parsed off the loop.
_LONG_BODY_BYTES = 64 << 10
_ID_PREFIXES = {Endpoint.CHAT: "chatcmpl-", Endpoint.COMPLETION: "cmpl-"}
_PARSERS: Mapping[Endpoint, Callable[[Mapping[str, Any]], GenerateRequest]] = {
    Endpoint.CHAT: parse_chat,
    Endpoint.COMPLETION: parse_completion,
}


@dataclass(slots=True)
class GenerateHandler:
    """Answers the two endpoints.

    Attributes:
        stopping: new requests are refused.
    """

    admission: Admission
    tokenizers: TokenizerPool
    exchanges: Exchanges
    config: FrontendConfig
    metrics: FrontendMetrics
    stopping: bool = False

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._handle(request, Endpoint.CHAT)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._handle(request, Endpoint.COMPLETION)

    async def _handle(self, http: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        with Exchange(http, self.exchanges) as exchange:
            if self.stopping:
                raise PdserveError(ErrorCode.shutting_down, "this server is stopping", retry_after_s=1.0)
            request = await self._parse(http, endpoint)
            exchange.started(request.model)
            answer = await self.admission.admit(request, exchange.arrival_s)
            self.metrics.prompt_read(answer.prompt_tokens)
            shape = ResponseShape(
                request,
                answer,
                self.tokenizers.tokenizer,
                _ID_PREFIXES[endpoint] + uuid4().hex,
                int(time.time()),
            )
            with answer:
                exchange.answer = answer
                if request.stream:
                    return await self._stream(exchange, request, answer, shape)
                return await self._buffer(exchange, request, answer, shape)

    async def _parse(self, http: web.Request, endpoint: Endpoint) -> GenerateRequest:
        if http.headers.get("Content-Type") and not http.content_type.endswith("json"):
            raise PdserveError(
                ErrorCode.unsupported_media_type, f"the body must be application/json, not {http.content_type[:200]}"
            )
        body = await self._read(http)
        parse = _PARSERS[endpoint]
        if len(body) > _LONG_BODY_BYTES:
            return await self.tokenizers.run(lambda _: parse(parse_body(body)))
        return parse(parse_body(body))

    async def _read(self, http: web.Request) -> bytes:
        limit_s = self.config.idle_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await http.read()
        except TimeoutError:
            raise PdserveError(ErrorCode.body_timeout, f"the body did not come within {limit_s:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            limit_bytes = self.config.max_body_bytes
            raise PdserveError(ErrorCode.body_too_large, f"the body is longer than {limit_bytes} bytes") from None

    async def _stream(
        self, exchange: Exchange, request: GenerateRequest, answer: Answer, shape: ResponseShape
    ) -> web.StreamResponse:
        stream = EventStream(exchange)
        exchange.heartbeats = True
        loop = asyncio.get_running_loop()
        ttft_s: float | None = None
        try:
            while not answer.ended or any(choice.has_news for choice in answer.choices):
                for choice in answer.choices:
                    piece = choice.take()
                    if piece is None:
                        continue
                    events = shape.piece_events(choice, piece)
                    if ttft_s is None:
                        events[:0] = shape.opening()
                    for event in events:
                        await stream.send(event)
                    if ttft_s is None:
                        ttft_s = loop.time() - exchange.arrival_s
                        self.metrics.first_token(request.model, ttft_s)
                if answer.error is not None:
                    raise answer.error
                if exchange.heartbeat_due:
                    await stream.send_keepalive()
                if not answer.ended:
                    await answer.wait()
        except PdserveError as error:
            if not exchange.streaming:
                raise
            exchange.error = error
            await stream.send(error_body(error))
            await stream.end()
            return stream.response
        total_s = loop.time() - exchange.arrival_s
        timings = timings_of(answer.stages, ttft_s or total_s, total_s) if request.include_timings else None
        for event in shape.closing(timings):
            await stream.send(event)
        await stream.send_done()
        await stream.end()
        return stream.response

    async def _buffer(
        self, exchange: Exchange, request: GenerateRequest, answer: Answer, shape: ResponseShape
    ) -> web.Response:
        while not answer.ended:
            await answer.wait()
            if answer.error is not None:
                raise answer.error
        pieces = [choice.take() or Piece("", (), choice.finish) for choice in answer.choices]
        self.metrics.first_token(request.model, asyncio.get_running_loop().time() - exchange.arrival_s)
        return web.Response(body=encode_json(shape.body(pieces)), content_type="application/json")
