"""`pdserve probe`: many streams at once, measured from outside, beside what the server measures itself."""

import argparse
import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import httpx
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.cli.failures import told
from pdserve.cli.probe_findings import find_gaps
from pdserve.cli.probe_samples import Latency, Run, Sample, Summary
from pdserve.cli.server_histograms import ITL, TTFT, Histogram
from pdserve.client.answers import Delta
from pdserve.client.async_client import AsyncClient
from pdserve.client.connection import is_loopback
from pdserve.client.errors import ClientError
from pdserve.client.policy import Retries
from pdserve.core.errors import ErrorCode, InvalidRequest, PdserveError

# Ids that any vocabulary has, and that are no special tokens.
_PROMPT_IDS = range(100, 400)
_METRICS_TIMEOUT_S = 10.0
# Of the ways to a server.
_NAMES = ("direct", "via")


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a server at once.

    Attributes:
        tokens, prompt_tokens: of each stream's answer and prompt.
        model: "" for the first that the server names.
    """

    streams: int
    tokens: int
    prompt_tokens: int
    model: str = ""
    api_key: str | None = None


async def run_probe(arguments: argparse.Namespace) -> int:
    """Returns: 1 if a stream did not come whole."""
    for name in ("streams", "tokens", "prompt_tokens"):
        if getattr(arguments, name) < 1:
            raise InvalidRequest(name, f"--{name.replace('_', '-')} must be at least 1")
    load = Load(arguments.streams, arguments.tokens, arguments.prompt_tokens, arguments.model, arguments.api_key)
    direct = await probe(arguments.url, load, metrics_url=arguments.url)
    via = await probe(arguments.via, load, metrics_url=arguments.url) if arguments.via else None
    runs = [direct] if via is None else [direct, via]
    findings = find_gaps(direct, via)
    if arguments.json:
        print(json.dumps(probe_json(load, runs, findings), indent=2))
    else:
        Console().print(probe_table(load, runs))
        print(f"{' and '.join(_NAMES[: len(runs)])}: as seen from here; its server: as it measures itself (/metrics)")
        for finding in findings:
            print(finding)
    return 1 if any(run.seen.failures for run in runs) else 0


async def probe(url: str, load: Load, *, metrics_url: str) -> Run:
    """Measure streams through one URL.

    Args:
        metrics_url: where the server shows its histograms; an ingress seldom does.
    Raises:
        PdserveError: not one token came, so there is nothing to show.
    """
    # A failure is a finding here: nothing is tried again.
    async with AsyncClient(url, api_key=load.api_key, retries=Retries(count=0)) as client:
        await _warm_up(client, load)
        before = await _read_histograms(metrics_url)
        samples = await asyncio.gather(*(_measure(client, load) for _ in range(load.streams)))
        after = await _read_histograms(metrics_url)
    if not any(sample.arrivals for sample in samples):
        (why, _), *_ = Counter(sample.failure for sample in samples).most_common(1)
        raise PdserveError(ErrorCode.internal, f"not one token came through {client.url}: {why}")
    ttft = itl = None
    if before is not None and after is not None:
        ttft, itl = (Latency.of_histogram(late.since(early)) for early, late in zip(before, after, strict=True))
    return Run(url.rstrip("/"), Summary.of(samples), ttft, itl)


def probe_json(load: Load, runs: Sequence[Run], findings: Sequence[str]) -> dict[str, object]:
    """For scripts; null stands for what was not measured."""
    asked = {"streams": load.streams, "tokens": load.tokens, "prompt_tokens": load.prompt_tokens}
    return {"load": asked, "runs": [_finite(asdict(run)) for run in runs], "findings": list(findings)}


def probe_table(load: Load, runs: Sequence[Run]) -> Table:
    names = _NAMES[: len(runs)]
    urls = "; ".join(f"{name}: {run.url}" for name, run in zip(names, runs, strict=True))
    headers = [header for name in names for header in (name, "its server")]
    title = f"{load.streams} streams of {load.prompt_tokens} + {load.tokens} tokens"
    table = Table("", *headers, box=SIMPLE, title=title, caption=urls)
    for column in table.columns[1:]:
        column.justify = "right"
    latencies = {
        "TTFT": [latency for run in runs for latency in (run.seen.ttft, run.server_ttft)],
        "ITL": [latency for run in runs for latency in (run.seen.itl, run.server_itl)],
    }
    for name, columns_of in latencies.items():
        for statistic, value_of in _STATISTICS.items():
            cells = (_ms(value_of(latency)) if latency is not None else "–" for latency in columns_of)
            table.add_row(f"{name} {statistic}, ms", *cells)
    for row, cell_of in _CELLS.items():
        table.add_row(row, *(cell for run in runs for cell in (cell_of(run.seen), "")))
    return table


_STATISTICS: Mapping[str, Callable[[Latency], float]] = {
    "p50": lambda latency: latency.p50_s,
    "p99": lambda latency: latency.p99_s,
    "mean": lambda latency: latency.mean_s,
}
_CELLS: Mapping[str, Callable[[Summary], str]] = {
    "total p50, ms": lambda seen: _ms(seen.total.p50_s),
    "streams whole": lambda seen: str(seen.whole),
    "streams failed": lambda seen: str(sum(seen.failures.values())),
    "events": lambda seen: str(seen.events),
    "events a read": lambda seen: f"{seen.events_per_read:.2f}",
    "tokens": lambda seen: str(seen.tokens),
    "tokens/s": lambda seen: f"{seen.tokens_per_s:.0f}",
}


async def _warm_up(client: AsyncClient, load: Load) -> None:
    """One stream that is not measured: it finds the model's name, and opens the first connection.

    Raises:
        PdserveError: not one token came.
    """
    arrived = False
    try:
        async for _ in _stream(client, load, tokens=1):
            arrived = True
    except ClientError as error:
        # A stream that is cut once it has begun is a finding; measuring tells how many are.
        if not arrived:
            raise told(error) from error


async def _measure(client: AsyncClient, load: Load) -> Sample:
    sample = Sample(started_s=time.monotonic())
    try:
        async for delta in _stream(client, load, load.tokens):
            sample.arrivals.append((delta.received_s, len(delta.token_ids)))
    except ClientError as error:
        sample.failure = f"{type(error).__name__}: {error}"
    sample.ended_s = time.monotonic()
    return sample


async def _stream(client: AsyncClient, load: Load, tokens: int) -> AsyncIterator[Delta]:
    """Each event that has tokens."""
    # A prompt of its own: none is found in a cache.
    prompt = random.choices(_PROMPT_IDS, k=load.prompt_tokens)
    fields: dict[str, object] = {"max_tokens": tokens, "ignore_eos": True, "return_token_ids": True}
    if load.model:
        fields["model"] = load.model
    async with client.stream_completion(prompt, **fields) as stream:
        async for delta in stream:
            if delta.token_ids:
                yield delta


async def _read_histograms(url: str) -> tuple[Histogram, Histogram] | None:
    """TTFT's and ITL's; None where the server does not show them."""
    try:
        async with httpx.AsyncClient(timeout=_METRICS_TIMEOUT_S, trust_env=not is_loopback(url)) as http:
            response = await http.get(f"{url.rstrip('/')}/metrics")
        if not response.is_success:
            return None
        histograms = Histogram.parse(response.text, TTFT), Histogram.parse(response.text, ITL)
    except (httpx.HTTPError, ValueError):
        return None
    return histograms if histograms[0].buckets else None


def _ms(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{seconds * 1000:.1f}"


def _finite(value: object) -> object:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
