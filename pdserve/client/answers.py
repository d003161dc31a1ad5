"""Answers, whole and in pieces: the same type whether streamed or not, chat or completion."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """What the server counted, over all choices.

    Attributes:
        cached_tokens: of the prompt, found in a prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @classmethod
    def parse(cls, value: Json) -> Self:
        details = value.get("prompt_tokens_details") or {}
        # One without an answer leaves the second out.
        return cls(value["prompt_tokens"], value.get("completion_tokens", 0), details.get("cached_tokens") or 0)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event adds to one choice.

    Attributes:
        index: of the choice.
        text: "" for a choice's first and last events, as a rule.
        finish_reason: with the choice's last event.
        token_ids: if `return_token_ids` asked for them.
        logprobs: as the API writes them.
        received_s: when its bytes were read, on time.monotonic's clock.
    """

    index: int
    text: str
    finish_reason: str | None
    token_ids: tuple[int, ...]
    logprobs: Json | None
    received_s: float

    @classmethod
    def parse(cls, value: Json, received_s: float) -> Self:
        """From an entry of `choices` in a stream's event."""
        return cls(
            index=value.get("index", 0),
            text=_text_of(value, value.get("delta")),
            finish_reason=value.get("finish_reason"),
            token_ids=tuple(value.get("token_ids") or ()),
            logprobs=value.get("logprobs"),
            received_s=received_s,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the n answers to one prompt.

    Attributes:
        finish_reason: None if it has not ended.
        token_ids: if `return_token_ids` asked for them.
        logprobs: as the API writes them for a whole answer.
    """

    index: int
    text: str
    finish_reason: str | None
    token_ids: tuple[int, ...] = ()
    logprobs: Json | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, or what has come of it.

    Attributes:
        response_id: the API's `id`.
        request_id: the header `x-request-id`.
        choices: by index.
        usage: None if it has not come.
        timings: seconds by stage, if `stream_options.include_timings` asked for them.
    """

    response_id: str = ""
    model: str = ""
    request_id: str = ""
    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    timings: Json | None = None

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text if self.choices else ""

    @classmethod
    def parse(cls, body: Json, request_id: str) -> Self:
        """From a whole response."""
        choices = [
            Choice(
                index=value.get("index", position),
                text=_text_of(value, value.get("message")),
                finish_reason=value.get("finish_reason"),
                token_ids=tuple(value.get("token_ids") or ()),
                logprobs=value.get("logprobs"),
            )
            for position, value in enumerate(body["choices"])
        ]
        usage = body.get("usage")
        return cls(
            response_id=str(body.get("id", "")),
            model=str(body.get("model", "")),
            request_id=request_id,
            choices=tuple(sorted(choices, key=lambda choice: choice.index)),
            usage=Usage.parse(usage) if usage else None,
            timings=body.get("timings"),
        )


@dataclass(slots=True)
class GrowingChoice:
    """A choice to which deltas are added."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason or self.finish_reason
        if delta.logprobs is not None:
            self._add_logprobs(delta.logprobs)

    def freeze(self) -> Choice:
        return Choice(self.index, "".join(self.texts), self.finish_reason, tuple(self.token_ids), self.logprobs)

    def _add_logprobs(self, logprobs: Json) -> None:
        """Both APIs' logprobs are lists with an entry a token, under a few names."""
        so_far = self.logprobs = self.logprobs or {}
        for name, values in logprobs.items():
            if isinstance(values, Sequence) and not isinstance(values, str):
                so_far[name] = [*(so_far.get(name) or ()), *values]
            else:
                so_far.setdefault(name, values)


def _text_of(value: Json, message: Json | None) -> str:
    """A chat nests its text in a delta or a message; a completion does not."""
    return (value.get("text") if message is None else message.get("content")) or ""
