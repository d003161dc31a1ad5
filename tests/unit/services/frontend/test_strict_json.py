"""JSON bodies: what is accepted, and how each refusal names its place."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.errors import ErrorCode, PdserveError
from services.frontend.strict_json import MAX_DEPTH, parse_body


def test_an_object_is_parsed() -> None:
    assert parse_body('{"a": [1, -2.5, "é😀", null, true, {}]}'.encode()) == {"a": [1, -2.5, "é😀", None, True, {}]}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"{'a': 1}",
        b'{"a": 1,}',
        b'\xef\xbb\xbf{"a": 1}',
        '{"a": 1}'.encode("utf-16"),
        b'{"a": "\xff"}',
        b'{"a": "\x01"}',
        b'{"\\ud800": 1}',
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a":' * 100_000,
        b"[" * 100_000,
    ],
)
def test_what_is_not_a_strict_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(PdserveError) as caught:
        parse_body(body)
    assert (caught.value.code, caught.value.param) == (ErrorCode.invalid_request, None)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"temperature": NaN}', "temperature"),
        (b'{"temperature": -Infinity}', "temperature"),
        (b'{"temperature": 1e999}', "temperature"),
        (b'{"logit_bias": {"1": NaN}}', "logit_bias.1"),
        (b'{"prompt": [1, NaN]}', "prompt[1]"),
        (b'{"messages": [{"content": "a\\ud800b"}]}', "messages[0].content"),
        (b'{"messages": [{"\\udc00": 1}]}', "messages[0]"),
        (b'{"seed": ' + b"9" * 4000 + b"}", "seed"),
        (b'{"prompt": [1, 2, 18446744073709551616]}', "prompt"),
        (b'{"prompt": [1, -9223372036854775809]}', "prompt"),
        (b'{"unknown": [18446744073709551616, "a"]}', "unknown[0]"),
        (b'{"abc": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", ("abc" + "[0]" * MAX_DEPTH)[:100]),
    ],
)
def test_values_that_are_not_real_are_refused_by_their_place(body: bytes, param: str) -> None:
    with pytest.raises(PdserveError) as caught:
        parse_body(body)
    assert (caught.value.code, caught.value.param) == (ErrorCode.invalid_request, param)


def test_a_pair_of_surrogates_is_a_character() -> None:
    assert parse_body(b'{"a": "\\ud83d\\ude00"}') == {"a": "😀"}


def test_nesting_up_to_the_limit_is_allowed() -> None:
    depth = MAX_DEPTH - 1
    parse_body(b'{"a": ' + b"[" * depth + b"]" * depth + b"}")


@settings(max_examples=150, derandomize=True)
@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,0123456789eE.-NaIfinty\\ud8', max_size=60).map(str.encode))
def test_any_bytes_are_an_object_or_a_refusal(body: bytes) -> None:
    with suppress(PdserveError):
        assert isinstance(parse_body(body), dict)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"x": [' + b"[1]," * 250_000 + b"[1]]}", "250000 opening brackets"),
        (b'{"x": [' + b"1," * 4_000_001 + b"1]}", "4000000 commas"),
    ],
)
def test_more_values_than_can_be_read_in_a_moment_are_refused_before_they_are_read(body: bytes, message: str) -> None:
    with pytest.raises(PdserveError, match=message):
        parse_body(body)
