"""Quantiles, spreads and paired ratios."""

import pytest

from bench.statistics import Spread, paired_ratios, quantile, spread, summary


def test_quantiles_are_interpolated() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert quantile(values, 0) == 1
    assert quantile(values, 0.5) == 2.5
    assert quantile(values, 1) == 4
    assert quantile(list(range(101)), 0.99) == pytest.approx(99)


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 1.01), ([1.0], -0.01)])
def test_a_quantile_of_nothing_or_out_of_range_is_refused(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match="quantile"):
        quantile(values, share)


def test_a_spread_is_least_middle_and_greatest() -> None:
    assert spread([3.0, 1.0, 10.0]) == Spread(min=1, median=3, max=10, runs=3)


def test_ratios_are_taken_within_pairs() -> None:
    assert paired_ratios([2.0, 40.0], [1.0, 20.0]) == [2.0, 2.0]
    with pytest.raises(ValueError, match="zip"):
        paired_ratios([1.0], [])


def test_a_summary_of_nothing_is_nothing() -> None:
    assert summary([]) is None
    figures = summary([1.0, 3.0])
    assert figures is not None
    assert (figures["count"], figures["mean"], figures["p50"], figures["max"]) == (2, 2, 2, 3)
