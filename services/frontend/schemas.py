"""Request bodies: from bytes to a GenerateRequest that cannot be wrong, or a 400 that names the field."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from pdserve.core.errors import ErrorCode, InvalidRequest, PdserveError
from pdserve.core.sampling import MAX_SIBLINGS, SamplingParams
from services.frontend.fields import UNSUPPORTED, echo, parse_logit_bias, parse_messages, parse_prompt, parse_stop
from services.frontend.request import Endpoint, GenerateRequest, Prompt

MAX_DEPTH = 64
DEFAULT_COMPLETION_TOKENS = 16
_UNLIMITED_TOKENS = 2**31 - 1
_PATH_CHARACTERS = 100
_INTEGERS = range(-(2**63), 2**64)
_REFUSED_FIELDS = ("tools", "tool_choice", "functions", "function_call", "prompt_logprobs", "suffix")
T = TypeVar("T")


def parse_body(body: bytes) -> dict[str, Any]:
    """JSON, strictly: UTF-8, an object, finite numbers of 64 bits, real text, at most MAX_DEPTH levels.

    Raises:
        PdserveError: invalid_request; names the field where there is one.
    """
    try:
        value = json.loads(body.decode())
    except UnicodeDecodeError as error:
        raise _invalid_body(f"the body is not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise _invalid_body(f"the body is not valid JSON: {error.msg} at character {error.pos}") from error
    except ValueError as error:
        raise _invalid_body("a number in the body has too many digits") from error
    except RecursionError as error:
        raise _invalid_body(f"the body is nested deeper than {MAX_DEPTH} levels") from error
    if not isinstance(value, dict):
        raise _invalid_body("the body must be a JSON object")
    _check_values(value)
    return value


def parse_chat(body: Mapping[str, Any]) -> GenerateRequest:
    """The body of /v1/chat/completions.

    Raises:
        InvalidRequest: names the field.
    """
    _refuse(body)
    chat = _validated(ChatBody, body)
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
    completion = _validated(CompletionBody, body)
    logprobs, n = completion.logprobs, _or(completion.n, 1)
    if completion.best_of not in (None, n):
        raise InvalidRequest("best_of", f"best_of must equal n ({n})", ErrorCode.unsupported)
    if logprobs is not None and not 0 <= logprobs <= max_logprobs:
        raise InvalidRequest("logprobs", f"logprobs must be between 0 and {max_logprobs}, not {logprobs}")
    if completion.echo and logprobs is not None:
        raise InvalidRequest("echo", f"echo with logprobs {UNSUPPORTED}", ErrorCode.unsupported)
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
        ),
    )


def error_body(error: PdserveError) -> dict[str, Any]:
    """The API's error envelope."""
    return {
        "error": {
            "message": error.message,
            "type": error.spec.openai_type,
            "param": error.param,
            "code": error.code.name,
        }
    }


Messages = Annotated[
    tuple[dict[str, Any], ...], PlainValidator(parse_messages, json_schema_input_type=list[dict[str, Any]])
]
Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(parse_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Stops = Annotated[tuple[str, ...], PlainValidator(parse_stop, json_schema_input_type=str | list[str] | None)]
LogitBias = Annotated[
    dict[int, float], PlainValidator(parse_logit_bias, json_schema_input_type=dict[str, float] | None)
]
TokenCount = Annotated[int, Field(ge=1, le=_UNLIMITED_TOKENS)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(_Strict):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_timings: bool | None = None


class SharedBody(_Strict):
    """What both bodies have. null means the default everywhere; ranges of sampling parameters are SamplingParams's."""

    model: str
    max_tokens: TokenCount | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SIBLINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stops = ()
    seed: Annotated[int, Field(ge=_INTEGERS.start, lt=_INTEGERS.stop)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias = Field(default_factory=dict)
    user: str | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
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
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(SharedBody):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


def _shared(
    body: SharedBody, *, max_tokens: int | None, max_tokens_param: str, default_tokens: int, top_logprobs: int | None
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


Body = TypeVar("Body", bound=SharedBody)


def _validated(model: type[Body], body: Mapping[str, Any]) -> Body:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _invalid_field(error) from error


def _invalid_field(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False)[0]
    param = _path(first["loc"])
    if first["type"] == "missing":
        return InvalidRequest(param, f"{param} is required")
    reason = first["msg"].removeprefix("Input ")
    return InvalidRequest(param, f"{param} {reason}, not {echo(first['input'])}")


def _path(steps: Iterable[int | str]) -> str:
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return path.removeprefix(".")[:_PATH_CHARACTERS]


def _invalid_body(message: str) -> PdserveError:
    return PdserveError(ErrorCode.invalid_request, message)


class _Place(NamedTuple):
    """Where a value stands in the body; a step costs the same at any depth."""

    parent: "_Place | None"
    step: int | str
    depth: int

    def child(self, step: int | str) -> "_Place":
        return _Place(self, step, self.depth + 1)

    @property
    def path(self) -> str:
        steps: list[int | str] = []
        place = self
        while place.parent is not None:
            steps.append(place.step)
            place = place.parent
        return _path(reversed(steps))


def _check_values(body: dict[str, Any]) -> None:
    """Every key, text and number of the body. Containers wait on a stack, so depth costs no recursion."""
    pending: list[tuple[_Place, dict[str, Any] | list[Any]]] = [(_Place(None, "", 0), body)]
    while pending:
        place, container = pending.pop()
        if place.depth >= MAX_DEPTH:
            raise InvalidRequest(place.path, f"{place.path} is nested deeper than {MAX_DEPTH} levels")
        if isinstance(container, dict):
            for key in container:
                _check_text(place, key)
        elif set(map(type, container)) == {int}:
            # A prompt of a million ids.
            _check_integer(place, max(container))
            _check_integer(place, min(container))
            continue
        for step, value in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(value, str):
                if not value.isascii():
                    _check_text(place.child(step), value)
            elif isinstance(value, float):
                if not math.isfinite(value):
                    path = place.child(step).path
                    raise InvalidRequest(path, f"{path} must be a finite number")
            elif isinstance(value, int):
                if value not in _INTEGERS:
                    _check_integer(place.child(step), value)
            elif isinstance(value, (dict, list)):
                pending.append((place.child(step), value))


def _check_integer(place: _Place, value: int) -> None:
    if value not in _INTEGERS:
        raise InvalidRequest(place.path, f"{place.path} holds an integer that does not fit 64 bits")


def _check_text(place: _Place, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        path = place.path
        message = f"{path or 'the body'} holds a lone surrogate, which is not text"
        raise PdserveError(ErrorCode.invalid_request, message, param=path or None) from error


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
