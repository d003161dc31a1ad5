"""Row 6 runs two programs in turn and compares what they say."""

from pathlib import Path

import pytest

from bench.cluster import ClusterSource
from bench.launch import Launcher
from bench.row import NotRunError, RowOptions
from bench.rows import kv_push
from bench.rows.kv_push import ROW


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Bytes a second that each program reaches, run by run; an empty list is one that cannot run."""
    given: dict[str, list[float]] = {"bench.tcp_floor": [], "bench.kv_link": []}

    async def rate(launcher: Launcher, module: str) -> float:
        if not given[module]:
            raise NotRunError(f"{module} is not there")
        return given[module].pop(0)

    monkeypatch.setattr(kv_push, "_rate", rate)
    return given


@pytest.mark.asyncio
async def test_pairs_are_compared_after_one_that_warms_up(
    rates: dict[str, list[float]], launcher: Launcher, tmp_path: Path
) -> None:
    rates["bench.tcp_floor"] = [9e9, 4e9, 2e9, 4e9]
    rates["bench.kv_link"] = [1e9, 2e9, 1e9, 1e9]
    result = await ROW.run(ClusterSource(launcher, tmp_path), RowOptions(pairs=3))
    (line,) = result.lines
    assert (line.ratio.min, line.ratio.median, line.ratio.max) == (0.25, 0.5, 0.5)
    assert line.reached
    ROW.plot(result.detail, tmp_path / "row.png")
    assert (tmp_path / "row.png").stat().st_size > 0


@pytest.mark.asyncio
async def test_without_a_push_the_floor_is_still_told(
    rates: dict[str, list[float]], launcher: Launcher, tmp_path: Path
) -> None:
    rates["bench.tcp_floor"] = [4e9]
    with pytest.raises(NotRunError, match=r"kv_link is not there.*floor alone.*4\.00 GB/s"):
        await ROW.run(ClusterSource(launcher, tmp_path), RowOptions(pairs=3))


@pytest.mark.asyncio
async def test_a_program_that_fails_gives_its_last_line(launcher: Launcher) -> None:
    with pytest.raises(NotRunError, match="No module named"):
        await kv_push._rate(launcher, "bench.nothing")


@pytest.mark.asyncio
async def test_the_floor_is_two_real_processes(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_push, "BYTES_TOTAL", 1 << 22)
    assert await kv_push._rate(launcher, "bench.tcp_floor") > 0
