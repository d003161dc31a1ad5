"""Row 5 against a server that hands nothing over."""

from collections import Counter
from pathlib import Path

import pytest

from bench.cluster import ClusterSource
from bench.row import NotRunError, RowOptions
from bench.rows.handoff import LEAST_PAIRS, LENGTHS_TOKENS, OUTPUT_TOKENS, ROW
from tests.unit.bench.fake_server import FakeServer


@pytest.mark.asyncio
async def test_each_length_has_both_figures_of_at_least_five_pairs(
    source: ClusterSource, fake: FakeServer, tmp_path: Path
) -> None:
    fake.step_s = 0.001
    result = await ROW.run(source, RowOptions(pairs=3))
    assert len(result.lines) == 2 * len(LENGTHS_TOKENS)
    assert {line.ratio.runs for line in result.lines} == {LEAST_PAIRS}
    assert {str(line.goal) for line in result.lines} == {"<= 1", "<= 1.05"}
    sent = Counter((len(body["prompt"].split()), body["max_tokens"]) for body in fake.bodies)
    assert sent == {(tokens, outputs): LEAST_PAIRS + 1 for tokens in LENGTHS_TOKENS for outputs in (1, OUTPUT_TOKENS)}
    ROW.plot(result.detail, tmp_path / "row.png")
    assert (tmp_path / "row.png").stat().st_size > 0


@pytest.mark.asyncio
async def test_no_prompt_can_come_from_a_prefix_cache(source: ClusterSource, fake: FakeServer) -> None:
    await ROW.run(source, RowOptions())
    beginnings = [tuple(body["prompt"].split()[:4]) for body in fake.bodies if len(body["prompt"].split()) == 512]
    assert len(beginnings) == len(set(beginnings))


@pytest.mark.asyncio
async def test_a_cached_prompt_spoils_the_row(source: ClusterSource, fake: FakeServer) -> None:
    fake.cached_tokens = 16
    with pytest.raises(NotRunError, match="prefix cache"):
        await ROW.run(source, RowOptions())


@pytest.mark.asyncio
async def test_a_step_that_cannot_be_seen_is_no_figure(source: ClusterSource, fake: FakeServer) -> None:
    fake.tokens_per_event = 8
    fake.step_s = 0.001
    with pytest.raises(NotRunError, match="share events"):
        await ROW.run(source, RowOptions())
