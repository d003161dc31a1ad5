"""OpenAI's response bodies, from choices and their pieces."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.core.events import Stage
from services.frontend.answers import Answer
from services.frontend.choices import Choice, Piece
from services.frontend.request import Endpoint, GenerateRequest
from services.frontend.text import TextToken
from services.frontend.tokenizer import Tokenizer

LOGPROB_FLOOR = -9999.0
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)

Json = dict[str, Any]


class ResponseShape:
    """The bodies of one response. A chat and a completion differ in names and nesting.

    Args:
        response_id: "chatcmpl-…" or "cmpl-…".
        created: seconds since 1970.
    """

    def __init__(
        self, request: GenerateRequest, answer: Answer, tokenizer: Tokenizer, response_id: str, created: int
    ) -> None:
        self._request = request
        self._answer = answer
        self._tokenizer = tokenizer
        self._chat = request.endpoint is Endpoint.CHAT
        self._logprobs = request.sampling.top_logprobs is not None
        self._echo = [prompt.text if request.echo else "" for prompt in answer.prompts]
        self._base: Json = {"id": response_id, "object": "", "created": created, "model": request.model}

    # A stream's events.

    def opening(self) -> list[Json]:
        """What comes before any text: a role for each choice of a chat, the prompt that a completion repeats."""
        if not self._chat:
            echoed = [(choice, self._echo[choice.index // self._request.n]) for choice in self._answer.choices]
            return [self._chunk([self._part(choice.index, text, (), None)]) for choice, text in echoed if text]
        events = []
        for choice in self._answer.choices:
            entry: Json = {
                "index": choice.index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            event = self._chunk([entry])
            if self._request.return_token_ids:
                event["prompt_token_ids"] = list(self._answer.prompts[0].group.prompt_ids)
            events.append(event)
        return events

    def piece_events(self, choice: Choice, piece: Piece) -> list[Json]:
        """A choice's new text, and its end if it has ended."""
        events = []
        tokens = piece.tokens
        if piece.text:
            events.append(self._chunk([self._part(choice.index, piece.text, tokens, None)]))
            tokens = ()
        if piece.finish is not None:
            events.append(self._chunk([self._part(choice.index, "", tokens, str(piece.finish))]))
        return events

    def closing(self, timings: Mapping[str, float] | None) -> list[Json]:
        """Usage and timings, as asked for, in one chunk without choices."""
        if not self._request.include_usage and timings is None:
            return []
        event = self._chunk([])
        if self._request.include_usage:
            event["usage"] = self.usage()
        if timings is not None:
            event["timings"] = dict(timings)
        return [event]

    # A whole body.

    def body(self, pieces: Sequence[Piece]) -> Json:
        """
        Args:
            pieces: for each choice, all of it.
        """
        choices = []
        for choice, piece in zip(self._answer.choices, pieces, strict=True):
            text = self._echo[choice.index // self._request.n] + piece.text
            entry: Json = {"index": choice.index}
            if self._chat:
                entry["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                entry["text"] = text
            entry["logprobs"] = self._logprobs_of(choice.index, piece.tokens)
            entry["finish_reason"] = str(piece.finish)
            if self._request.return_token_ids:
                entry["token_ids"] = [token.token_id for token in piece.tokens]
                if not self._chat:
                    prompt = self._answer.prompts[choice.index // self._request.n]
                    entry["prompt_token_ids"] = list(prompt.group.prompt_ids)
            choices.append(entry)
        body = self._base | {"object": "chat.completion" if self._chat else "text_completion", "choices": choices}
        if self._chat and self._request.return_token_ids:
            body["prompt_token_ids"] = list(self._answer.prompts[0].group.prompt_ids)
        return body | {"usage": self.usage()}

    def usage(self) -> Json:
        prompt_tokens, completion_tokens = self._answer.prompt_tokens, self._answer.completion_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._answer.cached_tokens},
        }

    def _chunk(self, choices: list[Json]) -> Json:
        name = "chat.completion.chunk" if self._chat else "text_completion"
        chunk = self._base | {"object": name, "choices": choices}
        if self._request.continuous_usage_stats:
            chunk["usage"] = self.usage()
        elif self._request.include_usage:
            chunk["usage"] = None
        return chunk

    def _part(self, index: int, text: str, tokens: Sequence[TextToken], finish: str | None) -> Json:
        entry: Json = {"index": index}
        if self._chat:
            entry["delta"] = {"content": text} if text else {}
        else:
            entry["text"] = text
        entry["logprobs"] = self._logprobs_of(index, tokens) if tokens else None
        entry["finish_reason"] = finish
        if self._request.return_token_ids and tokens:
            entry["token_ids"] = [token.token_id for token in tokens]
        return entry

    def _logprobs_of(self, index: int, tokens: Sequence[TextToken]) -> Json | None:
        if not self._logprobs:
            return None
        if self._chat:
            return {"content": [self._chat_logprob(token) for token in tokens], "refusal": None}
        begin = len(self._echo[index // self._request.n])
        return {
            "tokens": [self._tokenizer.token_text(token.token_id) for token in tokens],
            "token_logprobs": [_floored(token.logprobs.logprob) if token.logprobs else None for token in tokens],
            "top_logprobs": [self._top_logprobs(token) for token in tokens],
            "text_offset": [begin + token.offset for token in tokens],
        }

    def _chat_logprob(self, token: TextToken) -> Json:
        logprobs = token.logprobs
        best = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True) if logprobs else ()
        return self._named(token.token_id, logprobs.logprob if logprobs else LOGPROB_FLOOR) | {
            "top_logprobs": [self._named(token_id, logprob) for token_id, logprob in best]
        }

    def _named(self, token_id: int, logprob: float) -> Json:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": _floored(logprob), "bytes": list(raw)}

    def _top_logprobs(self, token: TextToken) -> dict[str, float] | None:
        """The best tokens and the chosen one."""
        if token.logprobs is None:
            return None
        best = dict(zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True))
        best.setdefault(token.token_id, token.logprobs.logprob)
        return {self._tokenizer.token_text(token_id): _floored(logprob) for token_id, logprob in best.items()}


def timings_of(stages: Mapping[Stage, float], ttft_s: float, total_s: float) -> dict[str, float]:
    """Seconds of each stage that was reported, of the first content byte, and of everything."""
    return {str(stage): stages[stage] for stage in Stage if stage in stages} | {"ttft": ttft_s, "total": total_s}


def encode_json(value: Mapping[str, Any]) -> bytes:
    """ASCII: common clients split lines at U+2028."""
    return _JSON.encode(value).encode("ascii")


def _floored(logprob: float) -> float:
    return max(logprob, LOGPROB_FLOOR)
