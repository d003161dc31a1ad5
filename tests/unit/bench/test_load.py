"""Both loops, and the command line."""

import asyncio
import json
from pathlib import Path

import pytest

from bench import load
from bench.client import Target, make_request, open_session
from bench.load import closed_loop, open_loop
from tests.unit.bench.fake_server import FakeServer


@pytest.mark.asyncio
async def test_a_closed_loop_keeps_its_streams_open_and_no_more(target: Target, fake: FakeServer) -> None:
    fake.step_s = 0.001
    async with open_session() as session:
        samples = await closed_loop(session, target, [make_request(target, " word", 10)] * 12, streams=3)
    assert [sample.ok for sample in samples] == [True] * 12
    assert fake.open_at_most == 3


@pytest.mark.asyncio
async def test_an_open_loop_waits_for_nobody(target: Target, fake: FakeServer) -> None:
    fake.fault = "hang"
    target = Target(target.url, target.model, timeout_s=0.5)
    times_s = [0.0, 0.001, 0.002, 0.003]
    async with open_session() as session:
        samples = await open_loop(session, target, [make_request(target, " word", 4)] * 4, times_s)
    assert fake.open_at_most == 4
    assert [round(s.due_s - samples[0].due_s, 6) for s in samples] == times_s
    assert all(sample.sent_s >= sample.due_s for sample in samples)


@pytest.mark.asyncio
async def test_the_command_writes_figures_and_a_picture(url: str, tmp_path: Path) -> None:
    command = f"--url {url} --streams 2 --requests 5 --prompt-tokens 8,16 --max-tokens 6 --slo-ttft 30 --slo-itl 30"
    outputs = ["--json", str(tmp_path / "out" / "load.json"), "--png", str(tmp_path / "out" / "load.png")]
    assert await asyncio.to_thread(load.main, [*command.split(), *outputs]) == 0
    document = json.loads((tmp_path / "out" / "load.json").read_text())
    assert document["outcomes"] == {"ok": 5}
    assert document["tokens_out"] == 30
    assert document["itl_s"]["count"] == 25
    assert document["goodput"]["attainment"] == 1
    assert "api_key" not in document["settings"]
    assert (tmp_path / "out" / "load.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.asyncio
async def test_poisson_arrivals_are_chosen_with_a_rate(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"--url {url} --rate 200 --requests 4 --prompt-tokens 4 --max-tokens 2"
    assert await asyncio.to_thread(load.main, command.split()) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 4


@pytest.mark.asyncio
async def test_failures_are_counted_and_shown(url: str, fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake.fault = "error"
    command = f"--url {url} --streams 2 --prompt-tokens 4 --max-tokens 4 --slo-ttft 30"
    assert await asyncio.to_thread(load.main, command.split()) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["outcomes"] == {"error_in_band": 2}
    assert "worker lost" in document["failures"][0]
    assert document["goodput"]["met"] == 0
    assert document["ttft_s"] is None


def test_an_absent_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert load.main(["--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
