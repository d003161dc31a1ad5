"""Which error a server's words become: by whose fault it is."""

import json

import pytest

from pdserve.client.errors import (
    BadResponse,
    ClientError,
    DeadlinePassed,
    Overloaded,
    RequestRefused,
    ServerFailed,
    error_of_envelope,
    error_of_response,
)
from pdserve.core.errors import ErrorCode, Fault

OF_FAULT = {
    Fault.CLIENT: RequestRefused,
    Fault.CAPACITY: Overloaded,
    Fault.SHUTDOWN: Overloaded,
    Fault.WORKER: ServerFailed,
    Fault.TIMEOUT: DeadlinePassed,
}


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_is_of_its_fault(code: ErrorCode) -> None:
    error = error_of_envelope({"message": "m", "code": code.value, "type": code.spec.openai_type, "param": None})
    assert type(error) is OF_FAULT[code.spec.fault]
    assert (error.code, error.message, error.param) == (code.value, "m", None)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RequestRefused),
        (404, RequestRefused),
        (429, Overloaded),
        (503, Overloaded),
        (408, DeadlinePassed),
        (504, DeadlinePassed),
        (500, ServerFailed),
    ],
)
def test_an_unknown_code_is_judged_by_its_status(status: int, kind: type[ClientError]) -> None:
    body = json.dumps({"error": {"message": "m", "code": "of_tomorrow"}}).encode()
    error = error_of_response("http://x", status, {"retry-after": "3"}, body)
    assert type(error) is kind


@pytest.mark.parametrize("value", ["just words", {"message": "just words"}])
def test_sparse_envelopes_are_read(value: object) -> None:
    assert error_of_envelope(value).message == "just words"


def test_a_page_of_a_proxy_is_named() -> None:
    assert type(error_of_response("http://x", 502, {}, b"<html>")) is BadResponse
    busy = error_of_response("http://x", 503, {"retry-after": "3"}, b"<html>")
    assert isinstance(busy, Overloaded)
    assert busy.retry_after_s == 3.0
