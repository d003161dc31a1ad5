"""The bodies of /v1/chat/completions."""

from collections.abc import Sequence

from services.frontend.bodies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    NamedLogprob,
    Timings,
    TokenLogprob,
)
from services.frontend.choices import Choice, Piece
from services.frontend.responses import LOGPROB_FLOOR, ResponseShape, finish_of, floored, token_ids_of
from services.frontend.text import TextToken


class ChatShape(ResponseShape):
    """See ResponseShape. A stream opens with a role for each choice."""

    def opening(self) -> list[ChatChunk]:
        return [self._opening(choice) for choice in self._answer.choices]

    def piece_events(self, choice: Choice, piece: Piece) -> list[ChatChunk]:
        events = []
        tokens = piece.tokens
        if piece.text:
            events.append(self._chunk([self._part(choice, {"content": piece.text}, tokens)]))
            tokens = ()
        if piece.finish is not None:
            last = self._part(choice, {}, tokens)
            last["finish_reason"] = finish_of(piece)
            events.append(self._chunk([last]))
        return events

    def closing(self, timings: Timings | None) -> list[ChatChunk]:
        chunk = self._bare_chunk([])
        return [chunk] if self._close(chunk, timings) else []

    def body(self, pieces: Sequence[Piece]) -> ChatCompletion:
        body: ChatCompletion = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._request.model,
            "choices": list(map(self._choice, self._answer.choices, pieces)),
            "usage": self.usage(),
        }
        if self._request.return_token_ids:
            body["prompt_token_ids"] = list(self._answer.prompts[0].group.prompt_ids)
        return body

    def _choice(self, choice: Choice, piece: Piece) -> ChatChoice:
        entry: ChatChoice = {
            "index": choice.index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs_of(piece.tokens),
            "finish_reason": finish_of(piece),
        }
        if self._request.return_token_ids:
            entry["token_ids"] = token_ids_of(piece.tokens)
        return entry

    def _opening(self, choice: Choice) -> ChatChunk:
        chunk = self._chunk([self._part(choice, {"role": "assistant", "content": ""}, ())])
        if self._request.return_token_ids:
            chunk["prompt_token_ids"] = list(self._answer.prompts[0].group.prompt_ids)
        return chunk

    def _part(self, choice: Choice, delta: ChatDelta, tokens: Sequence[TextToken]) -> ChatChunkChoice:
        entry: ChatChunkChoice = {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs_of(tokens) if tokens else None,
            "finish_reason": None,
        }
        if self._request.return_token_ids and tokens:
            entry["token_ids"] = token_ids_of(tokens)
        return entry

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        chunk = self._bare_chunk(choices)
        self._add_usage(chunk)
        return chunk

    def _bare_chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._request.model,
            "choices": choices,
        }

    def _logprobs_of(self, tokens: Sequence[TextToken]) -> ChatLogprobs | None:
        if not self._has_logprobs:
            return None
        return {"content": list(map(self._logprob, tokens)), "refusal": None}

    def _logprob(self, token: TextToken) -> TokenLogprob:
        logprobs = token.logprobs
        best = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True) if logprobs else ()
        chosen = self._named(token.token_id, logprobs.logprob if logprobs else LOGPROB_FLOOR)
        return {
            "token": chosen["token"],
            "logprob": chosen["logprob"],
            "bytes": chosen["bytes"],
            "top_logprobs": [self._named(token_id, logprob) for token_id, logprob in best],
        }

    def _named(self, token_id: int, logprob: float) -> NamedLogprob:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": floored(logprob), "bytes": list(raw)}
