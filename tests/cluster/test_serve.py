"""The whole product as a newcomer meets it: the real model in bfloat16, behind `pdserve up`, over HTTP."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.cluster.conftest import ROOT, wait_until
from tests.cluster.up import START_S, Up, pdserve, running_up

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    log_path = tmp_path_factory.mktemp("serve") / "up.log"
    with running_up(log_path, "--decode", "2", "--set", "engine.kv_memory_bytes=200000000", engine="torch") as started:
        wait_until(lambda: "ready http" in started.output or started.popen.poll() is not None, "ready", 3 * START_S)
        assert "ready http" in started.output, started.output
        yield started


def stream(up: Up, content: str, max_tokens: int) -> Iterator[dict[str, Any]]:
    """The events of a streamed chat answer, as they come; the last one is [DONE]'s, an empty dict."""
    body = {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{up.url}/v1/chat/completions", json=body, timeout=START_S) as response:
        for line in response.iter_lines():
            if line == "data: [DONE]":
                yield {}
            elif line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def text_of(events: list[dict[str, Any]]) -> str:
    deltas = [choice["delta"] for event in events for choice in event.get("choices", [])]
    return "".join(delta.get("content") or "" for delta in deltas)


def workers(up: Up) -> dict[str, dict[str, Any]]:
    done = pdserve("status", "--json", "--controller", up.controller)
    return {w["worker_id"]: w for w in json.loads(done.stdout)["workers"]} if done.returncode == 0 else {}


def test_the_capital_of_france_is_paris(up: Up) -> None:
    assert "The capital of France is Paris." in up.output
    assert "first token after" in up.output


def test_drain_of_one_of_two_decode_workers_under_load_fails_no_request(up: Up) -> None:
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(lambda i=i: list(stream(up, f"Count from {i}.", 24))) for i in range(12)]
        wait_until(lambda: any(future.done() for future in futures), "the first answer", START_S)
        drained = pdserve("drain", "decode-1", "--controller", up.controller)
        assert drained.returncode == 0, drained.stderr
        answers = [future.result() for future in futures]
    for events in answers:
        assert events[-1] == {}
        assert not any("error" in event for event in events)
        assert text_of(events)
    wait_until(lambda: workers(up)["decode-1"]["state"] == "draining", "the worker drains")
    assert pdserve("undrain", "decode-1", "--controller", up.controller).returncode == 0
    wait_until(lambda: workers(up)["decode-1"]["state"] == "ready", "the worker is back")


def test_a_decode_worker_killed_in_mid_stream_is_replaced_and_the_stream_goes_on(up: Up) -> None:
    undisturbed = text_of(list(stream(up, "Tell me about rivers.", 60)))
    before = workers(up)
    events: list[dict[str, Any]] = []
    killed = None
    for event in stream(up, "Tell me about rivers.", 60):
        events.append(event)
        if len(events) == 10:
            busy = max((w for w in before.values() if w["role"] == "decode"), key=_running)
            killed = busy["worker_id"]
            os.kill(busy["pid"], signal.SIGKILL)
    assert events[-1] == {}
    # A replay in bfloat16 keeps what was written; later logits may differ by rounding.
    assert text_of(events[:10]) == undisturbed[: len(text_of(events[:10]))]
    assert killed is not None
    wait_until(
        lambda: (
            workers(up).get(killed, {}).get("state") == "ready"
            and workers(up)[killed]["epoch"] != before[killed]["epoch"]
        ),
        "the worker has been replaced",
        START_S,
    )
    assert list(stream(up, "And lakes?", 8))[-1] == {}


def _running(worker: dict[str, Any]) -> float:
    """CPU seconds that a worker has used in a short while: the one that decodes uses more."""
    process = psutil.Process(worker["pid"])
    before_s = sum(process.cpu_times()[:2])
    time.sleep(0.15)
    return sum(process.cpu_times()[:2]) - before_s


def test_idle_the_whole_cluster_uses_next_to_no_cpu(up: Up) -> None:
    def cpu_share() -> float:
        family = [psutil.Process(up.popen.pid), *up.family()]
        before_s = {process.pid: sum(process.cpu_times()[:2]) for process in family}
        began_s = time.monotonic()
        time.sleep(3)
        used_s = sum(sum(process.cpu_times()[:2]) - before_s[process.pid] for process in family)
        return used_s / (time.monotonic() - began_s)

    # A worker that was just placed still finishes its start.
    wait_until(lambda: cpu_share() < 0.25, "an idle cluster uses less than a quarter of one core", START_S)


def test_the_command_line_says_what_runs(up: Up) -> None:
    table = subprocess.run(
        [sys.executable, "-m", "pdserve.cli.main", "status", "--controller", up.controller],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for worker_id in ("prefill-0", "decode-0", "decode-1"):
        assert worker_id in table
