"""`pdserve up` as a process that tests can ask, signal and wait for."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from pdserve.cli.machine import find_free_port
from tests.cluster.conftest import DEADLINE_S, ROOT, wait_until

START_S = 90.0


def pdserve(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdserve.cli.main", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False)


class Up:
    """A running `pdserve up`, with a controller that looks five times a second."""

    def __init__(self, log_path: Path, *words: str, engine: str = "scripted") -> None:
        self.port, self.controller = find_free_port(), f"127.0.0.1:{find_free_port()}"
        self.log_path = log_path
        settings = [f"cluster.port={self.controller.rpartition(':')[2]}", "cluster.watch_s=0.2"]
        command = [sys.executable, "-m", "pdserve.cli.main", "up", "--engine", engine, "--port", str(self.port)]
        command += [*words, *(word for setting in settings for word in ("--set", setting))]
        with log_path.open("wb") as log:
            self.popen = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def output(self) -> str:
        return self.log_path.read_text()

    @property
    def run_dir(self) -> Path:
        return Path(next(line.removeprefix("logs: ") for line in self.output.splitlines() if line.startswith("logs: ")))

    def wait_ready(self) -> None:
        wait_until(lambda: f"ready {self.url}" in self.output or self.popen.poll() is not None, "ready", START_S)
        assert f"ready {self.url}" in self.output, self.output

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.popen.pid).children(recursive=True)

    def pid_of(self, module: str) -> int:
        return next(p.pid for p in psutil.Process(self.popen.pid).children() if module in " ".join(p.cmdline()))

    def epochs(self) -> dict[str, str]:
        return {w["worker_id"]: w["epoch"] for w in self._ready_workers()}

    def worker_pid(self, worker_id: str) -> int:
        return next(int(w["pid"]) for w in self._ready_workers() if w["worker_id"] == worker_id)

    def _ready_workers(self) -> list[dict[str, Any]]:
        done = pdserve("status", "--json", "--controller", self.controller)
        if done.returncode != 0:
            return []
        return [w for w in json.loads(done.stdout)["workers"] if w["state"] == "ready"]


@contextmanager
def running_up(log_path: Path, *words: str, engine: str = "scripted") -> Iterator[Up]:
    """A running `pdserve up`, ended by SIGTERM."""
    started = Up(log_path, *words, engine=engine)
    try:
        yield started
    finally:
        if started.popen.poll() is None:
            started.popen.send_signal(signal.SIGTERM)
            started.popen.wait(DEADLINE_S)
        # It stays when it was killed.
        shutil.rmtree(started.run_dir, ignore_errors=True)
