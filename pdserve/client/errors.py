"""What can go wrong with a request, by whose fault it is.

ClientError                 carries what had come of the answer
├── NoConnection            nobody answers there: nothing was asked
├── BadResponse             somebody answers, but not in this API's form
├── ServerError             the server says what went wrong, by a status or in the stream
│   ├── RequestRefused      the request's fault: the same again fails again
│   ├── Overloaded          nobody's fault: come back in `retry_after_s`
│   ├── ServerFailed        the server's fault
│   └── DeadlinePassed      the server's time for this answer ran out
└── IncompleteAnswer        the answer stopped without a word
    ├── TruncatedStream     the connection ended or broke
    ├── IdleTimeout         no event came for too long, heartbeats or not
    └── UsageMismatch       it looks whole, but the tokens that came are not those that were counted
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from pdserve.client.answers import Answer
from pdserve.core.errors import ErrorCode, Fault

# Too many requests; service unavailable.
BUSY_STATUSES = (429, 503)
_ECHO_CHARACTERS = 200


class ClientError(Exception):
    """Anything that this client raises about a request.

    Attributes:
        answer: what had come of it; None before the first byte.
    """

    def __init__(self, message: str, *, answer: Answer | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.answer = answer


class NoConnection(ClientError):
    """Nobody could be reached."""


class BadResponse(ClientError):
    """What came is not of this API: another server at this address, or damage on the way."""


class ServerError(ClientError):
    """The server's own words.

    Attributes:
        code: as the API names it; "" if it gives none.
        kind: the API's `type`.
        param: the request field at fault.
        status: of HTTP; 200 for an error inside a stream.
        retry_after_s: when to come back, if the server says so.
        request_id: to ask the operator about.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        kind: str = "",
        param: str | None = None,
        status: int = 200,
        retry_after_s: float | None = None,
        request_id: str = "",
        answer: Answer | None = None,
    ) -> None:
        super().__init__(message, answer=answer)
        self.code = code
        self.kind = kind
        self.param = param
        self.status = status
        self.retry_after_s = retry_after_s
        self.request_id = request_id


class RequestRefused(ServerError):
    """The request's fault."""


class Overloaded(ServerError):
    """Nobody's fault: there is no room now, or the server is stopping."""


class ServerFailed(ServerError):
    """The server's fault."""


class DeadlinePassed(ServerError):
    """A time limit of the server."""


class IncompleteAnswer(ClientError):
    """The answer is not whole, and nobody said why."""


class TruncatedStream(IncompleteAnswer):
    """It ended without a finish_reason for every choice, or without [DONE]."""


class IdleTimeout(IncompleteAnswer):
    """Nothing but heartbeats, or not even those, for too long."""


class UsageMismatch(IncompleteAnswer):
    """Usage did not come, or counts other tokens than came."""


_OF_FAULT: Mapping[Fault, type[ServerError]] = {
    Fault.CLIENT: RequestRefused,
    Fault.CAPACITY: Overloaded,
    Fault.SHUTDOWN: Overloaded,
    Fault.WORKER: ServerFailed,
    Fault.TIMEOUT: DeadlinePassed,
}


def error_of_envelope(
    error: object,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    answer: Answer | None = None,
) -> ServerError:
    """
    Args:
        error: the value of "error" in what the server sent.
    """
    fields: Mapping[str, Any] = error if isinstance(error, dict) else {"message": error}
    code = str(fields.get("code") or "")
    param = fields.get("param")
    headers = headers or {}
    return _class_of(code, status)(
        str(fields.get("message") or code or "the server gives no reason"),
        code=code,
        kind=str(fields.get("type") or ""),
        param=None if param is None else str(param),
        status=status,
        retry_after_s=parse_retry_after(headers.get("retry-after", "")),
        request_id=headers.get("x-request-id", ""),
        answer=answer,
    )


def error_of_response(url: str, status: int, headers: Mapping[str, str], body: bytes) -> ClientError:
    """Why there is no answer, from a response that is not one."""
    try:
        content = json.loads(body)
    except ValueError:
        content = None
    if isinstance(content, dict) and content.get("error"):
        return error_of_envelope(content["error"], status=status, headers=headers)
    message = f"{url} answers {status} with something that is not OpenAI's API"
    if status in BUSY_STATUSES:
        # A load balancer in front speaks for a server that it cannot reach.
        return Overloaded(message, status=status, retry_after_s=parse_retry_after(headers.get("retry-after", "")))
    return BadResponse(f"{message}: {body[:_ECHO_CHARACTERS].decode('utf-8', 'replace')!r}")


def parse_retry_after(value: str) -> float | None:
    """Seconds from now; None for what is neither seconds nor a date."""
    if value.isascii() and value.strip().isdigit():
        return float(value)
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def _class_of(code: str, status: int) -> type[ServerError]:
    if code in set(ErrorCode):
        return _OF_FAULT[ErrorCode(code).spec.fault]
    # Another server's code, or one newer than this client.
    if status in BUSY_STATUSES:
        return Overloaded
    if status in (408, 504):
        return DeadlinePassed
    return RequestRefused if 400 <= status < 500 else ServerFailed
