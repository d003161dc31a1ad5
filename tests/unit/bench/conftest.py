"""A fake server that runs, and where it is."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer

from bench.client import Target
from bench.cluster import ClusterSource
from bench.launch import Launcher
from tests.unit.bench.fake_server import MODEL, FakeServer


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


@pytest_asyncio.fixture
async def url(fake: FakeServer) -> AsyncIterator[str]:
    server = TestServer(fake.app(), host="127.0.0.1")
    await server.start_server(shutdown_timeout=0)
    yield str(server.make_url("")).rstrip("/")
    await server.close()


@pytest.fixture
def target(url: str) -> Target:
    return Target(url, MODEL, timeout_s=20)


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture
def source(launcher: Launcher, url: str, tmp_path: Path) -> ClusterSource:
    return ClusterSource(launcher, tmp_path / "logs", url)
