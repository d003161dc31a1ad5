"""Request bodies: from JSON to a GenerateRequest that cannot be wrong, or a 400 that names the field."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from pdserve.core.errors import ErrorCode, InvalidRequest
from pdserve.core.sampling import MAX_SIBLINGS, MAX_TOP_LOGPROBS, SamplingParams
from services.frontend.fields import (
    MAX_PROMPTS,
    MAX_STOPS,
    UNSUPPORTED,
    Message,
    echo,
    parse_logit_bias,
    parse_messages,
    parse_prompt,
    parse_stop,
)
from services.frontend.request import Endpoint, GenerateRequest, Prompt
from services.frontend.strict_json import INTEGERS, field_path

DEFAULT_COMPLETION_TOKENS = 16
_UNLIMITED_TOKENS = 2**31 - 1
_REFUSED_FIELDS = ("tools", "tool_choice", "functions", "function_call", "prompt_logprobs", "suffix")
T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)


def parse_chat(body: Mapping[str, Any]) -> GenerateRequest:
    """The body of /v1/chat/completions.

    Raises:
        InvalidRequest: names the field.
    """
    _refuse(body)
    chat = validated(ChatBody, body)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise InvalidRequest("top_logprobs", "top_logprobs needs logprobs to be true")
    if chat.add_generation_prompt and chat.continue_final_message:
        raise InvalidRequest(
            "continue_final_message", "continue_final_message and add_generation_prompt must not both be true"
        )
    own_field = chat.max_completion_tokens is not None
    return GenerateRequest(
        endpoint=Endpoint.CHAT,
        messages=chat.messages,
        add_generation_prompt=_or(chat.add_generation_prompt, not chat.continue_final_message),
        continue_final_message=bool(chat.continue_final_message),
        chat_template_kwargs=chat.chat_template_kwargs or {},
        **_shared(
            chat,
            max_tokens=chat.max_completion_tokens if own_field else chat.max_tokens,
            max_tokens_param="max_completion_tokens" if own_field else "max_tokens",
            default_tokens=_UNLIMITED_TOKENS,
            top_logprobs=_or(chat.top_logprobs, 0) if chat.logprobs else None,
        ),
    )


def parse_completion(body: Mapping[str, Any], *, max_logprobs: int = 5) -> GenerateRequest:
    """The body of /v1/completions.

    Args:
        max_logprobs: the most that `logprobs` may ask for.
    Raises:
        InvalidRequest: names the field.
    """
    _refuse(body)
    completion = validated(CompletionBody, body)
    logprobs, n = completion.logprobs, _or(completion.n, 1)
    if completion.best_of not in (None, n):
        raise InvalidRequest("best_of", f"best_of must equal n ({n})", ErrorCode.unsupported)
    if logprobs is not None and not 0 <= logprobs <= max_logprobs:
        raise InvalidRequest("logprobs", f"logprobs must be between 0 and {max_logprobs}, not {logprobs}")
    return GenerateRequest(
        endpoint=Endpoint.COMPLETION,
        prompts=completion.prompt,
        chat_template_kwargs={},
        echo=bool(completion.echo),
        **_shared(
            completion,
            max_tokens=completion.max_tokens,
            max_tokens_param="max_tokens",
            default_tokens=DEFAULT_COMPLETION_TOKENS,
            top_logprobs=logprobs,
            prompt_logprobs=logprobs if completion.echo else None,
        ),
    )


def _documented(kind: str, **bounds: float) -> WithJsonSchema:
    """What the OpenAPI document says of a number whose range SamplingParams or the parser checks."""
    return WithJsonSchema({"type": kind, **bounds})


Penalty = Annotated[float, _documented("number", minimum=-2, maximum=2)]
Bias = Annotated[float, _documented("number", minimum=-100, maximum=100)]
Messages = Annotated[
    tuple[dict[str, Any], ...],
    PlainValidator(parse_messages, json_schema_input_type=Annotated[list[Message], Field(min_length=1)]),
]
_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_Several = Field(min_length=1, max_length=MAX_PROMPTS)
Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(
        parse_prompt,
        json_schema_input_type=str | _Ids | Annotated[list[str], _Several] | Annotated[list[_Ids], _Several],
    ),
]
Stops = Annotated[
    tuple[str, ...],
    PlainValidator(
        parse_stop, json_schema_input_type=_Text | Annotated[list[_Text], Field(max_length=MAX_STOPS)] | None
    ),
]
LogitBias = Annotated[dict[int, float], PlainValidator(parse_logit_bias, json_schema_input_type=dict[str, Bias] | None)]
TokenCount = Annotated[int, Field(ge=1, le=_UNLIMITED_TOKENS)]


class StrictBody(BaseModel):
    """A request body: no conversions, and unknown fields are left alone."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(StrictBody):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_timings: bool | None = None


