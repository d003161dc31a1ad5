"""OpenAI's response bodies, from choices and their pieces: what a chat and a completion have in common."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from pdserve.core.events import FinishReason, Stage
from services.frontend.answers import Answer, Prompt
from services.frontend.bodies import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    Finish,
    Timings,
    Usage,
)
from services.frontend.choices import Choice, Piece
from services.frontend.request import GenerateRequest
from services.frontend.text import TextToken
from services.frontend.tokenizer import Tokenizer

LOGPROB_FLOOR = -9999.0
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_FINISHES: Mapping[FinishReason | None, Finish] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}

Chunk = ChatChunk | CompletionChunk
Body = ChatCompletion | Completion


class ResponseShape(ABC):
    """The bodies of one response.

    Args:
        response_id: its `id`.
        created: seconds since 1970.
    """

    def __init__(
        self, request: GenerateRequest, answer: Answer, tokenizer: Tokenizer, response_id: str, created: int
    ) -> None:
        self._request = request
        self._answer = answer
        self._tokenizer = tokenizer
        self._id = response_id
        self._created = created
        self._has_logprobs = request.sampling.top_logprobs is not None

    @abstractmethod
    def opening(self) -> Sequence[Chunk]:
        """The events before any text."""

    @abstractmethod
    def piece_events(self, choice: Choice, piece: Piece) -> Sequence[Chunk]:
        """A choice's new text, and its end if it has ended."""

    @abstractmethod
    def closing(self, timings: Timings | None) -> Sequence[Chunk]:
        """Usage and timings, as asked for, in one chunk without choices."""

    @abstractmethod
    def body(self, pieces: Sequence[Piece]) -> Body:
        """
        Args:
            pieces: for each choice, all of it.
        """

    def usage(self) -> Usage:
        prompt_tokens, completion_tokens = self._answer.prompt_tokens, self._answer.completion_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._answer.cached_tokens},
        }

    def _add_usage(self, chunk: Chunk) -> None:
        """To a chunk that is not the closing one."""
        if self._request.continuous_usage_stats:
            chunk["usage"] = self.usage()
        elif self._request.include_usage:
            chunk["usage"] = None

    def _close(self, chunk: Chunk, timings: Timings | None) -> bool:
        """Fill the closing chunk; returns whether it has anything to say."""
        if self._request.include_usage:
            chunk["usage"] = self.usage()
        if timings is not None:
            chunk["timings"] = timings
        return self._request.include_usage or timings is not None

    def _prompt_of(self, choice: Choice) -> Prompt:
        return self._answer.prompts[choice.index // self._request.n]


def finish_of(piece: Piece) -> Finish:
    """The finish reason of a piece that ends its choice."""
    return _FINISHES[piece.finish]


def token_ids_of(tokens: Sequence[TextToken]) -> list[int]:
    return [token.token_id for token in tokens]


def floored(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, LOGPROB_FLOOR)


def timings_of(stages: Mapping[Stage, float], ttft_s: float, total_s: float) -> Timings:
    """Seconds of each stage that was reported, of the first content byte, and of everything."""
    return {str(stage): stages[stage] for stage in Stage if stage in stages} | {"ttft": ttft_s, "total": total_s}


def json_response(
    value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(body=encode_json(value), status=status, headers=headers, content_type="application/json")


def encode_json(value: Mapping[str, Any]) -> bytes:
    """ASCII: common clients split lines at U+2028."""
    return _JSON.encode(value).encode("ascii")
