"""A prompt's log-probabilities come in stretches, from one attempt or several, and are complete exactly once."""

import pytest

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import PromptLogprobs, TokenLogprobs
from pdserve.core.ids import AttemptKey, GroupId
from services.frontend.prompt_scores import PromptScores

ENTRIES = [TokenLogprobs(-float(position)) for position in range(10)]


def part(start: int, end: int, attempt: int = 1) -> PromptLogprobs:
    return PromptLogprobs(AttemptKey(GroupId(1, 1), attempt), start, tuple(ENTRIES[start:end]))


def test_stretches_join_in_order() -> None:
    scores = PromptScores(6)
    for start, end in ((1, 3), (3, 4)):
        scores.take(part(start, end))
        assert not scores.complete
    scores.take(part(4, 6))
    assert scores.complete
    assert scores.entries == [None, *ENTRIES[1:6]]


def test_a_new_attempt_begins_again_and_changes_nothing_that_is_known() -> None:
    scores = PromptScores(6)
    scores.take(part(1, 4))
    for start, end in ((1, 3), (3, 6), (1, 6)):
        scores.take(part(start, end, attempt=2))
    assert scores.complete
    assert scores.entries == [None, *ENTRIES[1:6]]


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_nothing_wanted_and_nothing_to_score_are_complete_at_once(num_tokens: int) -> None:
    assert PromptScores(num_tokens).complete


@pytest.mark.parametrize(("start", "end"), [(3, 4), (1, 7), (2, 8)])
def test_a_gap_and_what_is_beyond_the_prompt_break_the_protocol(start: int, end: int) -> None:
    scores = PromptScores(6)
    scores.take(part(1, 2))
    with pytest.raises(PdserveError) as caught:
        scores.take(part(start, end))
    assert caught.value.code is ErrorCode.protocol_violation
    assert scores.entries == [None, ENTRIES[1]]