class SharedBody(StrictBody):
    """What both bodies have. null means the default everywhere; ranges of sampling parameters are SamplingParams's."""

    model: str
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, _documented("number", minimum=0, maximum=2)] | None = None
    top_p: Annotated[float, _documented("number", exclusiveMinimum=0, maximum=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SIBLINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stops = ()
    seed: Annotated[int, Field(ge=INTEGERS.start, lt=INTEGERS.stop)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias = Field(default_factory=dict)
    user: str | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, _documented("number", minimum=0, maximum=1)] | None = None
    repetition_penalty: Annotated[float, _documented("number", minimum=0.001, maximum=1000)] | None = None
    min_tokens: Annotated[int, _documented("integer", minimum=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None


class ChatBody(SharedBody):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, _documented("integer", minimum=0, maximum=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(SharedBody):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, _documented("integer", minimum=0, maximum=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, _documented("integer", minimum=1)] | None = None


def _shared(
    body: SharedBody,
    *,
    max_tokens: int | None,
    max_tokens_param: str,
    default_tokens: int,
    top_logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> dict[str, Any]:
    options = body.stream_options or StreamOptions()
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options", "stream_options needs stream to be true")
    if body.truncate_prompt_tokens == 0:
        raise InvalidRequest("truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, not 0")
    sampling = SamplingParams(
        max_tokens=_or(max_tokens, default_tokens),
        min_tokens=_or(body.min_tokens, 0),
        temperature=_or(body.temperature, 1.0),
        top_k=max(_or(body.top_k, 0), 0),
        top_p=_or(body.top_p, 1.0),
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=body.logit_bias,
        stop_ids=frozenset(body.stop_token_ids or ()),
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    return {
        "model": body.model,
        "n": _or(body.n, 1),
        "sampling": sampling,
        "max_tokens": max_tokens,
        "max_tokens_param": max_tokens_param,
        "ignore_eos": bool(body.ignore_eos),
        "seed": None if body.seed is None else body.seed % 2**64,
        "stops": body.stop,
        "include_stop_str_in_output": bool(body.include_stop_str_in_output),
        "skip_special_tokens": _or(body.skip_special_tokens, True),
        "return_token_ids": bool(body.return_token_ids),
        "stream": bool(body.stream),
        "include_usage": bool(options.include_usage),
        "continuous_usage_stats": bool(options.continuous_usage_stats),
        "include_timings": bool(options.include_timings),
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "cache_salt": body.cache_salt or "",
        "priority": _or(body.priority, 0),
        "user": body.user,
    }


def _refuse(body: Mapping[str, Any]) -> None:
    """What would change the answer if it worked must not be ignored."""
    for field in _REFUSED_FIELDS:
        if body.get(field) is not None:
            raise InvalidRequest(field, f"{field} {UNSUPPORTED}", ErrorCode.unsupported)
    response_format = body.get("response_format")
    if response_format is not None and response_format != {"type": "text"}:
        raise InvalidRequest(
            "response_format", f'response_format {UNSUPPORTED}, but for {{"type": "text"}}', ErrorCode.unsupported
        )


def validated(model: type[Body], body: Mapping[str, Any]) -> Body:
    """
    Raises:
        InvalidRequest: names the field.
    """
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _invalid_field(error) from error


def _invalid_field(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False)[0]
    param = field_path(first["loc"])
    if first["type"] == "missing":
        return InvalidRequest(param, f"{param} is required")
    reason = first["msg"].removeprefix("Input ")
    return InvalidRequest(param, f"{param} {reason}, not {echo(first['input'])}")


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
