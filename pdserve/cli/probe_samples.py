"""What a probe saw of its streams, and what that comes to."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from pdserve.cli.server_histograms import Histogram

# Events that come closer together were read at once: parsing one takes less, a step of an engine more.
_SAME_READ_S = 0.0005


@dataclass(slots=True)
class Sample:
    """One stream.

    Attributes:
        started_s, ended_s: on time.monotonic's clock.
        arrivals: when each event with tokens came, and how many it had.
        failure: why it is not whole; "" if it is.
    """

    started_s: float = 0.0
    ended_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    failure: str = ""

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.arrivals)

    @property
    def reads(self) -> int:
        times = [time_s for time_s, _ in self.arrivals]
        return len(times[:1]) + sum(b - a >= _SAME_READ_S for a, b in pairwise(times))

    @property
    def gaps_s(self) -> list[float]:
        """From each token to its next: those of one event came together."""
        gaps: list[float] = []
        before: float | None = None
        for time_s, tokens in self.arrivals:
            gaps += [0.0 if before is None else time_s - before] + [0.0] * (tokens - 1)
            before = time_s
        return gaps[1:]


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds; NaN if nothing was measured."""

    count: int
    mean_s: float
    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, values_s: Sequence[float]) -> Self:
        if not values_s:
            return cls(0, math.nan, math.nan, math.nan)
        ordered = sorted(values_s)
        # The nearest rank: a value that was measured.
        p50_s, p99_s = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
        return cls(len(ordered), sum(ordered) / len(ordered), p50_s, p99_s)

    @classmethod
    def of_histogram(cls, histogram: Histogram) -> Self:
        return cls(histogram.count, histogram.mean_s, histogram.quantile_s(0.5), histogram.quantile_s(0.99))


@dataclass(frozen=True, slots=True)
class Summary:
    """What came through one URL. Latencies are those of whole streams.

    Attributes:
        whole, failures: streams that came whole, and why others did not, each with how many.
        events: with tokens.
        events_per_read: 1 where each event comes by itself.
        ttft_share: the median stream's TTFT as a share of its total; near 1, it came all at once.
        tokens_per_s: of all streams together.
    """

    whole: int
    failures: Mapping[str, int]
    ttft: Latency
    itl: Latency
    total: Latency
    events: int
    tokens: int
    events_per_read: float
    ttft_share: float
    tokens_per_s: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Self:
        whole = [sample for sample in samples if not sample.failure and sample.arrivals]
        ttfts_s = [sample.arrivals[0][0] - sample.started_s for sample in whole]
        totals_s = [sample.ended_s - sample.started_s for sample in whole]
        events, reads = (sum(counts) for counts in zip(*((len(s.arrivals), s.reads) for s in samples), strict=True))
        tokens = sum(sample.tokens for sample in samples)
        took_s = max(sample.ended_s for sample in samples) - min(sample.started_s for sample in samples)
        return cls(
            whole=sum(not sample.failure for sample in samples),
            failures=dict(Counter(sample.failure for sample in samples if sample.failure)),
            ttft=Latency.of(ttfts_s),
            itl=Latency.of([gap_s for sample in whole for gap_s in sample.gaps_s]),
            total=Latency.of(totals_s),
            events=events,
            tokens=tokens,
            events_per_read=events / reads if reads else math.nan,
            ttft_share=Latency.of([a / b for a, b in zip(ttfts_s, totals_s, strict=True) if b > 0]).p50_s,
            tokens_per_s=tokens / took_s if took_s > 0 else math.nan,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One URL's turn.

    Attributes:
        server_ttft, server_itl: what the server's own histograms gained meanwhile; None if it shows none.
    """

    url: str
    seen: Summary
    server_ttft: Latency | None
    server_itl: Latency | None
