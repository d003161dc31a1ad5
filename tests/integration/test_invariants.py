"""What must always hold, one test for each line, on a whole cluster of processes over real HTTP."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from pdserve.engine.scripted import scripted_kv
from tests.bad_requests import BAD_REQUESTS, BadRequest
from tests.bare_client import Leaving, bare_client
from tests.http_cluster import HttpCluster, http_cluster
from tests.scripted_words import right_answer
from tests.worker_pair import new_prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK_TOKENS = 16
CHUNK_TOKENS = 64
WORKER = {"engine": {"num_blocks": 1024, "step_tokens": CHUNK_TOKENS, "scripted": {"step_s": 0.005}}}
# For the one reader that never reads: far more than all socket buffers hold.
SILENT_TOKENS = 1500
FRONTEND_GROWTH_BYTES = 64 << 20
# So slow that steps can be counted, and prompts outlast every wait.
SLOW_PREFILL = {"engine": {"num_blocks": 1024, "scripted": {"prefill_token_s": 0.01}}}
SLOW_DECODE = {"engine": {"num_blocks": 1024, "scripted": {"step_s": 0.1}}}
SHORT_WAITS = {"max_waiting": 2, "wait_s": 1.0, "ttft_timeout_s": 2.0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpCluster]:
    folder = tmp_path_factory.mktemp("invariants")
    frontend = {"max_body_bytes": 1 << 20, "retry_backoff_s": 0.01}
    async with http_cluster(folder, [WORKER], [WORKER, WORKER], frontend, relayed=True) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_slowly(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpCluster]:
    folder = tmp_path_factory.mktemp("slow")
    async with http_cluster(folder, [SLOW_PREFILL], [SLOW_DECODE], SHORT_WAITS) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(running: HttpCluster) -> AsyncIterator[HttpCluster]:
    yield running
    await assert_unharmed(running)


@pytest_asyncio.fixture(loop_scope="module")
async def slow_cluster(running_slowly: HttpCluster) -> AsyncIterator[HttpCluster]:
    yield running_slowly
    await assert_unharmed(running_slowly)


async def assert_unharmed(cluster: HttpCluster) -> None:
    """Nothing is held, no process has ended, and the next answer is right."""
    await cluster.settled()
    for process in (cluster.frontend, *cluster.workers):
        process.assert_alive()
    prompt = new_prompt(8)
    assert await cluster.complete(prompt, 3) == right_answer(prompt, 3)
    await cluster.settled()


async def ended_since(cluster: HttpCluster, before: Mapping[str, int]) -> dict[str, int]:
    """Outcomes counted since then, once nothing is held anywhere."""
    await cluster.settled()
    after = await cluster.outcomes()
    return {outcome: n for outcome, number in after.items() if (n := number - before.get(outcome, 0))}


@pytest.mark.parametrize("streamed", [False, True], ids=["buffered", "streamed"])
async def test_invariant_1_greedy_answers_equal_the_reference_alone_and_in_any_batch(
    cluster: HttpCluster, streamed: bool
) -> None:
    """Here the reference is the scripted engine's own; test_exactness compares float32 with transformers' `generate`."""
    edges = [BLOCK_TOKENS, CHUNK_TOKENS, 2 * CHUNK_TOKENS]
    prompts = [new_prompt(tokens) for tokens in (1, *(edge + i for edge in edges for i in (-1, 0, 1)), 1000)]
    wanted = [right_answer(prompt, 20) for prompt in prompts]

    async def answer(prompt: list[int]) -> str:
        return (await cluster.streamed(prompt, 20)).text if streamed else await cluster.complete(prompt, 20)

    assert [await answer(prompt) for prompt in prompts] == wanted
    assert await asyncio.gather(*map(answer, prompts * 2)) == wanted * 2


@pytest.mark.parametrize("stop", [None, " w2", "99", ["w19", "1 w", "zzz"], " "], ids=str)
async def test_invariant_2_streamed_text_equals_buffered_text(cluster: HttpCluster, stop: object) -> None:
    """With one tokenizer; tests/unit/services/frontend/test_text.py has all kinds of them, and any stop string."""
    prompt = new_prompt()
    fields = {"stop": stop} if stop else {}
    buffered = await cluster.complete(prompt, 60, **fields)
    assert (await cluster.streamed(prompt, 60, **fields)).text == buffered
    assert right_answer(prompt, 60).startswith(buffered)


async def test_invariant_3_every_request_ends_in_exactly_one_outcome(cluster: HttpCluster) -> None:
    before = await cluster.outcomes()
    async with AsyncExitStack() as clients:
        leaving = [
            await clients.enter_async_context(
                bare_client(cluster.port, {"prompt": new_prompt(), "max_tokens": 500, "stream": True})
            )
            for _ in range(5)
        ]
        good = [cluster.complete(new_prompt(), 10) for _ in range(4)]
        stopped = [cluster.streamed(new_prompt(), 10, stop=" w") for _ in range(3)]
        bad = [cluster.post({"prompt": "x", "n": 0}), cluster.post(b"{"), cluster.post({"model": "no", "prompt": "x"})]
        for client in leaving:
            await client.read_tokens(1)
            client.leave(Leaving.RESET)
        await asyncio.gather(*good, *stopped, *bad)
    assert await ended_since(cluster, before) == {
        "completed": 7,
        "client_gone": 5,
        "invalid_request": 2,
        "model_not_found": 1,
    }
    assert await cluster.metric("pdserve_requests_started_total") == sum((await cluster.outcomes()).values())
    assert await cluster.metric("pdserve_queue_depth") == 0


async def test_invariant_4_at_idle_every_block_is_free_or_cached_and_every_table_empty(cluster: HttpCluster) -> None:
    """After answers, stop strings, siblings and clients that left; test_leaving and test_worker_loss do faults."""
    async with AsyncExitStack() as clients:
        for _ in range(4):
            body = {"prompt": new_prompt(200), "max_tokens": 300, "n": 3, "stream": True}
            client = await clients.enter_async_context(bare_client(cluster.port, body))
            await client.read_tokens(2)
        await asyncio.gather(*(cluster.complete(new_prompt(100), 30, n=4, stop=" w21") for _ in range(4)))
    await cluster.settled()
    for worker in cluster.workers:
        pulse = (await worker.status()).pulse
        assert pulse.free_blocks + pulse.cached_blocks == pulse.total_blocks
        assert (pulse.queued_tokens, pulse.queued_sequences, pulse.running_sequences) == (0, 0, 0)
        assert await worker.states() == set()


async def test_invariant_5_cancelled_sequences_are_out_of_the_batch_by_the_next_step(slow_cluster: HttpCluster) -> None:
    """In a batch with one that stays; test_leaving does every phase."""
    cluster, staying, leaving = slow_cluster, new_prompt(4), 10
    overshot = await cluster.metric("pdserve_tokens_overshoot_total")
    async with cluster.stream(staying, 60) as stays, AsyncExitStack() as clients:
        for _ in range(leaving):
            client = await clients.enter_async_context(
                bare_client(cluster.port, {"prompt": new_prompt(4), "max_tokens": 1000, "stream": True})
            )
            await client.read_tokens(2)
        await clients.aclose()
        await cluster.until(lambda: _is_running(cluster, 1), "a batch of one")
        await stays.finish()
    assert stays.text == right_answer(staying, 60)
    # One step may have been under way.
    assert await cluster.metric("pdserve_tokens_overshoot_total") - overshot <= leaving


async def _is_running(cluster: HttpCluster, sequences: int) -> bool:
    return sum([(await worker.status()).pulse.running_sequences for worker in cluster.decodes]) == sequences


async def test_invariant_6_a_client_that_never_reads_changes_nothing_for_the_others(cluster: HttpCluster) -> None:
    before = await cluster.outcomes()
    frontend = psutil.Process(cluster.frontend.pid)
    memory_bytes = frontend.memory_info().rss
    accepted = await cluster.metric("pdserve_tokens_out_total")
    silent = {"prompt": new_prompt(), "max_tokens": SILENT_TOKENS, "stream": True, "logprobs": 5, "n": 4}
    async with bare_client(cluster.port, silent, receive_buffer_bytes=4096) as client:

        async def written() -> bool:
            # Decode never waits for a reader: the whole answer is there, whoever reads it.
            return await cluster.metric("pdserve_tokens_out_total") >= accepted + 4 * SILENT_TOKENS

        others = 0
        while not await written():
            prompt = new_prompt()
            async with cluster.stream(prompt, 30) as stream:
                assert (await stream.finish()).text == right_answer(prompt, 30)
            others += 1
        assert others > 0
        assert frontend.memory_info().rss - memory_bytes < FRONTEND_GROWTH_BYTES
        assert client.received == b""
        client.leave(Leaving.CLOSE)
    assert await ended_since(cluster, before) == {"completed": others, "client_gone": 1}


async def test_invariant_7_no_request_waits_without_bound(slow_cluster: HttpCluster) -> None:
    cluster = slow_cluster
    before = await cluster.outcomes()
    # Longer in prefill than anybody waits for a first token.
    status, body, _ = await cluster.post({"prompt": new_prompt(2000), "max_tokens": 4})
    assert (status, body["error"]["code"]) == (504, "ttft_timeout")
    await cluster.settled()
    # Nobody takes it: two wait, and the third is refused at once.
    await cluster.drain(cluster.decodes[0], 60.0)
    await cluster.until(lambda: _decodes_ready(cluster, 0), "no decode worker for new requests")
    replies = await asyncio.gather(*(cluster.post({"prompt": new_prompt(), "max_tokens": 4}) for _ in range(3)))
    assert sorted(body["error"]["code"] for _, body, _ in replies) == ["no_capacity", "no_capacity", "queue_full"]
    for status, _, headers in replies:
        assert status == 503
        assert int(headers["Retry-After"]) >= 1
    assert await ended_since(cluster, before) == {"ttft_timeout": 1, "no_capacity": 2, "queue_full": 1}
    await cluster.undrain(cluster.decodes[0])
    await cluster.wait_ready()


async def _decodes_ready(cluster: HttpCluster, number: int) -> bool:
    return (await cluster.ready())["decode"] == number


async def test_invariant_8_bad_input_is_a_4xx_that_names_the_field_and_stops_no_worker(cluster: HttpCluster) -> None:
    assert len(BAD_REQUESTS) >= 40
    for name, request in BAD_REQUESTS.items():
        assert_refused(name, request, *await ask(cluster, request))
    # All of them at once change as little.
    await asyncio.gather(*(ask(cluster, request) for request in BAD_REQUESTS.values()))
    prompt = new_prompt()
    assert await cluster.complete(prompt, 10) == right_answer(prompt, 10)


async def ask(cluster: HttpCluster, request: BadRequest) -> tuple[int, Any]:
    headers = {"Content-Type": request.content_type}
    url, body = cluster.url + request.path, io.BytesIO(request.body)
    async with cluster.http.request(request.method, url, data=body, headers=headers) as response:
        return response.status, json.loads(await response.text())


def assert_refused(name: str, request: BadRequest, status: int, body: Any) -> None:
    assert status == request.status, f"{name}: {status} {body}"
    assert set(body) == {"error"}, name
    assert set(body["error"]) == {"message", "type", "param", "code"}, name
    assert body["error"]["param"] == request.param, f"{name}: {body}"
    if request.param is not None:
        assert request.param in body["error"]["message"], f"{name}: {body}"
    assert len(body["error"]["message"]) < 500, name


async def test_invariant_9_a_worker_that_drains_finishes_or_moves_what_it_holds(cluster: HttpCluster) -> None:
    """With time to finish, and without; test_worker_loss drains under load, and prefill workers too."""
    before = await cluster.outcomes()
    for deadline_s in (60.0, 0.05):
        prompts = [new_prompt() for _ in range(8)]
        requests = [asyncio.create_task(cluster.streamed(prompt, 200)) for prompt in prompts]
        drained = cluster.decodes[0]
        await cluster.until(lambda drained=drained: _is_held(drained), "load")  # type: ignore[misc]
        await cluster.drain(drained, deadline_s)
        for prompt, request in zip(prompts, requests, strict=True):
            stream = await request
            assert (stream.error, stream.is_done, stream.text) == (None, True, right_answer(prompt, 200))
        await drained.settle()
        await cluster.undrain(drained)
        await cluster.wait_ready()
    assert await ended_since(cluster, before) == {"completed": 16}


async def _is_held(worker: Any) -> bool:
    return "Running" in await worker.states()


async def test_invariant_10_text_is_never_produced_from_a_cache_that_was_not_verified(cluster: HttpCluster) -> None:
    """A bit of a key is flipped on its way; test_push_faults does everything else that can be wrong with a push."""
    prompt = new_prompt(200)
    kv = scripted_kv(np.asarray(prompt, np.int32)).tobytes()
    flipped: list[int] = []

    def flip_once(data: bytes) -> bytes:
        for start in range(0, len(kv), BLOCK_TOKENS):
            at = data.find(kv[start : start + BLOCK_TOKENS])
            if at >= 0 and not flipped:
                flipped.append(start)
                return data[: at + 3] + bytes([data[at + 3] ^ 1]) + data[at + 4 :]
        return data

    before = await cluster.metric("pdserve_attempts_total", reason="bad_frame")
    for relay in cluster.relays:
        relay.change = flip_once
    try:
        assert await cluster.complete(prompt, 30) == right_answer(prompt, 30)
    finally:
        for relay in cluster.relays:
            relay.change = bytes
    assert len(flipped) == 1
    assert await cluster.metric("pdserve_attempts_total", reason="bad_frame") == before + 1
