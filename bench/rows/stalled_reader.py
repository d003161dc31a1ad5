"""Row 15: what one reader that has stopped does to all the others."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from bench.client import Target, make_request, open_session, stream
from bench.cluster import ClusterSource
from bench.plots import plot_distributions
from bench.prompts import make_prompt
from bench.row import Goal, NotRunError, RowOptions, RowResult, paired_line
from bench.samples import Sample, judge
from bench.statistics import quantile, summary

STREAMS = 64
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 700
BUFFERED_TOKENS = 400
"""Of each stream so many are not counted: meanwhile the buffers may still take what nobody reads."""
STEP_S = 0.02
"""Neither core is busy all the time then, and a stream is over before its unread one counts as gone (30 s)."""
BUFFER_BYTES = 4096
GOAL = Goal("<=", 1.1)
QUANTILES = 1000


class StalledReader:
    """ITL p99 of 63 streams while a 64th is not read, over ITL p99 while it is.

    The 64th is read once the others have ended, to see that its reader had stalled: what was held back meanwhile comes
    as one event.
    """

    number = 15
    title = "ITL p99 of 63 streams with a 64th whose reader has stalled, over ITL p99 with a 64th that is read"
    target = str(GOAL)

    async def run(self, cluster: ClusterSource, options: RowOptions) -> RowResult:
        pairs: list[dict[str, Any]] = []
        async with cluster.scripted(STEP_S) as scripted, open_session() as session:
            for pair in range(options.pairs + 1):
                figures = {}
                for place, stalled in enumerate((True, False) if pair % 2 else (False, True)):
                    others, extra = await _streams(session, scripted.target(), 2 * pair + place, stalled=stalled)
                    figures["stalled" if stalled else "read"] = _figures(others, extra, stalled=stalled)
                pairs.append(figures)
        del pairs[0]  # it warms up
        with_s, without_s = ([pair[situation]["itl_p99_s"] for pair in pairs] for situation in ("stalled", "read"))
        what = f"ITL p99 of {STREAMS - 1} streams, one more is not read"
        line = paired_line(what, "the same, one more is read", "s", with_s, without_s, GOAL)
        return RowResult((line,), {"step_s": STEP_S, "pairs": pairs})

    def plot(self, detail: Mapping[str, Any], path: Path) -> None:
        series = {
            f"64th stream {situation}": [gap for pair in detail["pairs"] for gap in pair[situation]["itl_quantiles_s"]]
            for situation in ("read", "stalled")
        }
        plot_distributions(self.title, series, "ITL of the others (s)", path)


async def _streams(
    session: aiohttp.ClientSession, target: Target, seed: int, *, stalled: bool
) -> tuple[list[Sample], Sample]:
    """Run all streams to their end: samples of those that are read in any case, and that of one extra.

    The extra one has small buffers whether it is read or not, and a connection of its own: Linux may end one that had
    stalled in an earlier run as soon as it stalls again (TCP_USER_TIMEOUT counts from the first time).
    """
    extra_request, *requests = (
        make_request(target, make_prompt(PROMPT_TOKENS, seed, index), OUTPUT_TOKENS) for index in range(STREAMS)
    )
    may_read = asyncio.Event()
    if not stalled:
        may_read.set()
    async with open_session(BUFFER_BYTES) as small, asyncio.TaskGroup() as group:
        extra = group.create_task(stream(small, target, extra_request, may_read=may_read))
        others = [group.create_task(stream(session, target, request)) for request in requests]
        await asyncio.wait(others)
        may_read.set()
    return [judge(task.result()) for task in others], judge(extra.result())


def _figures(others: list[Sample], extra: Sample, *, stalled: bool) -> dict[str, Any]:
    """Figures of one run.

    Raises:
        NotRunError: a stream failed, the extra one did not stall as it was to, or there is no gap to see.
    """
    for sample in others:
        if not sample.ok:
            raise NotRunError(f"a request failed: {sample.outcome}: {sample.detail}")
    gaps_s = [gap for sample in others for gap in sample.itls_s[BUFFERED_TOKENS:]]
    itl_p99_s = quantile(gaps_s, 0.99) if gaps_s else 0.0
    if itl_p99_s == 0:
        raise NotRunError("no gap between tokens can be seen: the streams are too short, or came in one piece")
    if not extra.ok:
        longest_s = max(gap for sample in others for gap in sample.itls_s)
        raise NotRunError(
            f"the {'stalled' if stalled else 'extra'} stream failed: {extra.outcome}: {extra.detail} "
            f"(longest gap of the others: {longest_s:.3f} s)"
        )
    unheld_tokens = len(extra.token_times_s) - extra.largest_event_tokens
    if stalled and unheld_tokens > BUFFERED_TOKENS:
        raise NotRunError(
            f"the reader did not stall: {unheld_tokens} of {len(extra.token_times_s)} tokens were written before the "
            f"server held any back; at most {BUFFERED_TOKENS} may be"
        )
    return {
        "itl_p99_s": itl_p99_s,
        "itl_s": summary(gaps_s),
        "itl_quantiles_s": sorted(gaps_s)[:: max(1, len(gaps_s) // QUANTILES)],
        "unheld_tokens": unheld_tokens,
    }


ROW = StalledReader()
