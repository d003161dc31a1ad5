"""POST /v1/chat/completions and /v1/completions."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from aiohttp import web

from pdserve.config import FrontendConfig
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.telemetry.metrics import FrontendMetrics
from services.frontend.admission import Admission
from services.frontend.answers import Answer
from services.frontend.bodies import error_body
from services.frontend.chat_responses import ChatShape
from services.frontend.choices import Piece
from services.frontend.completion_responses import CompletionShape
from services.frontend.exchanges import Exchange, Exchanges
from services.frontend.intake import Intake
from services.frontend.request import Endpoint, GenerateRequest
from services.frontend.responses import ResponseShape, json_response, timings_of
from services.frontend.schemas import parse_chat, parse_completion
from services.frontend.sse import EventStream
from services.frontend.tokenizer import TokenizerPool

_SHAPES: Mapping[Endpoint, tuple[type[ChatShape] | type[CompletionShape], str]] = {
    Endpoint.CHAT: (ChatShape, "chatcmpl-"),
    Endpoint.COMPLETION: (CompletionShape, "cmpl-"),
}


@dataclass(slots=True)
class GenerateHandler:
    """Answers the two endpoints.

    Attributes:
        leaving: this server is not ready any more; load balancers are to notice.
        stopping: new requests are refused.
    """

    admission: Admission
    tokenizers: TokenizerPool
    intake: Intake
    exchanges: Exchanges
    config: FrontendConfig
    metrics: FrontendMetrics
    leaving: bool = False
    stopping: bool = False

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._handle(request, Endpoint.CHAT)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._handle(request, Endpoint.COMPLETION)

    async def _handle(self, http: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        with Exchange(http, self.exchanges) as exchange:
            if self.stopping:
                raise PdserveError(ErrorCode.shutting_down, "this server is stopping", retry_after_s=1.0)
            request = await self.intake.read(http, self._parser(endpoint))
            exchange.started(request.model)
            answer = await self.admission.admit(request, exchange.arrival_s)
            self.metrics.prompt_read(answer.prompt_tokens)
            make_shape, prefix = _SHAPES[endpoint]
            shape = make_shape(request, answer, self.tokenizers.tokenizer, prefix + uuid4().hex, int(time.time()))
            with answer:
                exchange.answer = answer
                if request.stream:
                    return await self._stream(exchange, request, answer, shape)
                return await self._buffer(exchange, request, answer, shape)

    def _parser(self, endpoint: Endpoint) -> Callable[[Mapping[str, Any]], GenerateRequest]:
        if endpoint is Endpoint.CHAT:
            return parse_chat
        return partial(parse_completion, max_logprobs=self.config.max_logprobs)

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
                        events = [*shape.opening(), *events]
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
        response = json_response(shape.body(pieces))
        # aiohttp would write it after the exchange, when nobody looks after its client any more.
        await exchange.write(response)
        return response
