"""Goodput counts every arrival; only promises that were kept count for it."""

import pytest

from bench.goodput import Slo, goodput, goodput_curve
from bench.samples import Outcome, Sample

SLO = Slo(ttft_s=1.0, itl_s=0.1, share=0.5)


def sample(*token_times_s: float, outcome: Outcome = Outcome.OK, due_s: float = 0.0, ended_s: float = 2.0) -> Sample:
    return Sample(outcome, due_s, due_s, ended_s, token_times_s, len(token_times_s), 8, 0, "stop", "")


KEPT = sample(0.9, 0.95, 1.0)


@pytest.mark.parametrize(
    "missed",
    [
        sample(1.1, 1.2),
        sample(0.5, 0.7),
        sample(),
        *(sample(0.1, 0.2, outcome=outcome) for outcome in Outcome if outcome is not Outcome.OK),
    ],
)
def test_late_slow_empty_and_failed_requests_are_misses(missed: Sample) -> None:
    assert not SLO.met_by(missed)
    assert goodput([KEPT, missed], SLO).met == 1


def test_one_token_has_no_itl_to_miss() -> None:
    assert SLO.met_by(sample(0.5))


def test_refusals_stay_in_the_denominator() -> None:
    refused = [sample(outcome=Outcome.REFUSED)] * 3
    result = goodput([KEPT, *refused], SLO)
    assert (result.arrivals, result.met, result.attainment, result.reached) == (4, 1, 0.25, False)


def test_the_window_is_from_the_first_arrival_to_the_last_answer() -> None:
    result = goodput([KEPT, sample(3.5, 3.55, due_s=3.0, ended_s=4.0)], SLO)
    assert result.requests_per_s == pytest.approx(2 / 4)
    assert result.reached


def test_the_share_itself_is_enough() -> None:
    assert goodput([KEPT, sample()], SLO).reached


def test_a_looser_promise_is_kept_at_least_as_often() -> None:
    samples = [sample(0.1 * n, 0.1 * n + 0.05 * n) for n in range(1, 12)]
    met = [result.met for _, result in goodput_curve(samples, SLO, (0.25, 0.5, 1, 2, 4))]
    assert met == sorted(met)
    assert met[0] < met[-1]


def test_no_arrivals_have_no_goodput() -> None:
    with pytest.raises(ValueError, match="arrivals"):
        goodput([], SLO)
