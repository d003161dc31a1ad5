"""Starting the programs that are measured at full priority, while the load generator itself runs at a lower one."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from bench.machine import REPOSITORY

GENERATOR_NICE = 5


class Launcher:
    """Starts processes from a thread that keeps the priority this process was started with.

    On Linux a thread has a priority of its own and a child inherits that of the thread which starts it.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="launcher")
        self._thread.submit(os.getpid).result()  # the thread must exist before its maker's priority is lowered

    def start(
        self,
        command: Sequence[str],
        *,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program in the repository's root, in a process group of its own."""
        return self._thread.submit(
            lambda: subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=dict(os.environ) | dict(environment or {}),
                start_new_session=True,
            )
        ).result()

    def close(self) -> None:
        """Programs that were started go on."""
        self._thread.shutdown()


def lower_own_priority() -> None:
    """Let the measured programs win wherever they and the calling thread want the same core."""
    os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), GENERATOR_NICE))


def log_tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log, for an error message."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
