"""Reading a server's histograms."""

import math

import pytest
from prometheus_client import CollectorRegistry

from pdserve.cli.server_histograms import ITL, TTFT, Histogram
from pdserve.telemetry.metrics import FrontendMetrics, render


@pytest.fixture
def metrics() -> tuple[CollectorRegistry, FrontendMetrics]:
    registry = CollectorRegistry()
    return registry, FrontendMetrics(registry)


def test_what_a_frontend_counted_meanwhile(metrics: tuple[CollectorRegistry, FrontendMetrics]) -> None:
    registry, frontend = metrics
    frontend.know_model("tiny")
    frontend.first_token("tiny", 50.0)
    before = Histogram.parse(render(registry).decode(), TTFT)
    for ttft_s in (0.06, 0.07, 0.08, 0.6):
        frontend.first_token("tiny", ttft_s)
    frontend.first_token("unheard of", 0.09)
    gained = Histogram.parse(render(registry).decode(), TTFT).since(before)
    assert [gained.count, gained.mean_s] == pytest.approx([5, 0.18])
    # Four of five lie between 0.05 s and 0.1 s: the median is the 2.5th of those four.
    assert gained.quantile_s(0.5) == pytest.approx(0.05 + 0.05 * 2.5 / 4)
    assert 0.5 < gained.quantile_s(0.99) <= 0.75


def test_beyond_the_last_bound_is_the_last_bound(metrics: tuple[CollectorRegistry, FrontendMetrics]) -> None:
    registry, frontend = metrics
    frontend.next_token("tiny", 100.0)
    assert Histogram.parse(render(registry).decode(), ITL).quantile_s(0.5) == 2.0


def test_nothing_counted_is_no_number() -> None:
    empty = Histogram.parse("", TTFT)
    assert empty.count == 0
    assert math.isnan(empty.mean_s)
    assert math.isnan(empty.quantile_s(0.5))


def test_another_page_is_no_metrics() -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever the parser stumbles over
        Histogram.parse("<html>no metrics</html>", TTFT)
