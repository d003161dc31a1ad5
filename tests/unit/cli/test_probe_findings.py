"""What figures mean."""

from dataclasses import replace
from typing import Any

import pytest

from pdserve.cli.probe_findings import NOTHING_FOUND, find_gaps
from pdserve.cli.probe_samples import Latency, Run, Summary


def latency(value_s: float, p99_s: float | None = None) -> Latency:
    return Latency(count=8, mean_s=value_s, p50_s=value_s, p99_s=value_s if p99_s is None else p99_s)


SEEN = Summary(
    whole=8,
    failures={},
    ttft=latency(0.2),
    itl=latency(0.02),
    total=latency(1.0),
    events=400,
    tokens=400,
    events_per_read=1.0,
    ttft_share=0.2,
    tokens_per_s=400.0,
)
DIRECT = Run("http://direct", SEEN, latency(0.198), latency(0.02))


def via(**seen: Any) -> Run:
    return replace(DIRECT, url="http://via", seen=replace(SEEN, **seen))


def test_two_ways_that_are_alike_have_no_gap() -> None:
    assert find_gaps(DIRECT, via(ttft=latency(0.21), itl=latency(0.021))) == [NOTHING_FOUND]
    assert find_gaps(DIRECT, None) == [NOTHING_FOUND]


@pytest.mark.parametrize(
    ("seen", "finding"),
    [
        ({"ttft_share": 0.99, "events_per_read": 50.0, "ttft": latency(1.0)}, "http://via holds answers back"),
        ({"events_per_read": 3.0}, "http://via gathers events: 3.0 come at once, 1.0 from http://direct"),
        ({"itl": latency(0.02, p99_s=0.12)}, "http://via adds 100 ms to ITL p99"),
        ({"ttft": latency(0.3)}, "http://via adds 100 ms to TTFT p50"),
        ({"failures": {"TruncatedStream: cut": 2}}, "2 of the streams through http://via: TruncatedStream: cut"),
    ],
)
def test_each_gap_is_named_once(seen: dict[str, Any], finding: str) -> None:
    found = find_gaps(DIRECT, via(**seen))
    assert len(found) == 1
    assert found[0].startswith(finding)


def test_what_the_server_did_not_measure_is_outside_of_it() -> None:
    late = replace(DIRECT, seen=replace(SEEN, ttft=latency(0.3)))
    assert find_gaps(late, None)[0].startswith("102 ms of the mean TTFT from http://direct pass outside of the server")
    assert find_gaps(replace(late, server_ttft=None), None) == [NOTHING_FOUND]


def test_with_one_url_buffering_shows_too() -> None:
    held = replace(DIRECT, seen=replace(SEEN, ttft_share=0.98))
    assert find_gaps(held, None)[0].startswith("answers from http://direct come all at once")
    assert find_gaps(replace(held, seen=replace(held.seen, events=8)), None) == [NOTHING_FOUND]
