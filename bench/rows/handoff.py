"""Row 5: what of the handoff a client can see."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from bench.client import Target, make_request, open_session, stream
from bench.cluster import ClusterSource
from bench.plots import plot_bars
from bench.prompts import make_prompt, renewed
from bench.row import Goal, Line, NotRunError, RowOptions, RowResult, paired_line
from bench.samples import Sample, judge
from bench.statistics import quantile

LENGTHS_TOKENS = (128, 512, 1500)
OUTPUT_TOKENS = 32
LEAST_PAIRS = 5
STEP_GOAL = Goal("<=", 1.0)
TTFT_GOAL = Goal("<=", 1.05)


class Handoff:
    """The second token's gap beyond one decode step; and TTFT beside that of a request that hands nothing over.

    A request for one token reserves and sends nothing, so its TTFT is the floor on the same prefill worker.
    """

    number = 5
    title = "Handoff that the client can see: (second token - first) - one decode step; TTFT with over without"
    target = f"{STEP_GOAL} decode step; TTFT {TTFT_GOAL}"

    async def run(self, cluster: ClusterSource, options: RowOptions) -> RowResult:
        lines: list[Line] = []
        detail: dict[str, Any] = {"lengths": {}}
        count = max(options.pairs, LEAST_PAIRS)
        async with cluster.split() as split, open_session() as session:
            for tokens in LENGTHS_TOKENS:
                pairs = await _pairs(session, split.target(), tokens, count)
                detail["lengths"][str(tokens)] = pairs
                lines += _lines(tokens, pairs)
        return RowResult(tuple(lines), detail)

    def plot(self, detail: Mapping[str, Any], path: Path) -> None:
        kinds = ("ttft_with_s", "ttft_without_s", "handoff_s", "step_s")
        groups = {
            f"{tokens} tokens": {kind: quantile([pair[kind] for pair in pairs], 0.5) for kind in kinds}
            for tokens, pairs in detail["lengths"].items()
        }
        plot_bars(self.title, groups, "s", path)


async def _pairs(session: aiohttp.ClientSession, target: Target, tokens: int, count: int) -> list[dict[str, float]]:
    """`count` pairs of a request with a handoff and one without, in changing order, after one to warm up."""
    pairs: list[dict[str, float]] = []
    prompt = make_prompt(tokens, seed=5)
    for pair in range(count + 1):
        answers: dict[int, Sample] = {}
        outputs = (OUTPUT_TOKENS, 1) if pair % 2 else (1, OUTPUT_TOKENS)
        for place, output_tokens in enumerate(outputs):
            fresh = renewed(prompt, nonce=2 * pair + place)
            answers[output_tokens] = await _answer(session, target, fresh, output_tokens)
        pairs.append(_figures(answers[OUTPUT_TOKENS], answers[1]))
    return pairs[1:]


async def _answer(session: aiohttp.ClientSession, target: Target, prompt: str, output_tokens: int) -> Sample:
    sample = judge(await stream(session, target, make_request(target, prompt, output_tokens)))
    if not sample.ok:
        raise NotRunError(f"a request failed: {sample.outcome}: {sample.detail}")
    if len(sample.token_times_s) != output_tokens:
        raise NotRunError(f"{len(sample.token_times_s)} tokens came where {output_tokens} were asked for")
    if sample.cached_tokens:
        raise NotRunError(f"{sample.cached_tokens} tokens of a prompt came from a prefix cache: TTFT means nothing")
    return sample


def _figures(with_handoff: Sample, without: Sample) -> dict[str, float]:
    """The decode step is the median gap of the same stream from its second token on."""
    first_gap_s, *steps_s = with_handoff.itls_s
    step_s = quantile(steps_s, 0.5)
    if step_s == 0:
        raise NotRunError("most tokens share events: a decode step cannot be seen from outside")
    ttft_with_s, ttft_without_s = with_handoff.ttft_s, without.ttft_s
    if ttft_with_s is None or ttft_without_s is None:
        raise NotRunError("a stream brought no token")
    return {
        "ttft_with_s": ttft_with_s,
        "ttft_without_s": ttft_without_s,
        "step_s": step_s,
        "handoff_s": first_gap_s - step_s,
    }


def _lines(tokens: int, pairs: list[dict[str, float]]) -> list[Line]:
    handoff_s, step_s, with_s, without_s = (
        [pair[key] for pair in pairs] for key in ("handoff_s", "step_s", "ttft_with_s", "ttft_without_s")
    )
    visible, ttft = f"visible handoff, {tokens} tokens", f"TTFT with handoff, {tokens} tokens"
    return [
        paired_line(visible, "one decode step", "s", handoff_s, step_s, STEP_GOAL),
        paired_line(ttft, "the same for one token, no handoff", "s", with_s, without_s, TTFT_GOAL),
    ]


ROW = Handoff()
