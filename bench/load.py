"""A load generator for any OpenAI-compatible server: `python -m bench.load --url http://… --streams 8`."""

import argparse
import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import uvloop

from bench.arrivals import poisson_times
from bench.client import Request, Target, first_model, make_request, open_session, stream
from bench.goodput import Slo
from bench.machine import machine_facts
from bench.plots import plot_load
from bench.prompts import make_prompts
from bench.report import report
from bench.samples import Reply, Sample, judge


async def closed_loop(
    session: aiohttp.ClientSession, target: Target, requests: Sequence[Request], streams: int
) -> list[Sample]:
    """Keep `streams` requests open until all have been sent: each sends its next when its last has ended.

    Returns: a sample for each request, in the order of sending.
    """
    waiting = deque(requests)
    replies: list[Reply] = []

    async def client() -> None:
        while waiting:
            replies.append(await stream(session, target, waiting.popleft()))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(streams):
            tasks.create_task(client())
    return [judge(reply) for reply in sorted(replies, key=lambda reply: reply.sent_s)]


async def open_loop(
    session: aiohttp.ClientSession, target: Target, requests: Sequence[Request], times_s: Sequence[float]
) -> list[Sample]:
    """Send each request at its time, whatever became of the ones before it.

    Args:
        times_s: arrivals in seconds from the start, growing, one for each request. Latency counts from them, so a
            generator that falls behind makes the server look slower, never faster; `send_lag_s` shows by how much.
    Returns: a sample for each request, in order of arrival.
    """
    start_s = perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for request, time_s in zip(requests, times_s, strict=True):
            due_s = start_s + time_s
            await asyncio.sleep(due_s - perf_counter())
            tasks.append(group.create_task(stream(session, target, request, due_s=due_s)))
    return [judge(task.result()) for task in tasks]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one load and print its figures. Exit code 1 if no request was answered."""
    options = _parser().parse_args(arguments)
    os.nice(options.nice)
    try:
        samples, model = uvloop.run(_run(options))
    except (aiohttp.ClientError, OSError, ValueError, LookupError) as error:
        print(f"bench.load: {options.url}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    settings.pop("api_key")
    slo = Slo(options.slo_ttft, options.slo_itl, share=options.slo_share) if options.slo_ttft else None
    document: dict[str, Any] = {
        "machine": machine_facts(),
        "settings": settings | {"model": model},
        **report(samples, slo),
    }
    text = json.dumps(document, indent=2)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n")
    if options.png:
        plot_load(samples, options.png)
    print(text)
    return 0 if any(sample.ok for sample in samples) else 1


async def _run(options: argparse.Namespace) -> tuple[list[Sample], str]:
    async with open_session() as session:
        model = options.model or await first_model(session, options.url)
        target = Target(options.url, model, options.api, options.api_key, options.timeout, options.fields)
        count = options.requests or options.streams or 32
        prompts = make_prompts(options.prompt_tokens, count, options.seed)
        requests = [make_request(target, prompt, options.max_tokens) for prompt in prompts]
        if options.rate is not None:
            times_s = poisson_times(options.rate, count, options.seed)
            return await open_loop(session, target, requests, times_s), model
        return await closed_loop(session, target, requests, options.streams or 1), model


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.load", description=__doc__)
    parser.add_argument("--url", required=True, type=lambda url: url.rstrip("/"), help="server, without /v1")
    parser.add_argument("--model", default="", help="default: the first that the server lists")
    parser.add_argument("--api", choices=("completions", "chat"), default="completions")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", ""))
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument("--streams", type=_positive, help="closed loop: requests open at a time (default 1)")
    loop.add_argument("--rate", type=float, help="open loop: Poisson arrivals a second")
    parser.add_argument("--requests", type=_positive, help="requests in all (default: one a stream; 32 with --rate)")
    parser.add_argument("--prompt-tokens", type=_lengths, default=[128], help="a length, or several: 32,32,1500")
    parser.add_argument("--max-tokens", type=_positive, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")
    parser.add_argument("--slo-ttft", type=float, help="seconds; goodput is reported if given")
    parser.add_argument("--slo-itl", type=float, default=0.1, help="seconds, at the 99th percentile of a request")
    parser.add_argument("--slo-share", type=float, default=0.9, help="of all arrivals")
    parser.add_argument("--fields", type=json.loads, default={}, help="further body fields, as a JSON object")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a request may take")
    parser.add_argument("--nice", type=int, default=0, help="lower the generator's own priority by this much")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--png", type=Path, help="draw TTFT, ITL and every token here")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _lengths(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
