"""Processes that are owned: nothing of theirs outlives `stop`."""

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest

from pdserve.cli.children import Child

pytestmark = pytest.mark.asyncio

# Starts a grandchild that ignores SIGTERM, says its pid, then waits.
PARENT = """
import subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('x', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.read(1)
print(child.pid, flush=True)
time.sleep(600)
"""


def child_of(code: str, tmp_path: Path) -> Child:
    return Child("test", [sys.executable, "-c", code], os.environ, tmp_path / "test.log")


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_stop_ends_what_the_process_started_too(tmp_path: Path) -> None:
    child = child_of(PARENT, tmp_path)
    await child.start()
    grandchild = int(await child.read_line())
    assert is_alive(grandchild)
    await child.stop(grace_s=5)
    assert not is_alive(grandchild)
    assert not child.running


async def test_stop_does_not_wait_longer_than_its_grace(tmp_path: Path) -> None:
    child = child_of(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('x', flush=True); time.sleep(600)",
        tmp_path,
    )
    await child.start()
    assert await child.read_line() == "x"
    await child.stop(grace_s=0.05)
    assert await child.wait() == -9


async def test_what_its_process_started_ends_even_if_it_was_killed_first(tmp_path: Path) -> None:
    child = child_of(PARENT, tmp_path)
    await child.start()
    grandchild = int(await child.read_line())
    child.kill()
    assert await child.wait() == -9
    await child.stop(grace_s=5)
    assert not is_alive(grandchild)


async def test_the_end_of_its_log_can_be_shown(tmp_path: Path) -> None:
    child = child_of("import sys\nfor n in range(30): print('line', n, file=sys.stderr)\nsys.exit(3)", tmp_path)
    await child.start()
    assert await child.wait() == 3
    assert await asyncio.to_thread(child.last_lines, 2) == "line 28\nline 29"
    await child.stop(grace_s=0)


async def test_its_log_lines_are_those_of_its_last_start(tmp_path: Path) -> None:
    for life in ("one", "two"):
        child = child_of(f"import sys; print('{life}', file=sys.stderr)", tmp_path)
        await child.start()
        assert await child.wait() == 0
        assert await asyncio.to_thread(child.log_lines) == [life]
        await child.stop(grace_s=0)


async def test_one_that_was_never_started_is_stopped_already(tmp_path: Path) -> None:
    await child_of("", tmp_path).stop(grace_s=0)
