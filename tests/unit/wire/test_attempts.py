from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.attempt import Attempt
from pdserve.core.errors import ErrorCode, InvalidRequest, PdserveError
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.core.sampling import SamplingParams
from pdserve.rpc.v1 import session_pb2
from pdserve.wire.attempts import PromptAssembly, attempt_from_proto, attempt_to_proto, prompt_parts

INSTANCE = 77
PARAMS = SamplingParams(max_tokens=5)


@st.composite
def attempts(draw: st.DrawFn) -> Attempt:
    prompt_tokens = draw(st.integers(1, 2**31))
    return Attempt(
        key=AttemptKey(GroupId(INSTANCE, draw(st.integers(0, 2**64 - 1))), draw(st.integers(1, 2**32 - 1))),
        siblings=tuple(draw(st.lists(st.integers(0, 127), min_size=1, max_size=5, unique=True))),
        prompt_tokens=prompt_tokens,
        total_tokens=draw(st.integers(prompt_tokens, 2**32 - 1)),
        params=SamplingParams(max_tokens=draw(st.integers(1, 1000)), temperature=draw(st.floats(0, 2))),
        seed=draw(st.integers(0, 2**64 - 1)),
        model=draw(st.text()),
        adapter=draw(st.text()),
        cache_scope=draw(st.text()),
        # Exact in whole milliseconds.
        age_s=draw(st.integers(0, 10**6)) / 8,
        remaining_s=draw(st.none() | st.integers(1, 10**6).map(lambda n: n / 8)),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
    )


@given(attempt=attempts())
def test_an_attempt_comes_back(attempt: Attempt) -> None:
    message = session_pb2.Attempt.FromString(attempt_to_proto(attempt).SerializeToString())
    assert attempt_from_proto(message, INSTANCE) == attempt


def attempt(**changes: Any) -> Attempt:
    fields = {
        "key": AttemptKey(GroupId(INSTANCE, 1), 1),
        "siblings": (0,),
        "prompt_tokens": 3,
        "total_tokens": 4,
        "params": PARAMS,
        "seed": 9,
        "model": "m",
    }
    return Attempt(**{**fields, **changes})


@pytest.mark.parametrize("remaining_s", [0.0, -1.0, 1e-6])
def test_a_deadline_that_has_passed_is_still_one(remaining_s: float) -> None:
    message = attempt_to_proto(attempt(remaining_s=remaining_s))
    assert attempt_from_proto(message, INSTANCE).remaining_s == 0.001


@pytest.mark.parametrize(
    "changes",
    [
        {"siblings": ()},
        {"siblings": (1, 1)},
        {"siblings": (0, 128)},
        {"prompt_tokens": 0},
        {"prompt_tokens": 5},
        {"key": AttemptKey(GroupId(INSTANCE, 1), 0)},
    ],
)
def test_an_attempt_that_makes_no_sense_is_a_protocol_violation(changes: dict[str, Any]) -> None:
    message = attempt_to_proto(attempt(**changes))
    with pytest.raises(PdserveError) as refusal:
        attempt_from_proto(message, INSTANCE)
    assert refusal.value.code is ErrorCode.protocol_violation


def test_a_sampling_parameter_out_of_range_is_an_invalid_request() -> None:
    message = attempt_to_proto(attempt())
    message.sampling.temperature = 5.0
    with pytest.raises(InvalidRequest, match="temperature"):
        attempt_from_proto(message, INSTANCE)


def collect(assembly: PromptAssembly, parts: Any) -> None:
    for part in parts:
        assembly.add(session_pb2.PromptPart.FromString(part.SerializeToString()))


@given(token_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=200), max_bytes=st.integers(70, 400))
def test_a_prompt_of_any_length_travels_in_parts_that_fit(token_ids: list[int], max_bytes: int) -> None:
    parts = list(prompt_parts(2**64 - 1, 2**32 - 1, token_ids, max_bytes))
    assert all(session_pb2.Command(prompt_part=part).ByteSize() <= max_bytes for part in parts)
    assembly = PromptAssembly(max_tokens=len(token_ids), max_parts=len(parts))
    collect(assembly, parts)
    assert assembly.num_tokens == len(token_ids)
    taken = assembly.take(2**64 - 1, 2**32 - 1, len(token_ids))
    assert taken.dtype == np.int32
    assert taken.tolist() == token_ids
    assert (assembly.num_prompts, assembly.num_tokens) == (0, 0)


