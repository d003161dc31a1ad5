"""What became of one request: its outcome, and the time of every token."""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

REFUSALS = frozenset({429, 503})
DONE = b"[DONE]"


class Outcome(StrEnum):
    OK = "ok"
    REFUSED = "refused"
    """The server said that it has no room: status 429 or 503."""
    HTTP_ERROR = "http_error"
    ERROR_IN_BAND = "error_in_band"
    TRUNCATED = "truncated"
    """The stream ended without a finish_reason, without [DONE] or in the middle of an event."""
    MALFORMED = "malformed"
    """An event that is not the JSON of a chunk."""
    CONNECTION = "connection"
    """No response at all."""
    TIMEOUT = "timeout"


@dataclass(slots=True)
class Reply:
    """What one request brought, as read; judged only when the run is over, so that reading stays cheap.

    All times are of this process's monotonic clock, in seconds.

    Attributes:
        due_s: when the request should have been sent; later sending counts against the server's latency.
        times_s: when the read that completed each payload returned.
        body: the start of a response that is not a stream.
        broken: why the transport gave up, "" if it did not.
        cut: whether bytes of an unfinished event were left over.
    """

    due_s: float
    sent_s: float
    ended_s: float = 0.0
    status: int | None = None
    times_s: list[float] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    body: bytes = b""
    broken: str = ""
    timed_out: bool = False
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """One judged request.

    Attributes:
        token_times_s: arrival of each position. Tokens that share an event share its time, so gaps are per token.
        completion_tokens: the server's own count, or the tokens seen if it gave none.
        prompt_tokens, cached_tokens: by the server's usage; None if it gave none.
        detail: why it failed, "" if it did not.
        largest_event_tokens: tokens of the event that had most.
    """

    outcome: Outcome
    due_s: float
    sent_s: float
    ended_s: float
    token_times_s: tuple[float, ...]
    completion_tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None
    finish_reason: str | None
    detail: str
    largest_event_tokens: int = 0

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def ttft_s(self) -> float | None:
        """From the moment the request was due to its first token; None if there was none."""
        return self.token_times_s[0] - self.due_s if self.token_times_s else None

    @property
    def itls_s(self) -> list[float]:
        """Gaps between neighbouring tokens: one fewer than tokens."""
        times = self.token_times_s
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None with fewer than two."""
        if len(self.token_times_s) < 2 or self.completion_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.completion_tokens - 1)

    @property
    def total_s(self) -> float:
        """From the moment the request was due to the end of its stream."""
        return self.ended_s - self.due_s


@dataclass(slots=True)
class _Contents:
    token_times_s: list[float] = field(default_factory=list)
    largest_event_tokens: int = 0
    finish_reason: str | None = None
    done: bool = False
    names_ids: bool = False
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    malformed: str = ""


def judge(reply: Reply) -> Sample:
    """Read a reply's payloads and decide what became of the request."""
    contents = _contents(reply)
    outcome, detail = _outcome(reply, contents)
    usage = contents.usage
    details = usage.get("prompt_tokens_details")
    return Sample(
        outcome=outcome,
        due_s=reply.due_s,
        sent_s=reply.sent_s,
        ended_s=reply.ended_s,
        token_times_s=tuple(contents.token_times_s),
        completion_tokens=usage.get("completion_tokens") or len(contents.token_times_s),
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=details.get("cached_tokens") if isinstance(details, dict) else None,
        finish_reason=contents.finish_reason,
        detail=detail,
        largest_event_tokens=contents.largest_event_tokens,
    )


def _outcome(reply: Reply, contents: _Contents) -> tuple[Outcome, str]:
    if reply.timed_out:
        return Outcome.TIMEOUT, reply.broken
    if reply.status is None:
        return Outcome.CONNECTION, reply.broken
    if reply.status != 200:
        outcome = Outcome.REFUSED if reply.status in REFUSALS else Outcome.HTTP_ERROR
        return outcome, f"{reply.status}: {reply.body[:200].decode(errors='replace')}"
    if contents.error:
        return Outcome.ERROR_IN_BAND, contents.error
    if contents.malformed:
        return Outcome.MALFORMED, contents.malformed
    missing = [reply.broken] if reply.broken else []
    missing += ["cut inside an event"] if reply.cut else []
    missing += ["no finish_reason"] if contents.finish_reason is None else []
    missing += ["no [DONE]"] if not contents.done else []
    return (Outcome.TRUNCATED, ", ".join(missing)) if missing else (Outcome.OK, "")


def _contents(reply: Reply) -> _Contents:
    contents = _Contents()
    for time_s, payload in zip(reply.times_s, reply.payloads, strict=True):
        if payload.strip() == DONE:
            contents.done = True
            break
        try:
            chunk = json.loads(payload)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            contents.malformed = contents.malformed or f"not a JSON object: {payload[:100].decode(errors='replace')}"
            continue
        if chunk.get("error"):
            contents.error = contents.error or json.dumps(chunk["error"])[:300]
        if isinstance(chunk.get("usage"), dict):
            contents.usage = chunk["usage"]
        for choice in chunk.get("choices") or ():
            contents.names_ids = contents.names_ids or isinstance(choice.get("token_ids"), list)
            tokens = _tokens(choice, contents.names_ids)
            contents.token_times_s.extend([time_s] * tokens)
            contents.largest_event_tokens = max(contents.largest_event_tokens, tokens)
            contents.finish_reason = choice.get("finish_reason") or contents.finish_reason
    return contents


def _tokens(choice: dict[str, Any], names_ids: bool) -> int:
    """Tokens of one event: as many as it names; if the server names none anywhere, one for each event with text."""
    if names_ids:
        return len(choice.get("token_ids") or ())
    delta = choice.get("delta") or {}
    return 1 if choice.get("text") or any(delta.get(key) for key in ("content", "reasoning_content")) else 0
