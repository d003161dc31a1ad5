"""`pdserve up` as it is typed: one command from nothing to an answer, and nothing left behind it."""

import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.cli.machine import find_free_port
from tests.cluster.conftest import DEADLINE_S, is_alive, wait_until
from tests.cluster.up import START_S, Up, pdserve, running_up

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return tmp_path / "up.log"


@pytest.fixture
def up(log_path: Path, request: pytest.FixtureRequest) -> Iterator[Up]:
    with running_up(log_path, *getattr(request, "param", ())) as started:
        yield started


@pytest.mark.parametrize("up", [("--no-demo",)], indirect=True)
def test_what_ends_by_itself_is_started_again_and_ctrl_c_leaves_nothing(up: Up) -> None:
    up.wait_ready()
    first = up.epochs()
    assert set(first) == {"prefill-0", "decode-0"}

    whole = pdserve("generate", "Hello", "--max-tokens", "5", "--url", up.url, "--no-stream")
    streamed = pdserve("generate", "Hello", "--max-tokens", "5", "--url", up.url)
    assert whole.returncode == streamed.returncode == 0, whole.stderr + streamed.stderr
    assert whole.stdout.strip()

    os.kill(up.pid_of("services.controller"), signal.SIGKILL)
    wait_until(lambda: "controller has ended and is started again" in up.output, "the controller's end is told")
    wait_until(lambda: up.epochs() == first, "a new controller has adopted the workers")

    os.kill(up.worker_pid("decode-0"), signal.SIGKILL)
    wait_until(lambda: set(up.epochs()) == set(first) and up.epochs() != first, "a lost worker is replaced", START_S)

    second = up.epochs()
    os.kill(up.pid_of("pdserve.cluster.head"), signal.SIGKILL)
    wait_until(
        lambda: set(up.epochs()) == set(first) and not second.items() & up.epochs().items(),
        "a new Ray has new workers",
        START_S,
    )
    wait_until(
        lambda: pdserve("generate", "Hello", "--max-tokens", "5", "--url", up.url).returncode == 0,
        "requests work again",
    )

    family, run_dir = up.family(), up.run_dir
    up.popen.send_signal(signal.SIGINT)
    assert up.popen.wait(DEADLINE_S) == 0
    assert [p for p in family if is_alive(p.pid)] == []
    assert not run_dir.exists()


@pytest.mark.parametrize("up", [("--no-demo",)], indirect=True)
def test_processes_that_end_while_the_head_comes_back_come_back_too(up: Up) -> None:
    up.wait_ready()
    first = up.epochs()
    os.kill(up.pid_of("pdserve.cluster.head"), signal.SIGKILL)
    wait_until(lambda: "ray has ended and is started again" in up.output, "the head's end is told")
    os.kill(up.pid_of("services.frontend"), signal.SIGKILL)
    wait_until(lambda: "frontend has ended and is started again" in up.output, "the frontend's end is told")
    os.kill(up.pid_of("services.controller"), signal.SIGKILL)
    wait_until(lambda: f"{up.url} serves again" in up.output, "the cluster is back", START_S)
    assert pdserve("generate", "Hello", "--max-tokens", "5", "--url", up.url).returncode == 0
    wait_until(lambda: set(up.epochs()) == set(first), "every worker is back", START_S)
    assert not first.items() & up.epochs().items()
    assert up.popen.poll() is None


def test_it_shows_an_answer_before_it_says_ready(up: Up) -> None:
    up.wait_ready()
    question, answer = up.output.split("> What is the capital of France?\n")
    assert "prefill-0 is ready" in question
    assert answer.splitlines()[0]
    assert re.search(r"^first token after \d+ ms \(scripted: the words mean nothing\)$", answer, re.MULTILINE)
    assert f"curl -N {up.url}/v1/chat/completions" in answer
    assert f"pdserve status --controller {up.controller}\n" in answer
    assert answer.endswith(f"ready {up.url}\n")


def test_a_signal_while_it_starts_leaves_nothing(log_path: Path) -> None:
    up = Up(log_path)
    wait_until(lambda: "Ray runs at" in up.output, "Ray runs")
    family = up.family()
    up.popen.send_signal(signal.SIGTERM)
    assert up.popen.wait(DEADLINE_S) == 0
    assert [p for p in family if is_alive(p.pid)] == []


def test_if_it_is_killed_its_processes_end(up: Up) -> None:
    up.wait_ready()
    family = up.family()
    up.popen.kill()
    wait_until(lambda: not any(is_alive(p.pid) for p in family), "all of them have ended")


def test_a_worker_that_fails_at_the_start_ends_it_with_the_reason(log_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        up = Up(log_path, "--set", f"worker.session_port={port}")
        assert up.popen.wait(START_S) == 1
    assert up.output.splitlines()[-1].startswith("pdserve: ")
    assert f"port {port} on 127.0.0.1 is taken" in up.output.splitlines()[-1]
    assert "Traceback" not in up.output
    assert (up.run_dir / "controller.log").exists()
    shutil.rmtree(up.run_dir)


def test_a_busy_port_is_one_line_that_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = pdserve("up", "--engine", "scripted", "--port", str(port))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        f"pdserve: cannot listen on 127.0.0.1:{port} (Address already in use): "
        "stop what listens there, or choose another port with --port\n"
    )


def test_a_missing_model_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    ports = ("--port", str(find_free_port()), "--set", f"cluster.port={find_free_port()}")
    done = pdserve("up", *ports, "--model", str(tmp_path / "none"))
    assert done.returncode == 1
    assert done.stderr.startswith("pdserve: model folder ")
    assert len(done.stderr.splitlines()) == 1


def test_a_controller_that_is_not_there_is_one_line_that_says_what_to_do() -> None:
    done = pdserve("status", "--controller", f"127.0.0.1:{find_free_port()}")
    assert done.returncode == 1
    assert "is `pdserve up` running?" in done.stderr
    assert len(done.stderr.splitlines()) == 1
