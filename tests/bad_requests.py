"""Requests that must be refused: what is sent, and which field the refusal names."""

import json
from dataclasses import dataclass
from typing import Any

from tests.scripted_words import CONTEXT_TOKENS, MODEL, VOCAB_SIZE

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hello"}


@dataclass(frozen=True, kw_only=True)
class BadRequest:
    """One of them. `param` None: no field is at fault, but the body or the call."""

    body: bytes
    param: str | None
    status: int = 400
    path: str = COMPLETIONS
    method: str = "POST"
    content_type: str = "application/json"


def completion(param: str | None, status: int = 400, **fields: Any) -> BadRequest:
    body = {"model": MODEL, "prompt": "hello"} | fields
    return BadRequest(body=json.dumps(body).encode(), param=param, status=status)


def chat(param: str | None, **fields: Any) -> BadRequest:
    body = {"model": MODEL, "messages": [USER]} | fields
    return BadRequest(body=json.dumps(body).encode(), param=param, path=CHAT)


def raw(body: bytes, param: str | None = None, status: int = 400, **how: str) -> BadRequest:
    return BadRequest(body=body, param=param, status=status, **how)


def with_value(field: str, value: bytes) -> bytes:
    """A good body but for one value, written as it is."""
    return b'{"model": "' + MODEL.encode() + b'", "prompt": "hello", "' + field.encode() + b'": ' + value + b"}"


BAD_REQUESTS = {
    # What is no JSON object.
    "empty body": raw(b""),
    "cut JSON": raw(b'{"model": '),
    "a list": raw(b"[]"),
    "a string": raw(b'"hello"'),
    "single quotes": raw(b"{'model': 1}"),
    "bad UTF-8": raw(b'{"model": "\xff\xfe"}'),
    "UTF-16": raw('{"model": "words"}'.encode("utf-16")),
    "nested beyond the parser": raw(b'{"a":' * 50_000),
    "a lone surrogate for a key": raw(b'{"\\ud800": 1}'),
    "a huge body": raw(b" " * (2 << 20), status=413),
    "wrong content type": raw(b"model=words", status=415, content_type="application/x-www-form-urlencoded"),
    # What is no call.
    "unknown path": raw(b"{}", status=404, path="/v1/nothing"),
    "wrong method": raw(b"", status=405, method="GET"),
    # Values that JSON parsers let through.
    "NaN": raw(with_value("temperature", b"NaN"), "temperature"),
    "Infinity": raw(with_value("top_p", b"-Infinity"), "top_p"),
    "a float beyond all floats": raw(with_value("temperature", b"1e999"), "temperature"),
    "a 5,000-digit number": raw(with_value("seed", b"9" * 5000)),
    "a 4,000-digit number": raw(with_value("seed", b"9" * 4000), "seed"),
    "a lone surrogate": raw(with_value("user", b'"a\\udc00b"'), "user"),
    "deep nesting": raw(with_value("extra", b"[" * 200 + b"]" * 200), ("extra" + "[0]" * 200)[:100]),
    # Wrong types.
    "model missing": raw(b'{"prompt": "hello"}', "model"),
    "model a number": completion("model", model=5),
    "prompt missing": raw(b'{"model": "words"}', "prompt"),
    "prompt an object": completion("prompt", prompt={"text": "hello"}),
    "prompt empty": completion("prompt", prompt=""),
    "prompt an empty list": completion("prompt", prompt=[]),
    "prompt mixed": completion("prompt", prompt=["hello", 5]),
    "max_tokens a string": completion("max_tokens", max_tokens="5"),
    "max_tokens a bool": completion("max_tokens", max_tokens=True),
    "stream a string": completion("stream", stream="yes"),
    "stop a number": completion("stop", stop=5),
    "logit_bias a list": completion("logit_bias", logit_bias=[1]),
    # Values out of range.
    "unknown model": completion("model", 404, model="gpt-5"),
    "token id beyond the vocabulary": completion("prompt", prompt=[VOCAB_SIZE]),
    "negative token id": completion("prompt", prompt=[-1]),
    "token id beyond 64 bits": completion("prompt", prompt=[2**70]),
    "prompt beyond the context": completion("prompt", prompt=[5] * (CONTEXT_TOKENS + 1)),
    "prompt and max_tokens beyond the context": completion("max_tokens", max_tokens=CONTEXT_TOKENS),
    "n = 0": completion("n", n=0),
    "n = 129": completion("n", n=129),
    "max_tokens = 0": completion("max_tokens", max_tokens=0),
    "max_tokens negative": completion("max_tokens", max_tokens=-5),
    "temperature negative": completion("temperature", temperature=-1),
    "temperature too high": completion("temperature", temperature=2.5),
    "top_p = 0": completion("top_p", top_p=0),
    "min_p = 2": completion("min_p", min_p=2),
    "top_k = -2": completion("top_k", top_k=-2),
    "repetition_penalty = 0": completion("repetition_penalty", repetition_penalty=0),
    "presence_penalty = 3": completion("presence_penalty", presence_penalty=3),
    "seed beyond 64 bits": completion("seed", seed=2**65),
    "logprobs = 100": completion("logprobs", logprobs=100),
    "five stops": completion("stop", stop=list("abcde")),
    "an empty stop": completion("stop", stop=""),
    "logit_bias beyond the vocabulary": completion("logit_bias", logit_bias={str(VOCAB_SIZE): 1}),
    "logit_bias too strong": completion("logit_bias", logit_bias={"5": 101}),
    "stop_token_ids beyond the vocabulary": completion("stop_token_ids", stop_token_ids=[VOCAB_SIZE]),
    "best_of above n": completion("best_of", best_of=2),
    "suffix": completion("suffix", suffix="end"),
    "stream_options without a stream": completion("stream_options", stream_options={"include_usage": True}),
    # Conversations.
    "no messages": chat("messages", messages=[]),
    "messages a string": chat("messages", messages="hello"),
    "a message without a role": chat("messages[0].role", messages=[{"content": "hello"}]),
    "a message without content": chat("messages[0].content", messages=[{"role": "user"}]),
    "an image": chat("messages[0].content[0].type", messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
    "tools": chat("tools", tools=[{"type": "function"}]),
    "response_format": chat("response_format", response_format={"type": "json_object"}),
    "top_logprobs without logprobs": chat("top_logprobs", top_logprobs=3),
    "a template that fails": chat("chat_template_kwargs", chat_template_kwargs=[]),
}
