"""Quantiles and spreads of measured values."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """What repeated runs gave: the middle one is quoted, the outer two say how far to trust it."""

    min: float
    median: float
    max: float
    runs: int


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 … 1) of `values` lie, interpolated between neighbours.

    Raises:
        ValueError: there are no values, or `share` is out of range.
    """
    if not values:
        raise ValueError("no values to take a quantile of")
    if not 0 <= share <= 1:
        raise ValueError(f"a quantile lies between 0 and 1, not at {share}")
    return float(np.quantile(np.asarray(values, dtype=np.float64), share))


def spread(values: Sequence[float]) -> Spread:
    """Least, middle and greatest of one value for each run."""
    return Spread(min(values), quantile(values, 0.5), max(values), len(values))


def paired_ratios(ours: Sequence[float], peers: Sequence[float]) -> list[float]:
    """ours / peer for each pair of runs. Drift of the machine falls out, which a ratio of medians keeps."""
    return [mine / theirs for mine, theirs in zip(ours, peers, strict=True)]


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Count, mean and the usual quantiles; None without values."""
    if not values:
        return None
    quantiles = {f"p{round(share * 100)}": quantile(values, share) for share in (0.5, 0.9, 0.99)}
    return {"count": len(values), "mean": float(np.mean(values)), **quantiles, "min": min(values), "max": max(values)}


def spread_document(value: Spread | None) -> dict[str, float] | None:
    """A spread as JSON; None stays None."""
    return None if value is None else asdict(value)
