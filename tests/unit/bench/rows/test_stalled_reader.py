"""Row 15 against a server that keeps text back for a slow reader, and against some that do not."""

from collections.abc import Mapping
from pathlib import Path

import aiohttp
import pytest

from bench.client import Target
from bench.cluster import ClusterSource
from bench.row import NotRunError, RowOptions
from bench.rows import stalled_reader
from bench.rows.stalled_reader import ROW
from bench.samples import Outcome, Sample
from tests.unit.bench.fake_server import FakeServer

STREAMS = 4
OUTPUT_TOKENS = 100
BUFFERED_TOKENS = 60


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch, fake: FakeServer) -> None:
    monkeypatch.setattr(stalled_reader, "STREAMS", STREAMS)
    monkeypatch.setattr(stalled_reader, "OUTPUT_TOKENS", OUTPUT_TOKENS)
    monkeypatch.setattr(stalled_reader, "BUFFERED_TOKENS", BUFFERED_TOKENS)
    fake.step_s = 0.002
    fake.buffer_bytes = 4096


@pytest.mark.asyncio
async def test_the_others_are_measured_while_one_reader_stalls_and_while_it_reads(
    source: ClusterSource, fake: FakeServer, tmp_path: Path
) -> None:
    result = await ROW.run(source, RowOptions(pairs=3))
    (line,) = result.lines
    assert (line.ratio.runs, str(line.goal)) == (3, "<= 1.1")
    for pair in result.detail["pairs"]:
        gaps = (STREAMS - 1) * (OUTPUT_TOKENS - 1 - BUFFERED_TOKENS)
        assert pair["stalled"]["itl_s"]["count"] == pair["read"]["itl_s"]["count"] == gaps
        assert pair["stalled"]["unheld_tokens"] <= BUFFERED_TOKENS
    prompts = [body["prompt"] for body in fake.bodies]
    assert len(prompts) == len(set(prompts)) == STREAMS * 2 * (3 + 1)
    assert fake.open_at_most == STREAMS
    ROW.plot(result.detail, tmp_path / "row.png")
    assert (tmp_path / "row.png").stat().st_size > 0


@pytest.mark.asyncio
async def test_a_stream_that_the_server_held_whole_had_no_stalled_reader(
    source: ClusterSource, fake: FakeServer
) -> None:
    fake.buffer_bytes = None
    with pytest.raises(NotRunError, match="the reader did not stall"):
        await ROW.run(source, RowOptions())


@pytest.mark.asyncio
async def test_a_reader_that_was_given_up_before_the_others_ended_spoils_the_row(
    source: ClusterSource, fake: FakeServer
) -> None:
    fake.step_s, fake.patience_s = 0.005, 0.2
    with pytest.raises(NotRunError, match="the stalled stream failed: truncated"):
        await ROW.run(source, RowOptions())


@pytest.mark.asyncio
@pytest.mark.parametrize(("fault", "tokens_per_event", "reason"), [("error", 1, "worker lost"), ("", 100, "no gap")])
async def test_streams_that_fail_or_come_in_one_piece_are_no_figure(
    source: ClusterSource, fake: FakeServer, fault: str, tokens_per_event: int, reason: str
) -> None:
    fake.buffer_bytes, fake.fault, fake.tokens_per_event = None, fault, tokens_per_event
    with pytest.raises(NotRunError, match=reason):
        await ROW.run(source, RowOptions())


def sample(gap_s: float, largest_event_tokens: int) -> Sample:
    times_s = tuple(index * gap_s for index in range(OUTPUT_TOKENS))
    return Sample(Outcome.OK, 0.0, 0.0, times_s[-1], times_s, len(times_s), 8, 0, "length", "", largest_event_tokens)


@pytest.mark.asyncio
async def test_the_ratio_is_that_with_over_without_in_pairs_of_changing_order(
    source: ClusterSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[bool] = []
    gaps_s: Mapping[bool, list[float]] = {True: [9.0, 2.0, 3.0, 4.0], False: [1.0, 2.0, 2.0, 2.0]}

    async def streams(
        session: aiohttp.ClientSession, target: Target, seed: int, *, stalled: bool
    ) -> tuple[list[Sample], Sample]:
        order.append(stalled)
        gap_s = gaps_s[stalled].pop(0)
        return [sample(gap_s, 1)] * (STREAMS - 1), sample(gap_s, OUTPUT_TOKENS - BUFFERED_TOKENS if stalled else 1)

    monkeypatch.setattr(stalled_reader, "_streams", streams)
    (line,) = (await ROW.run(source, RowOptions(pairs=3))).lines
    assert (line.ratio.min, line.ratio.median, line.ratio.max) == pytest.approx((1.0, 1.5, 2.0))
    assert line.reached is False
    assert order == [False, True, True, False] * 2
