"""The bodies of /v1/completions."""

from collections.abc import Sequence

from pdserve.core.events import TokenLogprobs
from services.frontend.answers import Prompt
from services.frontend.bodies import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    Timings,
)
from services.frontend.choices import Choice, Piece
from services.frontend.responses import ResponseShape, finish_of, floored, token_ids_of
from services.frontend.text import TextToken

Row = tuple[int, TokenLogprobs | None, int]
"""A token id, its log-probabilities, and where its text begins."""


class CompletionShape(ResponseShape):
    """See ResponseShape. With `echo` each choice begins with its prompt, and its offsets count from there."""

    def opening(self) -> list[CompletionChunk]:
        return [
            self._chunk([self._opening(choice)])
            for choice in self._answer.choices
            if self._prompt_of(choice).text or self._request.return_token_ids
        ]

    def piece_events(self, choice: Choice, piece: Piece) -> list[CompletionChunk]:
        events = []
        tokens = piece.tokens
        if piece.text:
            events.append(self._chunk([self._part(choice, piece.text, tokens)]))
            tokens = ()
        if piece.finish is not None:
            last = self._part(choice, "", tokens)
            last["finish_reason"] = finish_of(piece)
            events.append(self._chunk([last]))
        return events

    def closing(self, timings: Timings | None) -> list[CompletionChunk]:
        chunk = self._bare_chunk([])
        return [chunk] if self._close(chunk, timings) else []

    def body(self, pieces: Sequence[Piece]) -> Completion:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._request.model,
            "choices": list(map(self._choice, self._answer.choices, pieces)),
            "usage": self.usage(),
        }

    def _choice(self, choice: Choice, piece: Piece) -> CompletionChoice:
        prompt = self._prompt_of(choice)
        entry: CompletionChoice = {
            "index": choice.index,
            "text": prompt.text + piece.text,
            "logprobs": self._columns([*self._prompt_rows(prompt), *self._rows(choice, piece.tokens)]),
            "finish_reason": finish_of(piece),
        }
        if self._request.return_token_ids:
            entry["token_ids"] = token_ids_of(piece.tokens)
            entry["prompt_token_ids"] = list(prompt.group.prompt_ids)
        return entry

    def _opening(self, choice: Choice) -> CompletionChunkChoice:
        prompt = self._prompt_of(choice)
        entry = self._part(choice, prompt.text, ())
        if rows := self._prompt_rows(prompt):
            entry["logprobs"] = self._columns(rows)
        if self._request.return_token_ids:
            entry["prompt_token_ids"] = list(prompt.group.prompt_ids)
        return entry

    def _part(self, choice: Choice, text: str, tokens: Sequence[TextToken]) -> CompletionChunkChoice:
        entry: CompletionChunkChoice = {
            "index": choice.index,
            "text": text,
            "logprobs": self._columns(self._rows(choice, tokens)) if tokens else None,
            "finish_reason": None,
        }
        if self._request.return_token_ids and tokens:
            entry["token_ids"] = token_ids_of(tokens)
        return entry

    def _chunk(self, choices: list[CompletionChunkChoice]) -> CompletionChunk:
        chunk = self._bare_chunk(choices)
        self._add_usage(chunk)
        return chunk

    def _bare_chunk(self, choices: list[CompletionChunkChoice]) -> CompletionChunk:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._request.model,
            "choices": choices,
        }

    def _rows(self, choice: Choice, tokens: Sequence[TextToken]) -> list[Row]:
        begin = len(self._prompt_of(choice).text)
        return [(token.token_id, token.logprobs, begin + token.offset) for token in tokens]

    def _prompt_rows(self, prompt: Prompt) -> list[Row]:
        """Of the prompt, where it is repeated and its log-probabilities are wanted."""
        return list(zip(prompt.group.prompt_ids, prompt.group.scores.entries, prompt.offsets, strict=False))

    def _columns(self, rows: Sequence[Row]) -> CompletionLogprobs | None:
        if not self._has_logprobs:
            return None
        columns: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, logprobs, offset in rows:
            columns["tokens"].append(self._name(token_id))
            columns["token_logprobs"].append(None if logprobs is None else floored(logprobs.logprob))
            columns["top_logprobs"].append(None if logprobs is None else self._top(token_id, logprobs))
            columns["text_offset"].append(offset)
        return columns

    def _top(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The best tokens and the chosen one."""
        best = dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))
        best.setdefault(token_id, logprobs.logprob)
        return {self._name(best_id): floored(logprob) for best_id, logprob in best.items()}

    def _name(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
