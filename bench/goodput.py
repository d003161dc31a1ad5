"""Goodput: requests a second that were answered as fast as promised."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.samples import Sample
from bench.statistics import quantile


@dataclass(frozen=True, slots=True)
class Slo:
    """What a user was promised.

    Attributes:
        ttft_s: longest time to the first token.
        itl_s: longest inter-token latency, at `itl_quantile` of a request's own gaps.
        share: the part of all arrivals that must get it.
    """

    ttft_s: float
    itl_s: float
    itl_quantile: float = 0.99
    share: float = 0.9

    def met_by(self, sample: Sample) -> bool:
        """Whether one request got what was promised; a failed or refused one never did."""
        if not sample.ok or sample.ttft_s is None or sample.ttft_s > self.ttft_s:
            return False
        gaps = sample.itls_s
        return not gaps or quantile(gaps, self.itl_quantile) <= self.itl_s

    def scaled(self, factor: float) -> "Slo":
        """The same promise, `factor` times as loose."""
        return Slo(self.ttft_s * factor, self.itl_s * factor, self.itl_quantile, self.share)


@dataclass(frozen=True, slots=True)
class Goodput:
    """How a run did against one SLO.

    Attributes:
        arrivals: every request that arrived: answered, failed and refused ones alike.
        attainment: met / arrivals.
        requests_per_s: requests that met the SLO for each second from the first arrival to the last answer.
        reached: whether attainment is at least the SLO's share.
    """

    arrivals: int
    met: int
    attainment: float
    requests_per_s: float
    reached: bool


def goodput(samples: Sequence[Sample], slo: Slo) -> Goodput:
    """Goodput of one run.

    Raises:
        ValueError: nothing arrived.
    """
    if not samples:
        raise ValueError("no arrivals: goodput is undefined")
    window_s = max(s.ended_s for s in samples) - min(s.due_s for s in samples)
    met = sum(slo.met_by(sample) for sample in samples)
    attainment = met / len(samples)
    return Goodput(len(samples), met, attainment, met / window_s if window_s > 0 else 0.0, attainment >= slo.share)


def goodput_curve(samples: Sequence[Sample], slo: Slo, factors: Iterable[float]) -> list[tuple[float, Goodput]]:
    """Goodput of one trace as the SLO tightens or loosens: (factor, goodput) for each factor."""
    return [(factor, goodput(samples, slo.scaled(factor))) for factor in factors]
