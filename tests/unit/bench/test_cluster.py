"""Clusters are started, waited for and stopped; what fails says what to do."""

import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from bench.client import open_session
from bench.cluster import ClusterError, ClusterSource, is_ready
from bench.launch import Launcher
from tests.unit.bench import fake_server

FAKE = (sys.executable, fake_server.__file__ or "")


def program(launcher: Launcher, tmp_path: Path, *command: str, ready_s: float = 30) -> ClusterSource:
    return ClusterSource(launcher, tmp_path / "logs", ready_s=ready_s, command=command)


@pytest.mark.asyncio
async def test_a_started_cluster_answers_until_its_row_ends(launcher: Launcher, tmp_path: Path) -> None:
    async with program(launcher, tmp_path, *FAKE).split() as cluster, open_session() as session:
        assert cluster.model == fake_server.MODEL
        assert await is_ready(session, cluster.url)
    async with open_session() as session:
        assert not await is_ready(session, cluster.url)


@pytest.mark.asyncio
async def test_scripted_workers_are_started_whatever_engine_the_others_have(launcher: Launcher, tmp_path: Path) -> None:
    source = program(launcher, tmp_path, sys.executable, "-c", "import sys; raise SystemExit(' '.join(sys.argv))")
    source.engine = "torch"
    with pytest.raises(ClusterError, match=r"--engine torch .*--engine scripted --set engine\.scripted\.step_s=0\.5"):
        async with source.scripted(step_s=0.5):
            pytest.fail("it never was ready")


@pytest.mark.asyncio
async def test_a_cluster_that_ends_at_once_shows_its_last_words(launcher: Launcher, tmp_path: Path) -> None:
    source = program(launcher, tmp_path, sys.executable, "-c", "raise SystemExit('no room')")
    with pytest.raises(ClusterError, match="no room"):
        async with source.split():
            pytest.fail("it never was ready")


@pytest.mark.asyncio
async def test_a_cluster_that_never_gets_ready_is_stopped(launcher: Launcher, tmp_path: Path) -> None:
    source = program(launcher, tmp_path, sys.executable, "-c", "import time; time.sleep(3600)", ready_s=0.3)
    with pytest.raises(ClusterError, match=r"not ready after 0\.3 s"):
        async with source.split():
            pytest.fail("it never was ready")


@pytest.mark.asyncio
async def test_a_build_without_colocated_workers_says_so(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="colocated"):
        async with program(launcher, tmp_path, sys.executable, "-c", "print('--prefill')").colocated():
            pytest.fail("there are none")


@pytest.mark.asyncio
async def test_a_running_server_is_used_and_left_alone(source: ClusterSource, url: str) -> None:
    async with source.split() as cluster:
        assert cluster.url == url
    async with aiohttp.ClientSession() as session:
        assert await is_ready(session, url)


@pytest.mark.asyncio
async def test_no_server_at_the_url_is_explained(launcher: Launcher, tmp_path: Path) -> None:
    source = ClusterSource(launcher, tmp_path, url="http://127.0.0.1:1")
    with pytest.raises(ClusterError, match="is it running"):
        async with source.split():
            pytest.fail("nothing runs there")


def test_programs_keep_the_priority_that_the_generator_gives_up(tmp_path: Path) -> None:
    script = (
        "import os, subprocess, sys; from bench.launch import Launcher, lower_own_priority; launcher = Launcher();"
        "lower_own_priority(); own = os.getpriority(os.PRIO_PROCESS, 0);"
        "child = launcher.start([sys.executable, '-c', 'import os; print(os.getpriority(os.PRIO_PROCESS, 0))']);"
        "print(own - int(child.communicate()[0])); launcher.close()"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert int(output) > 0
