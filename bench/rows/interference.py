"""Row 1: what a long prompt does to the streams that are running."""

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp

from bench.client import Target, make_request, open_session, stream
from bench.cluster import Cluster, ClusterError, ClusterSource, attach
from bench.peers import absent_peers, earlier_figures
from bench.plots import plot_distributions
from bench.prompts import make_prompt
from bench.row import Goal, Line, NotRunError, RowOptions, RowResult, paired_line
from bench.samples import Reply, Sample, judge
from bench.statistics import quantile, summary

STREAMS = 4
SHORT_TOKENS, SHORT_OUTPUT_TOKENS = 32, 200
LONG_TOKENS, LONG_OUTPUT_TOKENS = 1500, 8
"""A long prompt also writes a few tokens, so that its cache does travel into the running batch's worker."""
PERIOD_S = 2.0
MOST_LONG_PROMPTS = 10
"""In one run. Where prompts arrive faster than they are read, the streams of one colocated worker would hardly end."""
GOAL = Goal("<=", 1.1)


class Interference:
    """ITL p99 of four running streams while a 1,500-token prompt arrives every two seconds, over ITL p99 alone."""

    number = 1
    title = "ITL p99 of running streams with long prompts arriving, over ITL p99 without"
    target = str(GOAL)

    async def run(self, cluster: ClusterSource, options: RowOptions) -> RowResult:
        lines: list[Line] = []
        missing = absent_peers(cluster.peers)
        detail: dict[str, Any] = {"earlier_figures_of_peers": earlier_figures(), "systems": {}}
        async with cluster.split() as split:
            lines.append(await _measure("pdserve, 1 prefill + 1 decode", split, options, GOAL, detail))
        try:
            async with cluster.colocated() as colocated:
                lines.append(await _measure("control: one colocated worker of ours", colocated, options, None, detail))
        except ClusterError as error:
            missing.append(f"control, one colocated worker of ours: {error}; the figure alone is the floor")
        for name, url in cluster.peers.items():
            try:
                lines.append(await _measure(f"peer: {name}", await attach(url), options, None, detail))
            except (ClusterError, NotRunError) as error:
                missing.append(f"peer {name}: {error}")
        return RowResult(tuple(lines), detail, tuple(missing))

    def plot(self, detail: Mapping[str, Any], path: Path) -> None:
        series = {
            f"{name}, {situation}": [gap for pair in system["pairs"] for gap in pair[situation]["itls_s"]]
            for name, system in detail["systems"].items()
            for situation in ("alone", "with_long_prompts")
        }
        plot_distributions(self.title, series, "ITL (s)", path)


async def _measure(name: str, cluster: Cluster, options: RowOptions, goal: Goal | None, detail: dict[str, Any]) -> Line:
    """Pairs of runs of one system, after one that only warms it up."""
    target = cluster.target()
    pairs: list[dict[str, Any]] = []
    async with open_session() as session:
        await _streams(session, target, seed=0, with_long_prompts=True)
        for pair in range(1, options.pairs + 1):
            alone, _ = await _streams(session, target, seed=2 * pair, with_long_prompts=False)
            disturbed, long_prompts = await _streams(session, target, seed=2 * pair + 1, with_long_prompts=True)
            pairs.append(
                {
                    "alone": _figures(alone),
                    "with_long_prompts": _figures(disturbed),
                    "long_prompts": {
                        "sent": len(long_prompts),
                        "ttft_s": summary([s.ttft_s for s in long_prompts if s.ttft_s is not None]),
                    },
                }
            )
    detail["systems"][name] = {"pairs": pairs}
    disturbed_s = [pair["with_long_prompts"]["itl_p99_s"] for pair in pairs]
    alone_s = [pair["alone"]["itl_p99_s"] for pair in pairs]
    return paired_line(f"ITL p99 with long prompts; {name}", "the same streams alone", "s", disturbed_s, alone_s, goal)


async def _streams(
    session: aiohttp.ClientSession, target: Target, seed: int, *, with_long_prompts: bool
) -> tuple[list[Sample], list[Sample]]:
    """Run the short streams to their end: (their samples, samples of the long prompts that arrived meanwhile).

    Raises:
        NotRunError: a request of either kind failed, so that the figures would not be of the intended load.
    """
    shorts = [
        make_request(target, make_prompt(SHORT_TOKENS, seed, index), SHORT_OUTPUT_TOKENS) for index in range(STREAMS)
    ]
    waiting = set(range(STREAMS))
    all_running = asyncio.Event()

    def started(index: int) -> None:
        waiting.discard(index)
        if not waiting:
            all_running.set()

    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(stream(session, target, request, on_first=partial(started, index)))
            for index, request in enumerate(shorts)
        ]
        long_replies = (
            group.create_task(_long_prompts(session, target, seed, all_running, running)) if with_long_prompts else None
        )
    samples = [judge(task.result()) for task in running]
    long_samples = [judge(reply) for reply in long_replies.result()] if long_replies else []
    for sample in samples + long_samples:
        if not sample.ok:
            raise NotRunError(f"a request failed: {sample.outcome}: {sample.detail}")
    return samples, long_samples


async def _long_prompts(
    session: aiohttp.ClientSession,
    target: Target,
    seed: int,
    all_running: asyncio.Event,
    running: list[asyncio.Task[Reply]],
) -> list[Reply]:
    """Send a long prompt every period from when all streams run until one has ended; wait for the answers."""
    async with asyncio.TaskGroup() as group:
        began = group.create_task(all_running.wait())
        await asyncio.wait((began, *running), return_when=asyncio.FIRST_COMPLETED)
        began.cancel()
        tasks: list[asyncio.Task[Reply]] = []
        due_s = perf_counter()
        while len(tasks) < MOST_LONG_PROMPTS and not any(task.done() for task in running):
            request = make_request(target, make_prompt(LONG_TOKENS, seed, len(tasks)), LONG_OUTPUT_TOKENS)
            tasks.append(group.create_task(stream(session, target, request, due_s=due_s)))
            due_s += PERIOD_S
            await asyncio.wait(running, timeout=due_s - perf_counter(), return_when=asyncio.FIRST_COMPLETED)
    return [task.result() for task in tasks]


def _figures(samples: list[Sample]) -> dict[str, Any]:
    gaps = [gap for sample in samples for gap in sample.itls_s]
    itl_p99_s = quantile(gaps, 0.99) if gaps else 0.0
    if itl_p99_s == 0:
        raise NotRunError("no gap between tokens can be seen: the streams are too short, or came in one piece")
    return {"itl_p99_s": itl_p99_s, "itl_s": summary(gaps), "itls_s": gaps}


ROW = Interference()
