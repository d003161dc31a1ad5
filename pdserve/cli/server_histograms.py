"""A server's own histograms: what they gained between two looks at /metrics."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from prometheus_client.parser import text_string_to_metric_families

TTFT = "pdserve_time_to_first_token_seconds"
ITL = "pdserve_inter_token_latency_seconds"


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of durations, over all labels.

    Attributes:
        buckets: observations up to each bound (seconds) and no lower one's.
        sum_s: of all durations.
    """

    buckets: Mapping[float, float]
    sum_s: float

    @classmethod
    def parse(cls, text: str, name: str) -> Self:
        """From Prometheus's text format; empty where there is none of this name.

        Raises:
            ValueError: it is not that format.
        """
        bounds: dict[float, float] = {}
        sum_s = 0.0
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"{name}_bucket":
                    bound = float(sample.labels["le"])
                    bounds[bound] = bounds.get(bound, 0.0) + sample.value
                elif sample.name == f"{name}_sum":
                    sum_s += sample.value
        below, buckets = 0.0, {}
        for bound in sorted(bounds):
            buckets[bound] = bounds[bound] - below
            below = bounds[bound]
        return cls(buckets, sum_s)

    @property
    def count(self) -> int:
        return round(sum(self.buckets.values()))

    @property
    def mean_s(self) -> float:
        return self.sum_s / self.count if self.count else math.nan

    def since(self, earlier: Self) -> Self:
        """What was observed after `earlier`."""
        gained = {bound: count - earlier.buckets.get(bound, 0.0) for bound, count in self.buckets.items()}
        return type(self)(gained, self.sum_s - earlier.sum_s)

    def quantile_s(self, share: float) -> float:
        """Within its bucket by linear interpolation, as Prometheus does; the last bound for what is beyond it."""
        wanted, below, lower = share * self.count, 0.0, 0.0
        for bound, count in self.buckets.items():
            if count and below + count >= wanted:
                return lower if math.isinf(bound) else lower + (bound - lower) * (wanted - below) / count
            below, lower = below + count, bound
        return math.nan
