"""Poisson arrivals are one trace for each seed."""

import pytest

from bench.arrivals import poisson_times


def test_a_seed_gives_one_trace() -> None:
    assert poisson_times(5, 50, seed=3) == poisson_times(5, 50, seed=3)
    assert poisson_times(5, 50, seed=3) != poisson_times(5, 50, seed=4)


def test_a_longer_trace_begins_like_the_shorter_one() -> None:
    assert poisson_times(5, 50, seed=3)[:20] == poisson_times(5, 20, seed=3)


def test_times_grow_at_the_wished_rate() -> None:
    times = poisson_times(8, 20_000, seed=1)
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(8, rel=0.03)


def test_a_rate_must_be_positive() -> None:
    with pytest.raises(ValueError, match="rate_rps"):
        poisson_times(0, 1, seed=0)
