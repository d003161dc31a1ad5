"""What `pdserve up` does about processes that end by themselves, with processes that only play their part."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdserve.cli.children import Child
from pdserve.cli.machine import Machine, Say
from pdserve.config import Settings, load_settings
from pdserve.core.errors import StartupError

pytestmark = pytest.mark.asyncio

DEADLINE_S = 20.0
BEGINS = """
import pathlib, sys, time
trace = pathlib.Path(sys.argv[1])
has_lived = trace.exists()
trace.touch()
"""
LIVES = BEGINS + "print('here', flush=True); time.sleep(600)"
LIVES_ONCE = BEGINS + "has_lived and sys.exit('no room for another life'); print('here', flush=True); time.sleep(600)"
# Its later lives go on, and never say that they are there.
SPEAKS_ONCE = BEGINS + "has_lived or print('here', flush=True); time.sleep(600)"


class PlayedMachine(Machine):
    """Its processes run these scripts, by name; `LIVES` if there is none.

    Attributes:
        said: the lines for a person.
        serves: whether workers are ready and the frontend has them.
        started: each process that was ever made, in order.
    """

    def __init__(self, settings: Settings, run_dir: Path, scripts: Mapping[str, str]) -> None:
        super().__init__(settings, [], run_dir)
        self.said: list[str] = []
        self.serves = asyncio.Event()
        self.started: list[Child] = []
        self._scripts = scripts

    def pid_of(self, name: str) -> int:
        """Of the newest one."""
        return next(child.pid for child in reversed(self.started) if child.name == name)

    async def head_of(self, life: int) -> int:
        """The pid of the head's so manieth life, once it has begun: a restart is told before it is done."""
        async with asyncio.timeout(DEADLINE_S):
            while (
                len(heads := [child for child in self.started if child.name == "ray"]) < life or not heads[-1].running
            ):
                await asyncio.sleep(0.01)
        return heads[-1].pid

    async def wait_lived(self) -> None:
        """Until the first life of each has begun."""
        async with asyncio.timeout(DEADLINE_S):
            while not all(self._trace(child.name).exists() for child in self.started):
                await asyncio.sleep(0.01)

    async def wait_said(self, line: str, times: int = 1) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while sum(line in said for said in self.said) < times:
                await asyncio.sleep(0.01)

    def _child(self, name: str, command: Sequence[str]) -> Child:
        command = [sys.executable, "-c", self._scripts.get(name, LIVES), str(self._trace(name))]
        child = Child(name, command, os.environ, self.run_dir / f"{name}.log")
        self.started.append(child)
        return child

    def _trace(self, name: str) -> Path:
        return self.run_dir / f"{name}-has-lived"

    async def _watch_workers(self, say: Say, enough: int) -> None:
        await self.serves.wait()

    async def _poll_ready(self) -> None:
        await self.serves.wait()


@asynccontextmanager
async def supervised(
    run_dir: Path, scripts: Mapping[str, str] | None = None, start_s: float = 60.0
) -> AsyncIterator[tuple[PlayedMachine, "asyncio.Task[None]"]]:
    """A machine that has started, and its supervision. A cluster that is started anew doesn't serve until it is told."""
    settings = load_settings(environ={}, overrides={"cluster": {"start_s": start_s}})
    machine = PlayedMachine(settings, run_dir, scripts or {})
    try:
        machine.serves.set()
        await machine.start(machine.said.append)
        machine.serves.clear()
        await machine.wait_lived()
        supervision = asyncio.create_task(machine.supervise(machine.said.append))
        try:
            yield machine, supervision
        finally:
            supervision.cancel()
            await asyncio.gather(supervision, return_exceptions=True)
    finally:
        machine.hurry()
        await machine.stop()


@pytest.mark.parametrize("head", [LIVES, SPEAKS_ONCE])
async def test_whatever_ends_while_a_new_head_comes_up_is_started_again(tmp_path: Path, head: str) -> None:
    async with supervised(tmp_path, {"ray": head}) as (machine, supervision):
        os.kill(machine.pid_of("ray"), signal.SIGKILL)
        await machine.wait_said("ray has ended and is started again")
        for name in ("frontend", "controller"):
            os.kill(machine.pid_of(name), signal.SIGKILL)
            await machine.wait_said(f"{name} has ended and is started again")
        machine.serves.set()
        await machine.wait_said("serves again after")
        assert not supervision.done()
        assert all(child.running for child in machine.started[-2:])


async def test_a_second_head_that_ends_is_one_more_end(tmp_path: Path) -> None:
    async with supervised(tmp_path) as (machine, supervision):
        for times in (1, 2):
            os.kill(await machine.head_of(times), signal.SIGKILL)
            await machine.wait_said("ray has ended and is started again", times)
        machine.serves.set()
        await machine.wait_said("serves again after")
        assert not supervision.done()


async def test_a_cluster_that_cannot_come_back_ends_it_in_one_line(tmp_path: Path) -> None:
    async with supervised(tmp_path, {"ray": LIVES_ONCE}) as (machine, supervision):
        os.kill(machine.pid_of("ray"), signal.SIGKILL)
        with pytest.raises(StartupError) as failure:
            await asyncio.wait_for(supervision, DEADLINE_S)
    log_path = tmp_path / "ray.log"
    assert str(failure.value) == (
        f"ray keeps ending, last with status 1 (no room for another life); its log: {log_path}"
    )
    assert len(machine.said) < 10


async def test_a_controller_that_keeps_ending_beside_a_silent_head_ends_it(tmp_path: Path) -> None:
    scripts = {"ray": SPEAKS_ONCE, "controller": LIVES_ONCE}
    async with supervised(tmp_path, scripts) as (machine, supervision):
        os.kill(machine.pid_of("ray"), signal.SIGKILL)
        with pytest.raises(StartupError, match="controller keeps ending"):
            await asyncio.wait_for(supervision, DEADLINE_S)


async def test_a_new_head_whose_cluster_never_serves_ends_it(tmp_path: Path) -> None:
    async with supervised(tmp_path, start_s=0.1) as (machine, supervision):
        os.kill(machine.pid_of("ray"), signal.SIGKILL)
        with pytest.raises(StartupError, match=r"does not serve again after 0\.2 s"):
            await asyncio.wait_for(supervision, DEADLINE_S)


async def test_one_that_ends_at_the_start_is_one_line(tmp_path: Path) -> None:
    machine = PlayedMachine(Settings(), tmp_path, {"ray": "import sys; sys.exit('no room')"})
    try:
        with pytest.raises(StartupError) as failure:
            await machine.start(machine.said.append)
    finally:
        machine.hurry()
        await machine.stop()
    assert str(failure.value) == f"ray has ended with status 1 (no room); its log: {tmp_path / 'ray.log'}"


async def test_a_default_model_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PDSERVE_CACHE_DIR", str(tmp_path / "file"))
    said: list[str] = []
    with pytest.raises(StartupError) as failure:
        await Machine(load_settings(environ={}), [], tmp_path).make_model(said.append)
    assert str(failure.value).startswith(f"cannot make the default model: cannot write {tmp_path}/file/models/")
    assert said == ["making SmolLM2-135M-Instruct from its package (half a minute, once)"]
