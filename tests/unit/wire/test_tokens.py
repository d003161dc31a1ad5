import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import FinishReason, Token, TokenLogprobs
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.rpc.v1.common_pb2 import TokenColumns
from pdserve.wire.tokens import tokens_from_columns, tokens_to_columns

INSTANCE = 2**64 - 1

uint32 = st.integers(0, 2**32 - 1)
float32 = st.floats(width=32, allow_nan=False)


@st.composite
def logprobs(draw: st.DrawFn) -> TokenLogprobs:
    top_ids = draw(st.lists(uint32, max_size=4))
    top_logprobs = draw(st.lists(float32, min_size=len(top_ids), max_size=len(top_ids)))
    return TokenLogprobs(draw(float32), tuple(top_ids), tuple(top_logprobs))


tokens = st.builds(
    Token,
    st.builds(AttemptKey, st.builds(GroupId, st.just(INSTANCE), st.integers(0, 2**64 - 1)), uint32),
    uint32,
    uint32,
    uint32,
    st.none() | st.sampled_from(FinishReason),
    st.none() | logprobs(),
)
steps = st.lists(tokens, max_size=8)


def token(row: int, *, logprobs: TokenLogprobs | None = None) -> Token:
    return Token(AttemptKey(GroupId(INSTANCE, row), 1), 0, 100 + row, 1000 + row, None, logprobs)


def received(columns: TokenColumns) -> list[Token]:
    return tokens_from_columns(TokenColumns.FromString(columns.SerializeToString()), INSTANCE)


@given(step=steps)
def test_tokens_come_back(step: list[Token]) -> None:
    back = received(tokens_to_columns(step))
    assert back == step
    for found in back:
        assert type(found) is Token
        assert type(found.key) is AttemptKey
        assert type(found.key.group) is GroupId
        assert found.finish is None or type(found.finish) is FinishReason


@given(earlier=steps, later=steps)
def test_a_later_step_joins_below(earlier: list[Token], later: list[Token]) -> None:
    columns = tokens_to_columns(earlier)
    assert tokens_to_columns(later, columns) is columns
    assert received(columns) == earlier + later
    assert columns == tokens_to_columns(earlier + later)


def test_no_tokens_are_empty_columns() -> None:
    assert tokens_to_columns([]).ByteSize() == 0
    assert received(TokenColumns()) == []


def test_tokens_may_come_from_any_iterable() -> None:
    assert received(tokens_to_columns(token(row) for row in range(3))) == [token(row) for row in range(3)]


def test_a_finish_reason_of_none_and_logprobs_without_best_tokens_are_kept_apart() -> None:
    step = [token(0), token(1, logprobs=TokenLogprobs(-0.5)), token(2)]
    assert received(tokens_to_columns(step)) == step


def test_a_plain_token_takes_few_bytes() -> None:
    step = [token(row) for row in range(1000)]
    assert tokens_to_columns(step).ByteSize() < 12 * len(step)


def valid() -> TokenColumns:
    step = [
        token(0),
        token(1, logprobs=TokenLogprobs(-0.5, (7, 8), (-0.5, -1.5))),
        token(2, logprobs=TokenLogprobs(-0.25)),
    ]
    return tokens_to_columns(step)


@pytest.mark.parametrize("field", [f.name for f in TokenColumns.DESCRIPTOR.fields])
@pytest.mark.parametrize("longer", [True, False])
def test_columns_that_do_not_fit_are_a_protocol_violation(field: str, longer: bool) -> None:
    columns = valid()
    column: Any = getattr(columns, field)
    if longer:
        column.append(2)
    else:
        column.pop()
    with pytest.raises(PdserveError) as refusal:
        received(columns)
    assert refusal.value.code is ErrorCode.protocol_violation


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("finish", [0, 3, 0]),
        ("finish", [0, -1, 0]),
        ("logprob_row", [1, 3]),
        ("logprob_row", [2, 1]),
        ("logprob_row", [1, 1]),
        ("top_count", [3, 0]),
        ("top_count", [2**32 - 1, 2**32 - 1]),
        ("logprob", [math.nan, 0.0]),
        ("top_logprob", [0.0, math.nan]),
    ],
)
def test_a_value_that_makes_no_sense_is_a_protocol_violation(field: str, values: list[Any]) -> None:
    columns = valid()
    column: Any = getattr(columns, field)
    del column[:]
    column.extend(values)
    with pytest.raises(PdserveError) as refusal:
        received(columns)
    assert refusal.value.code is ErrorCode.protocol_violation


def test_rows_of_logprobs_may_be_any_of_the_tokens() -> None:
    columns = valid()
    columns.logprob_row[:] = [0, 2]
    assert [t.logprobs is None for t in received(columns)] == [False, True, False]
