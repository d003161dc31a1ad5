"""One Ray head for all tests of a module; controllers of each test have a namespace and a port of their own."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from pdserve.cli.machine import find_free_port
from pdserve.cluster.environment import local_ray_environment, write_token

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 40.0


class Process:
    """A process in a session of its own, with its log."""

    def __init__(self, words: list[str], env: dict[str, str], log_path: Path) -> None:
        self.log_path = log_path
        with log_path.open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                cwd=ROOT,
                text=True,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def terminate(self) -> int:
        """SIGTERM, and its exit status."""
        self.popen.terminate()
        return self.popen.wait(DEADLINE_S)

    def close(self) -> None:
        """Whatever is left of it and of what it started."""
        for pid in session_members(self.popen.pid):
            os.kill(pid, signal.SIGKILL)
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout):
            assert stream is not None
            stream.close()


class Head(Process):
    def __init__(self, run_dir: Path) -> None:
        write_token(run_dir / "token")
        self.env = os.environ | local_ray_environment(run_dir / "token")
        self.address = f"127.0.0.1:{find_free_port()}"
        words = ["-m", "pdserve.cluster.head", "--temp-dir", str(run_dir / "ray"), "--prestarted", "2"]
        super().__init__([*words, "--port", self.address.rpartition(":")[2]], self.env, run_dir / "head.log")
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline().strip() == self.address, self.log


class Controller(Process):
    """A controller with short timers and scripted workers."""

    def __init__(self, head: Head, namespace: str, port: int, log_path: Path, *settings: str) -> None:
        self.address = f"127.0.0.1:{port}"
        words = ["-m", "services.controller"]
        for setting in (
            f"cluster.address={head.address}",
            f"cluster.namespace={namespace}",
            f"cluster.port={port}",
            "cluster.watch_s=0.2",
            "cluster.keep_workers=false",
            "session.dead_after_s=1.5",
            "session.pulse_s=0.2",
            "engine.kind=scripted",
            "engine.num_blocks=64",
            *settings,
        ):
            words += ["--set", setting]
        super().__init__(words, head.env, log_path)


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with tempfile.TemporaryDirectory(prefix="pds-", dir="/tmp", ignore_cleanup_errors=True) as run_dir:
        head = Head(Path(run_dir))
        try:
            yield head
        finally:
            head.close()


@pytest.fixture
def start_controller(head: Head, tmp_path: Path) -> Iterator[Callable[..., Controller]]:
    """Starts controllers of one cluster, all on one port unless told otherwise. At the end nothing of theirs is left."""
    namespace, port = uuid4().hex, find_free_port()
    before = set(session_members(head.popen.pid))
    controllers: list[Controller] = []

    def start(*settings: str, port: int = port) -> Controller:
        log_path = tmp_path / f"controller-{len(controllers)}.log"
        controllers.append(Controller(head, namespace, port, log_path, *settings))
        return controllers[-1]

    yield start
    for controller in controllers:
        if controller.popen.poll() is None:
            controller.terminate()
        controller.close()
    # Ray keeps idle processes for the next actor; what was one has ended.
    for pid in set(session_members(head.popen.pid)) - before:
        if "ray::IDLE" not in command_of(pid):
            os.kill(pid, signal.SIGKILL)


def session_members(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except (psutil.Error, ProcessLookupError):
            # It has ended meanwhile.
            continue
    return members


def command_of(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {deadline_s} s: {what}"
        time.sleep(0.05)
