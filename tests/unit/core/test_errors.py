import pickle
from http import HTTPStatus

import grpc
import pytest

from pdserve.core.errors import (
    ERROR_TABLE,
    ErrorCode,
    ErrorSpec,
    Fault,
    IllegalTransition,
    InvalidRequest,
    PdserveError,
)

# Not in the standard's list, but what logs and metrics show for a client that left.
CLIENT_CLOSED_REQUEST = 499


def test_every_code_has_a_row() -> None:
    assert set(ERROR_TABLE) == set(ErrorCode)
    assert all(code.spec is ERROR_TABLE[code] for code in ErrorCode)


def test_a_code_is_written_as_it_is_named() -> None:
    assert all(code.value == code.name == str(code) for code in ErrorCode)


@pytest.mark.parametrize("spec", ERROR_TABLE.values(), ids=ERROR_TABLE)
def test_a_row_names_statuses_that_exist(spec: ErrorSpec) -> None:
    assert spec.http_status in {*HTTPStatus, CLIENT_CLOSED_REQUEST}
    assert spec.http_status >= 400
    assert grpc.StatusCode[spec.grpc_status] is not grpc.StatusCode.OK
    assert spec.openai_type


@pytest.mark.parametrize("spec", ERROR_TABLE.values(), ids=ERROR_TABLE)
def test_the_fault_decides_what_is_answered_and_tried_again(spec: ErrorSpec) -> None:
    assert (spec.fault is Fault.CLIENT) == (400 <= spec.http_status < 500)
    if spec.fault is Fault.CLIENT:
        assert not spec.retryable
    if spec.fault is Fault.CAPACITY:
        assert (spec.http_status, spec.retryable) == (503, True)
    if spec.fault is Fault.TIMEOUT:
        assert spec.http_status == 504


def test_an_error_says_its_code_and_its_message() -> None:
    error = PdserveError(ErrorCode.queue_full, "1024 requests wait already", retry_after_s=2.5)
    assert str(error) == "queue_full: 1024 requests wait already"
    assert error.spec.http_status == 503
    assert (error.param, error.retry_after_s) == (None, 2.5)


def test_an_invalid_request_names_the_field() -> None:
    error = InvalidRequest("top_p", "top_p must be above 0")
    assert isinstance(error, PdserveError)
    assert (error.code, error.param) == (ErrorCode.invalid_request, "top_p")
    too_long = InvalidRequest("messages", "too long", ErrorCode.context_length_exceeded)
    assert too_long.code is ErrorCode.context_length_exceeded


def test_an_illegal_transition_names_state_and_event() -> None:
    error = IllegalTransition(ValueError("state"), KeyError("event"))
    assert str(error) == "KeyError in state ValueError"
    assert (str(error.state), str(error.event)) == ("state", "'event'")


@pytest.mark.parametrize(
    "error",
    [
        PdserveError(ErrorCode.queue_full, "full", retry_after_s=2.5),
        InvalidRequest("top_p", "top_p must be above 0"),
        IllegalTransition("state", "event"),
    ],
)
def test_an_error_crosses_a_process_boundary_whole(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
