"""POST /tokenize and /detokenize, in vLLM's shape."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field, PlainValidator

from pdserve.core.errors import InvalidRequest
from services.frontend.admission import ServedModel
from services.frontend.bodies import Detokenized, Tokenized
from services.frontend.fields import Message, parse_messages
from services.frontend.intake import Intake
from services.frontend.responses import json_response
from services.frontend.schemas import StrictBody, validated
from services.frontend.tokenizer import Tokenizer, TokenizerPool


class TokenizeBody(StrictBody):
    """POST /tokenize: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[
        tuple[dict[str, Any], ...] | None,
        PlainValidator(
            lambda value: None if value is None else parse_messages(value), json_schema_input_type=list[Message] | None
        ),
    ] = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(StrictBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


@dataclass(frozen=True, slots=True)
class TokenizeHandler:
    """Answers the two endpoints, for tokens and text as a generation request would see them."""

    served: ServedModel
    tokenizers: TokenizerPool
    intake: Intake

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await self.intake.read(request, _parse_tokenize)
        self._check_model(body.model)
        token_ids, token_strings = await self.tokenizers.run(lambda tokenizer: _tokenized(tokenizer, body))
        tokenized: Tokenized = {
            "count": len(token_ids),
            "max_model_len": self.served.max_context_tokens,
            "tokens": token_ids,
            "token_strs": token_strings,
        }
        return json_response(tokenized)

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await self.intake.read(request, lambda value: validated(DetokenizeBody, value))
        self._check_model(body.model)
        if (largest := max(body.tokens, default=0)) >= self.served.vocab_size:
            raise InvalidRequest(
                "tokens", f"tokens holds token id {largest}; ids must be below {self.served.vocab_size}"
            )
        text = await self.tokenizers.run(lambda tokenizer: tokenizer.decode(body.tokens))
        detokenized: Detokenized = {"prompt": text}
        return json_response(detokenized)

    def _check_model(self, model: str | None) -> None:
        if model is not None:
            self.served.check(model)


def _parse_tokenize(value: Mapping[str, Any]) -> TokenizeBody:
    body = validated(TokenizeBody, value)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt", "exactly one of prompt and messages is required")
    if body.add_generation_prompt and body.continue_final_message:
        raise InvalidRequest(
            "continue_final_message", "continue_final_message and add_generation_prompt must not both be true"
        )
    return body


def _tokenized(tokenizer: Tokenizer, body: TokenizeBody) -> tuple[list[int], list[str] | None]:
    if body.messages is not None:
        token_ids = tokenizer.render_chat(
            body.messages,
            add_generation_prompt=not body.continue_final_message
            if body.add_generation_prompt is None
            else body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            chat_template_kwargs=body.chat_template_kwargs,
            add_special_tokens=bool(body.add_special_tokens),
        )
    else:
        token_ids = tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    return token_ids, list(map(tokenizer.token_string, token_ids)) if body.return_token_strs else None
