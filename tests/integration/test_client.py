"""The client library and the probe against a real frontend with scripted workers, each a process of its own."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pdserve.client.answers import Answer
from pdserve.client.async_client import AsyncClient
from pdserve.client.errors import NoConnection, RequestRefused, TruncatedStream
from pdserve.client.policy import Retries
from pdserve.client.sync_client import Client
from tests.http_cluster import HttpCluster, http_cluster
from tests.scripted_words import MODEL, right_answer
from tests.worker_processes import ROOT

pytestmark = pytest.mark.asyncio

PROMPT = list(range(300, 340))
GREEDY = {"temperature": 0, "max_tokens": 24, "return_token_ids": True}


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[HttpCluster]:
    # Heartbeats between any two tokens, so that each stream has some.
    async with http_cluster(tmp_path, frontend={"heartbeat_s": 0.01}) as running:
        yield running


async def pdserve(*words: str) -> tuple[int, str]:
    """A command's exit status and what it printed."""
    command = [sys.executable, "-m", "pdserve.cli.main", *words]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


def ask_sync(url: str, prompts: list[list[int]], **fields: Any) -> tuple[Answer, Answer]:
    """The same streamed and whole."""
    with Client(url) as client, client.stream_completion(prompts, **fields) as stream:
        streamed = stream.read_all()
        return streamed, client.complete(prompts, **fields)


def assert_same(streamed: Answer, whole: Answer) -> None:
    assert streamed.choices == whole.choices
    assert streamed.usage is not None
    assert whole.usage is not None
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    assert streamed.model == whole.model == MODEL
    assert streamed.request_id != whole.request_id


async def test_answers_are_whole_and_right(cluster: HttpCluster) -> None:
    streamed, whole = await asyncio.to_thread(ask_sync, cluster.url, [PROMPT, PROMPT[:20]], **GREEDY)
    assert_same(streamed, whole)
    assert [choice.text for choice in whole.choices] == [right_answer(PROMPT, 24), right_answer(PROMPT[:20], 24)]
    async with AsyncClient(cluster.url) as client:
        assert await client.models() == [MODEL]
        asked: list[dict[str, Any]] = [
            {"n": 3, "seed": 7, "temperature": 1.0},
            {"n": 2, "stop": [right_answer(PROMPT, 5)[-6:]]},
            {"logprobs": 2, "max_tokens": 1},
        ]
        for fields in asked:
            async with client.stream_completion(PROMPT, **GREEDY | fields) as stream:
                streamed = await stream.read_all()
            assert_same(streamed, await client.complete(PROMPT, **GREEDY | fields))
        async with client.stream_chat("Hello", n=2, logprobs=True, **GREEDY) as chat:
            streamed = await chat.read_all()
        assert_same(streamed, await client.chat("Hello", n=2, logprobs=True, **GREEDY))
        with pytest.raises(RequestRefused) as raised:
            await client.chat("Hello", temperature=9)
        assert (raised.value.param, raised.value.status) == ("temperature", 400)
        assert raised.value.request_id
    await cluster.settled()


async def test_a_client_that_leaves_is_noticed(cluster: HttpCluster) -> None:
    async with AsyncClient(cluster.url) as client:
        async with client.stream_completion(PROMPT, **GREEDY | {"max_tokens": 2000}) as stream:
            async for delta in stream:
                if delta.text:
                    break
        await cluster.settled()
    assert await cluster.outcomes() == {"client_gone": 1}


async def test_a_server_that_is_killed_leaves_a_truncated_stream(cluster: HttpCluster) -> None:
    async with AsyncClient(cluster.url, retries=Retries(count=1, base_s=0.01)) as client:
        stream = client.stream_completion(PROMPT, **GREEDY | {"max_tokens": 2000})
        with pytest.raises(TruncatedStream) as raised:
            await read_killing(stream, cluster)
        came = raised.value.answer
        assert came is not None
        assert len(came.choices[0].token_ids) >= 3
        assert right_answer(PROMPT, 200).startswith(came.text[: len(right_answer(PROMPT, 3))])
        with pytest.raises(NoConnection):
            await client.complete(PROMPT, **GREEDY)


async def read_killing(stream: Any, cluster: HttpCluster) -> None:
    """Read to the end; the frontend is killed at the third token."""
    async with stream:
        async for _ in stream:
            if len(stream.answer.choices[0].token_ids) == 3:
                cluster.frontend.kill(signal.SIGKILL)


async def test_a_probe_of_eight_streams(cluster: HttpCluster) -> None:
    load = ("--streams", "8", "--tokens", "12", "--prompt-tokens", "100")
    status, said = await pdserve("probe", "--url", cluster.url, "--via", cluster.url, "--json", *load)
    assert status == 0, said
    for run in json.loads(said)["runs"]:
        seen = run["seen"]
        assert (seen["whole"], seen["failures"], seen["tokens"]) == (8, {}, 96)
        assert (seen["ttft"]["count"], seen["itl"]["count"]) == (8, 88)
        # The server has counted the same tokens; only where the clock stands differs.
        assert (run["server_ttft"]["count"], run["server_itl"]["count"]) == (8, 88)
        assert run["server_ttft"]["mean_s"] < seen["ttft"]["mean_s"] < seen["total"]["mean_s"]
    cluster.frontend.kill(signal.SIGKILL)
    status, said = await pdserve("probe", "--url", cluster.url, *load)
    assert status == 1
    assert said.startswith(f"pdserve: no connection to {cluster.url}")
