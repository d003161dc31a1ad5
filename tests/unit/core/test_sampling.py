import math
from typing import Any

import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.core.sampling import SamplingParams

INF = math.inf
NAN = math.nan

ALLOWED: list[tuple[str, list[Any]]] = [
    ("max_tokens", [1, 10**6]),
    ("temperature", [0.0, 2.0]),
    ("top_k", [0, 1, 10**6]),
    ("top_p", [1e-9, 1.0]),
    ("min_p", [0.0, 1.0]),
    ("repetition_penalty", [1e-3, 1e3]),
    ("presence_penalty", [-2.0, 2.0]),
    ("frequency_penalty", [-2.0, 2.0]),
    ("logit_bias", [{}, {0: -100.0, 5: 100.0}]),
    ("top_logprobs", [None, 0, 20]),
]

REFUSED: list[tuple[str, list[Any]]] = [
    ("max_tokens", [0, -1]),
    ("min_tokens", [-1, 11]),
    ("temperature", [-0.01, 2.01, NAN, INF]),
    ("top_k", [-2]),
    ("top_p", [0.0, -0.5, 1.01, NAN]),
    ("min_p", [-0.01, 1.01, NAN]),
    ("repetition_penalty", [0.0, 1e-50, 1e300, -1.0, NAN, INF]),
    ("presence_penalty", [-2.01, 2.01, NAN]),
    ("frequency_penalty", [-2.01, 2.01, NAN]),
    ("logit_bias", [{-1: 0.0}, {0: 100.5}, {0: NAN}, {0: 1.0, 1: -INF}]),
    ("top_logprobs", [-1, 21]),
]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10, **values})


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in ALLOWED for v in values])
def test_the_edges_of_each_range_are_allowed(field: str, value: Any) -> None:
    assert getattr(params(**{field: value}), field) == value


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in REFUSED for v in values])
def test_what_is_beyond_them_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} must be") as refusal:
        params(**{field: value})
    assert refusal.value.param == field


def test_a_refusal_echoes_at_most_200_characters_of_input() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        params(max_tokens=-(10**300))
    assert len(refusal.value.message) < 300


def test_min_tokens_may_equal_max_tokens() -> None:
    assert params(min_tokens=10).min_tokens == 10


def test_temperature_zero_and_what_is_as_good_as_zero_is_greedy() -> None:
    assert params(temperature=0.0).greedy
    # As a float32 it would be 0: logits divided by it are not numbers, and no token can be drawn from those.
    assert params(temperature=1e-50).greedy
    assert not params(temperature=1e-4).greedy


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_only_penalties_need_history(penalty: str) -> None:
    assert not params(temperature=0.5, top_k=5, logit_bias={1: 2.0}).needs_history
    assert params(**{penalty: 0.5}).needs_history
