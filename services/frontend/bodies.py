"""Response bodies: their types, from which the OpenAPI document is made. A key that is not here is never sent."""

from typing import Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from pdserve.core.errors import PdserveError

_closed = with_config(ConfigDict(extra="forbid"))

Finish = Literal["stop", "length"]


@_closed
class ErrorDetail(TypedDict):
    """`code` is a row of the error table; `param` the request field at fault."""

    message: str
    type: str
    param: str | None
    code: str


@_closed
class ErrorEnvelope(TypedDict):
    """The body of every response that is not a success, and the last event of a stream that broke."""

    error: ErrorDetail


def error_body(error: PdserveError) -> ErrorEnvelope:
    return {
        "error": {
            "message": error.message,
            "type": error.spec.openai_type,
            "param": error.param,
            "code": error.code.name,
        }
    }


# What both APIs have.


@_closed
class PromptTokensDetails(TypedDict):
    """`cached_tokens`: how much of the prompts came from the prefix cache."""

    cached_tokens: int


@_closed
class Usage(TypedDict):
    """Tokens of all prompts and all choices. A stop token, and those of a stop string, count."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


Timings = dict[str, float]
"""Seconds of each stage, of the first content byte (`ttft`) and of everything (`total`)."""


# Chat.


@_closed
class NamedLogprob(TypedDict):
    """`bytes` joined over tokens are the text's UTF-8; `token` has U+FFFD where a token holds part of a character."""

    token: str
    logprob: float
    bytes: list[int]


@_closed
class TokenLogprob(TypedDict):
    """One position: the token that was chosen, and the best ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[NamedLogprob]


@_closed
class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


@_closed
class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


@_closed
class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    token_ids: NotRequired[list[int]]


@_closed
class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]


@_closed
class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


@_closed
class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    token_ids: NotRequired[list[int]]


@_closed
class ChatChunk(TypedDict):
    """An event of a stream. The last one before `[DONE]` has usage and timings, as asked for, and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]
    prompt_token_ids: NotRequired[list[int]]


# Completions.


@_closed
class CompletionLogprobs(TypedDict):
    """Columns, one row a token.

    `top_logprobs` has the chosen token beside the best ones. A token that is no text by itself is named by its bytes
    (`bytes:\\xe2\\x80`), so that no two share a name. `text_offset` counts characters of the choice's text.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@_closed
class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


@_closed
class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


@_closed
class CompletionChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


@_closed
class CompletionChunk(TypedDict):
    """An event of a stream. The last one before `[DONE]` has usage and timings, as asked for, and no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]


# Everything else.


@_closed
class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@_closed
class Detokenized(TypedDict):
    prompt: str


@_closed
class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


@_closed
class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


@_closed
class Health(TypedDict):
    status: Literal["ok"]


@_closed
class Readiness(TypedDict):
    """`ready`: workers that take work, by role."""

    status: Literal["ready", "stopping", "waiting for workers"]
    ready: dict[str, int]


@_closed
class Version(TypedDict):
    version: str
