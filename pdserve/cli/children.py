"""Processes that `pdserve up` owns: started with a log file, watched, and ended by their pid."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

_REAP_S = 0.02

# Becomes the command that follows, after it has asked for a SIGTERM when its parent dies, however that comes. Not done
# between fork and exec: gRPC's threads in this process make that unsafe.
_LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class Child:
    """One process in a session of its own, so that Ctrl-C in the terminal reaches only its owner.

    Args:
        command: its first word is the path of a program.

    Its stdin is a pipe that ends when its owner does; its stdout can be read; its stderr goes to `log_path`.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._command = command
        self._env = env
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    async def start(self) -> None:
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-ISc", _LAUNCH, str(os.getpid()), *self._command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=dict(self._env),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._started.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._started.returncode

    async def wait(self) -> int:
        """Until it has ended. Returns: its exit status, negative for a signal."""
        return await self._started.wait()

    async def read_line(self) -> str:
        """Its next line on stdout; "" when it has ended."""
        output = self._started.stdout
        assert output is not None
        return (await output.readline()).decode().strip()

    async def stop(self, grace_s: float) -> None:
        """End it and every process that it has started: SIGTERM, then SIGKILL for what is left after `grace_s`."""
        if self._process is None:
            return
        if self.running:
            self._process.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        # What it started may have lost its parent, but never its session.
        while left := await asyncio.to_thread(_session_members, self._process.pid):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(_REAP_S)
        await self._process.wait()

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def log_lines(self) -> list[str]:
        """What it has logged since it was started last."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace").splitlines()

    def last_lines(self, count: int) -> str:
        """The end of its log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-count:])

    @property
    def _started(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process


def _session_members(session: int) -> list[int]:
    """Processes of a session that have not ended; a number in use is never given to another session."""
    members = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
    return members
