"""The frontend as a process: how it starts, refuses to start, and ends."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tiny_tokenizers import byte_level_bpe, save_model_folder

START_S = 60.0
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model_folder(byte_level_bpe(), tmp_path_factory.mktemp("tiny"))
    (folder / "config.json").write_text('{"vocab_size": 420, "max_position_embeddings": 512, "eos_token_id": 2}')
    (folder / "model.safetensors").touch()
    return folder


@contextmanager
def frontend(*settings: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "services.frontend"]
    for setting in settings:
        command += ["--set", setting]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


def test_it_answers_before_there_are_workers_and_ends_on_sigterm(model_folder: Path) -> None:
    port = free_port()
    with frontend(
        f"model.path={model_folder}", f"frontend.port={port}", "frontend.workers=127.0.0.1:9,127.0.0.1:10"
    ) as process:
        deadline_s = time.monotonic() + START_S
        while status(f"http://127.0.0.1:{port}/health") != 200 and process.poll() is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert status(f"http://127.0.0.1:{port}/ready") == 503
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=20)
        assert process.returncode == 0
        assert out == ""


@pytest.mark.parametrize("problem", ["busy port", "no model", "no workers"])
def test_what_a_person_can_mend_is_one_line_and_status_1(problem: str, model_folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = {
            "model.path": tmp_path / "nowhere" if problem == "no model" else model_folder,
            "frontend.port": taken.getsockname()[1] if problem == "busy port" else 0,
            "frontend.workers": "" if problem == "no workers" else "127.0.0.1:9",
        }
        arguments = [f"{name}={value}" for name, value in settings.items() if value != ""]
        with frontend(*arguments) as process:
            out, err = process.communicate(timeout=START_S)
            assert process.returncode == 1
            assert out == ""
            assert err.startswith("frontend: ")
            assert err.count("\n") == 1


def test_importing_it_reaches_neither_torch_nor_ray() -> None:
    code = (
        "import sys, services.frontend.frontend\n"
        "assert not {'torch', 'ray'} & set(sys.modules), sorted({'torch', 'ray'} & set(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=START_S)
