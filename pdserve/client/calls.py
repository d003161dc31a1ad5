"""What is asked, independent of how it is sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"

Messages: TypeAlias = str | Sequence[Mapping[str, Any]]
Prompt: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Call:
    """One request of the API.

    Attributes:
        fields: the body without `model`, which the server may have to be asked for.
        num_choices: how many a whole answer has.
    """

    path: str
    fields: Mapping[str, Any]
    num_choices: int

    @property
    def model(self) -> str:
        """The one that the caller names; "" to take the server's first."""
        return self.fields.get("model") or ""

    @property
    def wants_token_ids(self) -> bool:
        return bool(self.fields.get("return_token_ids"))

    def body(self, model: str) -> dict[str, Any]:
        return {**self.fields, "model": model}


def chat_call(messages: Messages, *, stream: bool, fields: Mapping[str, Any]) -> Call:
    """
    Args:
        messages: as the API takes them; a string is one message of the user.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return Call(CHAT_PATH, {"messages": list(messages)} | _shared(stream, fields), _siblings(fields))


def completion_call(prompt: Prompt, *, stream: bool, fields: Mapping[str, Any]) -> Call:
    """
    Args:
        prompt: one or several, as text or as token ids.
    """
    several = not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], int)
    num_choices = _siblings(fields) * (len(prompt) if several else 1)
    return Call(COMPLETION_PATH, {"prompt": prompt} | _shared(stream, fields), num_choices)


def _shared(stream: bool, fields: Mapping[str, Any]) -> dict[str, Any]:
    # Usage is how a whole answer is told from one that only looks whole.
    asked = {"stream_options": (fields.get("stream_options") or {}) | {"include_usage": True}} if stream else {}
    return {**fields, "stream": stream, **asked}


def _siblings(fields: Mapping[str, Any]) -> int:
    n = fields.get("n")
    # What is no number is for the server to refuse.
    return n if isinstance(n, int) else 1
