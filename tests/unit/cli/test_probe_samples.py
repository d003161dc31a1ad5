"""From arrivals to figures."""

import math

import pytest

from pdserve.cli.probe_samples import Latency, Sample, Summary

ONE_BY_ONE = Sample(started_s=10.0, ended_s=10.5, arrivals=[(10.1, 1), (10.2, 1), (10.4, 1)])
TOGETHER = Sample(started_s=10.0, ended_s=10.5, arrivals=[(10.4, 1), (10.4001, 2), (10.4002, 1)])


def test_tokens_of_one_event_came_together() -> None:
    assert TOGETHER.gaps_s == pytest.approx([0.0001, 0.0, 0.0001])
    assert ONE_BY_ONE.gaps_s == pytest.approx([0.1, 0.2])
    assert Sample(arrivals=[(1.0, 3)]).gaps_s == [0.0, 0.0]
    assert Sample().gaps_s == []


def test_events_at_one_moment_are_one_read() -> None:
    assert (ONE_BY_ONE.reads, TOGETHER.reads, Sample().reads) == (3, 1, 0)


def test_quantiles_are_measured_values() -> None:
    latency = Latency.of([float(value) for value in range(100, 0, -1)])
    assert (latency.count, latency.mean_s, latency.p50_s, latency.p99_s) == (100, 50.5, 50.0, 99.0)
    assert Latency.of([3.0]) == Latency(1, 3.0, 3.0, 3.0)
    assert math.isnan(Latency.of([]).p50_s)


def test_latencies_are_of_whole_streams_and_counts_of_all() -> None:
    cut = Sample(started_s=10.0, ended_s=11.0, arrivals=[(10.9, 1)], failure="cut")
    summary = Summary.of([ONE_BY_ONE, TOGETHER, cut])
    assert (summary.whole, summary.failures, summary.ttft.count) == (2, {"cut": 1}, 2)
    assert [summary.events, summary.tokens, summary.tokens_per_s] == pytest.approx([7, 8, 8.0])
    assert summary.events_per_read == pytest.approx(7 / 5)
    assert summary.ttft_share == pytest.approx(0.2)
