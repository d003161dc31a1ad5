"""A prompt's log-probabilities keep their shape on the wire, and what makes no sense is refused."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import PromptLogprobs, TokenLogprobs
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.rpc.v1 import session_pb2
from pdserve.wire.prompt_logprobs import prompt_logprobs_from_proto, prompt_logprobs_to_proto

KEY = AttemptKey(GroupId(5, 7), 2)
float32 = st.floats(width=32, allow_nan=False, max_value=0)


@st.composite
def parts(draw: st.DrawFn) -> PromptLogprobs:
    count = draw(st.integers(0, 3))
    ids = st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count).map(tuple)
    entry = st.builds(TokenLogprobs, float32, ids, st.lists(float32, min_size=count, max_size=count).map(tuple))
    entries = draw(st.lists(entry, min_size=1, max_size=5))
    return PromptLogprobs(KEY, draw(st.integers(1, 2**31)), tuple(entries))


@given(parts())
def test_there_and_back(part: PromptLogprobs) -> None:
    message = session_pb2.PromptLogprobs.FromString(prompt_logprobs_to_proto(part).SerializeToString())
    assert prompt_logprobs_from_proto(message, KEY.group.instance) == part


@pytest.mark.parametrize(
    "fields",
    [
        {"start": 0},
        {"attempt": 0},
        {"top_id": [1, 2, 3]},
        {"top_logprob": [-1.0]},
        {"top_count": 2},
        {"logprob": [math.nan, -1.0]},
        {"top_logprob": [math.nan, -1.0]},
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    right = {
        "group": 7,
        "attempt": 2,
        "start": 1,
        "logprob": [-1.0, -2.0],
        "top_count": 1,
        "top_id": [3, 4],
        "top_logprob": [-1.0, -2.0],
    }
    prompt_logprobs_from_proto(session_pb2.PromptLogprobs(**right), 5)
    with pytest.raises(PdserveError) as caught:
        prompt_logprobs_from_proto(session_pb2.PromptLogprobs(**(right | fields)), 5)
    assert caught.value.code is ErrorCode.protocol_violation
