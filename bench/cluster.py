"""A cluster to measure: started for a row and stopped after it, or one that runs already."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from bench.client import Target, first_model, open_session
from bench.launch import Launcher, log_tail

COMMAND = (sys.executable, "-m", "pdserve.cli.main", "up")
POLL_S = 0.1
STOP_S = 20.0


class ClusterError(Exception):
    """A cluster did not start, or is not the one that a row needs. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A server that answers: where it is and which model it has."""

    url: str
    model: str

    def target(self) -> Target:
        """Requests of text completion to it: prompts then have exactly the length that is asked for."""
        return Target(self.url, self.model)


@dataclass(slots=True)
class ClusterSource:
    """Gives rows the clusters they need.

    Attributes:
        url: measure this running server instead of starting one.
        engine: of clusters that are started; "" for the real model.
        peers: name → URL of other servers that run here, to be measured the same way.
        ready_s: the longest start that is waited for.
        command: starts a cluster; flags are appended.
    """

    launcher: Launcher
    logs: Path
    url: str = ""
    engine: str = ""
    peers: Mapping[str, str] = field(default_factory=dict)
    ready_s: float = 180.0
    command: tuple[str, ...] = COMMAND

    @contextlib.asynccontextmanager
    async def split(self) -> AsyncIterator[Cluster]:
        """One prefill and one decode worker.

        Raises:
            ClusterError: it did not become ready.
        """
        if self.url:
            yield await attach(self.url)
            return
        async with self._started(("--prefill", "1", "--decode", "1"), "split") as cluster:
            yield cluster

    @contextlib.asynccontextmanager
    async def scripted(self, step_s: float) -> AsyncIterator[Cluster]:
        """One prefill and one decode worker that compute nothing, whatever `engine` says: each step takes `step_s`.

        For what is to be seen of the frontend and the sessions, beside more streams than a model on two cores carries.

        Raises:
            ClusterError: it did not become ready.
        """
        if self.url:
            yield await attach(self.url)
            return
        scripted = ("--engine", "scripted", "--set", f"engine.scripted.step_s={step_s}")
        async with self._started(("--prefill", "1", "--decode", "1", *scripted), "scripted") as cluster:
            yield cluster

    @contextlib.asynccontextmanager
    async def colocated(self) -> AsyncIterator[Cluster]:
        """One worker that does both, with both cores: the control.

        Raises:
            ClusterError: a server that runs already is measured, this build has no colocated workers, or the cluster
                did not become ready.
        """
        if self.url:
            raise ClusterError("not started beside the server of --url, whose cores it would take")
        if "--colocated" not in await self._help():
            raise ClusterError("this build of pdserve has no `up --colocated`")
        async with self._started(("--colocated",), "colocated") as cluster:
            yield cluster

    @contextlib.asynccontextmanager
    async def _started(self, flags: tuple[str, ...], name: str) -> AsyncIterator[Cluster]:
        port, controller_port = free_ports(2)
        engine = ("--engine", self.engine) if self.engine else ()
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{name}.log"
        ports = ("--port", str(port), "--set", f"cluster.port={controller_port}")
        command = (*self.command, *ports, *engine, *flags)  # a row's own flags win
        with log.open("wb") as output:
            process = self.launcher.start(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield await self._ready(process, f"http://127.0.0.1:{port}", command, log)
        finally:
            await asyncio.to_thread(stop, process)

    async def _ready(self, process: subprocess.Popen[bytes], url: str, command: tuple[str, ...], log: Path) -> Cluster:
        try:
            async with asyncio.timeout(self.ready_s), open_session() as session:
                while not await is_ready(session, url):
                    if process.poll() is not None:
                        raise ClusterError(f"{' '.join(command)} ended with {process.returncode}:\n{log_tail(log)}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            message = f"{' '.join(command)} was not ready after {self.ready_s:g} s; see {log}:\n{log_tail(log)}"
            raise ClusterError(message) from None
        return await attach(url)

    async def _help(self) -> str:
        process = self.launcher.start((*self.command, "--help"), stderr=subprocess.DEVNULL)
        output, _ = await asyncio.to_thread(process.communicate)
        return output.decode(errors="replace")


async def attach(url: str) -> Cluster:
    """A server that runs already.

    Raises:
        ClusterError: nothing answers there, or it lists no model.
    """
    try:
        async with open_session() as session:
            return Cluster(url, await first_model(session, url))
    except (aiohttp.ClientError, OSError, LookupError, ValueError) as error:
        raise ClusterError(f"{url} lists no models ({type(error).__name__}: {error}): is it running?") from error


async def is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    """Whether the server says that it can serve."""
    try:
        async with session.get(f"{url}/ready") as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError):
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a program and whatever it started: asked first, made to if it has not obeyed after a while."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the group outlives its leader while any member lives
    process.wait()


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nothing listens on just now."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(listener.getsockname()[1]) for listener in listeners]
