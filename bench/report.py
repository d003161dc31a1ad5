"""The figures of one run of load, as a JSON document."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from bench.goodput import Slo, goodput, goodput_curve
from bench.samples import Sample
from bench.statistics import summary

CURVE_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
SHOWN_FAILURES = 5


def report(samples: Sequence[Sample], slo: Slo | None = None) -> dict[str, Any]:
    """Latencies of answered requests, counts of all, and goodput if an SLO is given. Times are in seconds."""
    answered = [s for s in samples if s.ok]
    start_s = min(s.due_s for s in samples)
    wall_s = max(s.ended_s for s in samples) - start_s
    tokens_out = sum(s.completion_tokens for s in answered)
    document: dict[str, Any] = {
        "requests": len(samples),
        "outcomes": dict(Counter(str(s.outcome) for s in samples)),
        "failures": [f"{s.outcome}: {s.detail}" for s in samples if not s.ok][:SHOWN_FAILURES],
        "wall_s": wall_s,
        "tokens_in": sum(s.prompt_tokens or 0 for s in answered),
        "tokens_out": tokens_out,
        "tokens_cached": sum(s.cached_tokens or 0 for s in answered),
        "tokens_out_per_s": tokens_out / wall_s if wall_s > 0 else None,
        "prompt_tokens": summary([s.prompt_tokens for s in answered if s.prompt_tokens is not None]),
        "ttft_s": summary([s.ttft_s for s in answered if s.ttft_s is not None]),
        "itl_s": summary([gap for s in answered for gap in s.itls_s]),
        "event_gap_s": summary([gap for s in answered for gap in event_gaps_s(s)]),
        "tpot_s": summary([s.tpot_s for s in answered if s.tpot_s is not None]),
        "total_s": summary([s.total_s for s in answered]),
        "send_lag_s": summary([s.sent_s - s.due_s for s in samples]),
    }
    if slo is not None:
        document["slo"] = asdict(slo)
        document["goodput"] = asdict(goodput(samples, slo))
        document["goodput_curve"] = [
            {"factor": factor, **asdict(value)} for factor, value in goodput_curve(samples, slo, CURVE_FACTORS)
        ]
    return document


def event_gaps_s(sample: Sample) -> list[float]:
    """Gaps between the reads that brought tokens: what a person sees, however many tokens came at once."""
    times = list(dict.fromkeys(sample.token_times_s))
    return [later - earlier for earlier, later in pairwise(times)]