def test_a_list_and_an_array_make_the_same_parts() -> None:
    token_ids = list(range(1000))
    assert list(prompt_parts(1, 1, token_ids, 500)) == list(prompt_parts(1, 1, np.array(token_ids, np.int32), 500))


def test_a_million_tokens_stay_below_a_mebibyte_a_part() -> None:
    token_ids = np.full(1_000_000, 2**31 - 1, np.int32)
    parts = list(prompt_parts(1, 1, token_ids, 1 << 20))
    assert len(parts) < 6
    assert all(session_pb2.Command(prompt_part=part).ByteSize() <= 1 << 20 for part in parts)


def test_no_tokens_make_no_parts() -> None:
    assert list(prompt_parts(1, 1, [], 1000)) == []


class TestPromptAssembly:
    def part(self, group: int, attempt: int, *token_ids: int) -> session_pb2.PromptPart:
        return session_pb2.PromptPart(group=group, attempt=attempt, token_ids=token_ids)

    def violates(self, act: Any, match: str) -> None:
        with pytest.raises(PdserveError, match=match) as refusal:
            act()
        assert refusal.value.code is ErrorCode.protocol_violation

    def test_keeps_prompts_apart(self) -> None:
        assembly = PromptAssembly(max_tokens=100, max_parts=10)
        collect(assembly, [self.part(1, 1, 10), self.part(1, 2, 20), self.part(2, 1, 30), self.part(1, 1, 11)])
        assert (assembly.num_prompts, assembly.num_tokens) == (3, 4)
        assert assembly.take(1, 1, 2).tolist() == [10, 11]
        assert assembly.take(2, 1, 1).tolist() == [30]
        assert assembly.take(1, 2, 1).tolist() == [20]
        assert (assembly.num_prompts, assembly.num_tokens) == (0, 0)

    def test_refuses_more_tokens_than_may_wait(self) -> None:
        assembly = PromptAssembly(max_tokens=3, max_parts=10)
        assembly.add(self.part(1, 1, 1, 2))
        self.violates(lambda: assembly.add(self.part(2, 1, 3, 4)), "more than 3 tokens")
        assert assembly.num_tokens == 2
        assembly.add(self.part(2, 1, 3))
        assembly.drop(1, 1)
        assembly.add(self.part(2, 1, 4, 5))

    def test_refuses_more_parts_than_may_wait(self) -> None:
        assembly = PromptAssembly(max_tokens=100, max_parts=2)
        collect(assembly, [self.part(1, 1, 1), self.part(2, 1, 2)])
        self.violates(lambda: assembly.add(self.part(1, 1, 3)), "more than 2 parts")
        assert assembly.take(1, 1, 1).tolist() == [1]
        assembly.add(self.part(2, 1, 3))
        self.violates(lambda: assembly.add(self.part(2, 1, 4)), "more than 2 parts")

    @pytest.mark.parametrize("total_tokens", [1, 3])
    def test_refuses_a_prompt_of_another_length_and_forgets_it(self, total_tokens: int) -> None:
        assembly = PromptAssembly(max_tokens=10, max_parts=10)
        assembly.add(self.part(1, 1, 1, 2))
        self.violates(lambda: assembly.take(1, 1, total_tokens), f"2 token ids came for a prompt of {total_tokens}")
        assert (assembly.num_prompts, assembly.num_tokens) == (0, 0)

    def test_refuses_a_prompt_of_which_nothing_came(self) -> None:
        self.violates(lambda: PromptAssembly(max_tokens=10, max_parts=10).take(1, 1, 2), "0 token ids came")

    def test_refuses_what_is_no_token_id(self) -> None:
        assembly = PromptAssembly(max_tokens=10, max_parts=10)
        self.violates(lambda: assembly.add(self.part(1, 1, 2**31)), "no token id")
        assert assembly.num_tokens == 0

    def test_refuses_a_part_without_token_ids(self) -> None:
        """Any number of them would fit."""
        assembly = PromptAssembly(max_tokens=10, max_parts=10)
        self.violates(lambda: assembly.add(self.part(1, 1)), "without token ids")
        assert assembly.num_prompts == 0

    def test_drop_of_what_never_came_changes_nothing(self) -> None:
        assembly = PromptAssembly(max_tokens=10, max_parts=10)
        assembly.drop(1, 1)
        assert (assembly.num_prompts, assembly.num_tokens) == (0, 0)
