"""Services as processes of their own, as `python -m services.prefill` and its like start them, workers above all."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from pdserve.config import SessionConfig
from pdserve.core.errors import PdserveError
from pdserve.core.events import Role
from pdserve.rpc.v1.admin_pb2 import WorkerStatus
from pdserve.rpc.v1.session_pb2 import WORKER_STATE_READY
from pdserve.wire.admin_client import AdminClient
from tests.manual_frontend import ManualFrontend

ROOT = Path(__file__).parents[1]
# Importing torch and loading a model, while others do the same on the same cores.
START_S = 90.0
_LOG_LINES = 8
_STARTED = "worker started"


class ServiceProcess:
    """One process of a service; it has begun to start when this returns.

    Args:
        settings: nested like the TOML file.
        log_path: what it writes on stderr.
    Attributes:
        pid: of the process.
    """

    def __init__(self, service: str, log_path: Path, settings: Mapping[str, Any]) -> None:
        self.service = service
        self.settings = settings
        self._log_path = log_path
        words = [sys.executable, "-m", f"services.{service}"]
        for path, value in _flat(settings):
            words += ["--set", f"{path}={value}"]
        with log_path.open("wb") as log_file:
            self._popen = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log_file, cwd=ROOT
            )
        self.pid = self._popen.pid

    @property
    def log(self) -> str:
        return self._log_path.read_text(encoding="utf-8")

    @property
    def last_lines(self) -> str:
        """The end of its log, for messages of failed tests."""
        return f"the {self.service} process's last words:\n" + "\n".join(self.log.splitlines()[-_LOG_LINES:])

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def assert_alive(self) -> None:
        assert self.is_alive, f"it ended with {self._popen.poll()}; {self.last_lines}"

    async def logged(self, message: str) -> dict[str, Any]:
        """The first line of its log whose message begins so."""
        until_s = time.monotonic() + START_S
        while True:
            for line in self.log.splitlines(keepends=True):
                # The last line may be half written.
                if line.startswith("{") and line.endswith("\n"):
                    entry: dict[str, Any] = json.loads(line)
                    if entry["message"].startswith(message):
                        return entry
            self.assert_alive()
            assert time.monotonic() < until_s, f"not started within {START_S} s; {self.last_lines}"
            await asyncio.sleep(0.02)

    def kill(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    async def wait_exit(self, deadline_s: float = 20.0) -> int:
        """Its exit status; below zero, the signal that ended it."""
        until_s = time.monotonic() + deadline_s
        while (status := self._popen.poll()) is None:
            assert time.monotonic() < until_s, f"still running after {deadline_s} s; {self.last_lines}"
            await asyncio.sleep(0.01)
        return status

    def stop(self) -> None:
        """End it now, whatever state it is in."""
        self._popen.kill()
        self._popen.wait()


class WorkerProcess(ServiceProcess):
    """One worker."""

    def __init__(self, role: Role, log_path: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(str(role), log_path, settings)
        self.role = role

    async def session_address(self) -> str:
        return _here((await self.logged(_STARTED))["address"])

    async def admin_address(self) -> str:
        return _here((await self.logged(_STARTED))["admin"])

    async def status(self) -> WorkerStatus:
        """
        Raises:
            PdserveError: it gives no answer.
        """
        client = AdminClient(await self.admin_address())
        try:
            return await client.status()
        finally:
            await client.close()

    async def states(self) -> set[str]:
        """Names of the states that its attempts are in."""
        client = AdminClient(await self.admin_address())
        try:
            return {sequence.state for sequence in await client.list_sequences()}
        finally:
            await client.close()

    async def wait_ready(self) -> WorkerStatus:
        """Until its model is loaded; fails the test with its last words when that does not come."""
        until_s = time.monotonic() + START_S
        while True:
            # It may have ended between two questions.
            with suppress(PdserveError):
                if (status := await self.status()).pulse.state == WORKER_STATE_READY:
                    return status
            self.assert_alive()
            assert time.monotonic() < until_s, f"not ready within {START_S} s; {self.last_lines}"
            await asyncio.sleep(0.05)

    async def settle(self, deadline_s: float = 10.0) -> WorkerStatus:
        """Until it holds nothing and every block is free or cached (invariant 4)."""
        until_s = time.monotonic() + deadline_s
        while (status := await self.status()).attempts or status.transfers or status.used_blocks:
            assert time.monotonic() < until_s, f"it still holds {status}; {self.last_lines}"
            await asyncio.sleep(0.02)
        return status


@contextmanager
def worker_processes(
    log_dir: Path, prefill: Sequence[Mapping[str, Any]], decode: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[WorkerProcess, ...]]:
    """Workers with these settings, prefill first, starting side by side; all are ended at the end."""
    roles = [*(Role.PREFILL for _ in prefill), *(Role.DECODE for _ in decode)]
    processes: list[WorkerProcess] = []
    try:
        for index, (role, settings) in enumerate(zip(roles, (*prefill, *decode), strict=True)):
            processes.append(WorkerProcess(role, log_dir / f"{role}-{index}-{os.urandom(4).hex()}.log", settings))
        yield tuple(processes)
    finally:
        for process in processes:
            process.stop()


@asynccontextmanager
async def frontend_to(*processes: WorkerProcess) -> AsyncIterator[ManualFrontend]:
    """A frontend with a session to each of these workers, once they are ready."""
    frontend = ManualFrontend()
    try:
        for process in processes:
            await process.wait_ready()
            config = SessionConfig.model_validate(process.settings.get("session", {}))
            await frontend.connect(process.role, await process.session_address(), config)
        yield frontend
    finally:
        await frontend.close()


def _here(address: str) -> str:
    """Where this machine reaches an address, whatever host others are told."""
    return "127.0.0.1:" + address.rpartition(":")[2]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
