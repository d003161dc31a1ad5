"""Workers that are killed, paused, replaced or drained under load, and a frontend that dies: what its clients see."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from pdserve.core.events import Role
from pdserve.core.sampling import SamplingParams
from pdserve.engine.scripted import scripted_answer
from tests.http_cluster import DEAD_AFTER_S, HttpCluster, Stream, http_cluster
from tests.scripted_words import right_answer, words
from tests.worker_pair import new_prompt
from tests.worker_processes import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAIT_S = 8.0
STORM = 50
# Two seconds for a long prompt.
PREFILL = {"engine": {"num_blocks": 1024, "scripted": {"prefill_token_s": 0.001}}}
DECODE = {"engine": {"num_blocks": 1024}}
LONG_PROMPT_TOKENS = 1600


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpCluster]:
    folder = tmp_path_factory.mktemp("loss")
    frontend = {"wait_s": WAIT_S, "retry_backoff_s": 0.01}
    async with http_cluster(folder, [PREFILL, PREFILL], [DECODE, DECODE], frontend) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(running: HttpCluster) -> AsyncIterator[HttpCluster]:
    """Two workers of each role; what a test has killed is replaced after it, at the same ports."""
    yield running
    for worker in list(running.workers):
        if not worker.is_alive:
            running.replace(worker)
    await running.wait_ready()
    await running.settled()
    prompts = [new_prompt() for _ in range(8)]
    answers = await asyncio.gather(*(running.complete(prompt, 4) for prompt in prompts))
    assert answers == [right_answer(prompt, 4) for prompt in prompts]
    await running.settled()


async def holder(cluster: HttpCluster, role: Role, state: str = "Running") -> WorkerProcess:
    """The one worker of a role with an attempt in this state, once there is one."""
    found: list[WorkerProcess] = []

    async def held() -> bool:
        workers = cluster.prefills if role is Role.PREFILL else cluster.decodes
        found[:] = [worker for worker in workers if state in await worker.states()]
        return len(found) == 1

    await cluster.until(held, f"an attempt that is {state} at {role}")
    return found[0]


async def end_by(worker: WorkerProcess, number: signal.Signals) -> None:
    worker.kill(number)
    if number is signal.SIGKILL:
        await worker.wait_exit()


async def wake(worker: WorkerProcess) -> None:
    if worker.is_alive:
        worker.kill(signal.SIGCONT)


def assert_undisturbed(stream: Stream, prompt: list[int], max_tokens: int) -> None:
    """No text is missing, repeated or different, and the stream ended in order."""
    assert (stream.error, stream.is_done) == (None, True)
    assert stream.text == right_answer(prompt, max_tokens)


LOSSES = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "paused"])


@LOSSES
async def test_prefill_lost_before_the_first_token_is_only_a_later_first_token(
    cluster: HttpCluster, number: signal.Signals
) -> None:
    prompt = new_prompt(LONG_PROMPT_TOKENS)
    before = await cluster.outcomes()
    request = asyncio.create_task(cluster.streamed(prompt, 8))
    lost = await holder(cluster, Role.PREFILL)
    await end_by(lost, number)
    try:
        assert_undisturbed(await request, prompt, 8)
        assert await ended_since(cluster, before) == {"completed": 1}
    finally:
        await wake(lost)


@LOSSES
async def test_decode_lost_in_mid_stream_the_same_stream_goes_on(cluster: HttpCluster, number: signal.Signals) -> None:
    prompt = new_prompt()
    async with cluster.stream(prompt, 150) as stream:
        await stream.read(5)
        lost = await holder(cluster, Role.DECODE)
        await end_by(lost, number)
        try:
            assert_undisturbed(await stream.finish(), prompt, 150)
        finally:
            await wake(lost)
    assert stream.response.status == 200


async def test_decode_killed_in_the_handoff_is_invisible(cluster: HttpCluster) -> None:
    prompt = new_prompt(LONG_PROMPT_TOKENS)
    request = asyncio.create_task(cluster.streamed(prompt, 8))
    await end_by(await holder(cluster, Role.DECODE, "Receiving"), signal.SIGKILL)
    assert_undisturbed(await request, prompt, 8)


async def test_siblings_of_a_killed_decode_worker_go_on_each_where_it_was(cluster: HttpCluster) -> None:
    prompt, params = new_prompt(), SamplingParams(max_tokens=100, temperature=1.0)
    body = {"prompt": prompt, "max_tokens": params.max_tokens, "temperature": 1.0, "seed": 7, "n": 3}
    request = asyncio.create_task(cluster.post(body))
    lost = await holder(cluster, Role.DECODE)
    accepted = await cluster.metric("pdserve_tokens_out_total")
    await cluster.until(lambda: _has_accepted(cluster, accepted + 9), "some tokens of each")
    await end_by(lost, signal.SIGKILL)
    status, answer, _ = await request
    assert status == 200, answer
    ids = [scripted_answer(np.asarray(prompt, np.int32), params, seed=7, sibling=sibling) for sibling in range(3)]
    assert [choice["text"] for choice in answer["choices"]] == [words(each) for each in ids]
    assert answer["usage"]["completion_tokens"] == 3 * params.max_tokens
    assert await cluster.metric("pdserve_attempts_total", reason="worker_lost") >= 3


async def _has_accepted(cluster: HttpCluster, tokens: float) -> bool:
    return await cluster.metric("pdserve_tokens_out_total") >= tokens


async def test_prefill_lost_while_decode_runs_changes_nothing(cluster: HttpCluster) -> None:
    prompt = new_prompt()
    attempts = await cluster.metric("pdserve_attempts_total")
    async with cluster.stream(prompt, 60) as stream:
        await stream.read(5)
        for worker in cluster.prefills:
            await end_by(worker, signal.SIGKILL)
        assert_undisturbed(await stream.finish(), prompt, 60)
    assert await cluster.metric("pdserve_attempts_total") == attempts + 1


async def test_without_another_decode_worker_the_stream_ends_with_a_clear_error_and_no_done(
    cluster: HttpCluster,
) -> None:
    prompt = new_prompt()
    before = await cluster.outcomes()
    async with cluster.stream(prompt, 150) as stream:
        await stream.read(5)
        lost = await holder(cluster, Role.DECODE)
        (other,) = [worker for worker in cluster.decodes if worker is not lost]
        await end_by(other, signal.SIGKILL)
        await end_by(lost, signal.SIGKILL)
        await stream.finish()
    assert stream.error is not None
    assert (stream.error["code"], stream.is_done) == ("no_capacity", False)
    assert "the session with the worker at" in stream.error["message"]
    assert right_answer(prompt, 150).startswith(stream.text)
    assert await ended_since(cluster, before) == {"no_capacity": 1}


async def test_a_worker_replaced_in_time_takes_the_stream_over(cluster: HttpCluster) -> None:
    prompt = new_prompt()
    async with cluster.stream(prompt, 150) as stream:
        await stream.read(5)
        for worker in cluster.decodes:
            await end_by(worker, signal.SIGKILL)
        for worker in cluster.decodes:
            cluster.replace(worker)
        assert_undisturbed(await stream.finish(), prompt, 150)


async def test_a_worker_that_wakes_says_nothing_of_what_was_taken_from_it(cluster: HttpCluster) -> None:
    prompts = [new_prompt() for _ in range(6)]
    requests = [asyncio.create_task(cluster.streamed(prompt, 150)) for prompt in prompts]
    paused = cluster.decodes[0]
    await cluster.until(lambda: _has_states(paused, {"Running"}), "answers being written")
    paused.kill(signal.SIGSTOP)
    await cluster.until(lambda: _given_up(cluster), "the silence to count", 4 * DEAD_AFTER_S)
    # It wakes while what it had is being written by the other one.
    paused.kill(signal.SIGCONT)
    for prompt, request in zip(prompts, requests, strict=True):
        assert_undisturbed(await request, prompt, 150)


async def _has_states(worker: WorkerProcess, states: set[str]) -> bool:
    return await worker.states() == states


async def _given_up(cluster: HttpCluster) -> bool:
    return (
        await cluster.metric("pdserve_attempts_total", reason="worker_lost") > 0
        and (await cluster.ready())["decode"] == 1
    )


async def test_a_drain_under_load_fails_no_request_and_leaves_the_worker_empty(cluster: HttpCluster) -> None:
    drained = cluster.decodes[0]
    before = await cluster.outcomes()
    prompts = [new_prompt() for _ in range(24)]
    requests = [asyncio.create_task(cluster.streamed(prompt, 40)) for prompt in prompts[:12]]
    await cluster.until(lambda: _has_states(drained, {"Running"}), "load")
    await cluster.drain(drained, 60.0)
    requests += [asyncio.create_task(cluster.streamed(prompt, 40)) for prompt in prompts[12:]]
    for prompt, request in zip(prompts, requests, strict=True):
        assert_undisturbed(await request, prompt, 40)
    assert await ended_since(cluster, before) == {"completed": 24}
    await drained.settle()
    assert (await cluster.ready())["decode"] == 1
    await cluster.undrain(drained)


@pytest.mark.parametrize("role", Role)
async def test_a_drain_whose_deadline_passes_moves_what_is_held_and_no_client_sees_it(
    cluster: HttpCluster, role: Role
) -> None:
    prompts = [new_prompt(400) for _ in range(6)]
    requests = [asyncio.create_task(cluster.streamed(prompt, 100)) for prompt in prompts]
    drained = (cluster.prefills if role is Role.PREFILL else cluster.decodes)[0]
    await cluster.until(lambda: _holds(drained, "Running"), "load")
    await cluster.drain(drained, 0.05)
    await drained.settle()
    assert not all(request.done() for request in requests)
    for prompt, request in zip(prompts, requests, strict=True):
        assert_undisturbed(await request, prompt, 100)
    assert await cluster.metric("pdserve_attempts_total", reason="draining") > 0
    await cluster.undrain(drained)


async def _holds(worker: WorkerProcess, state: str) -> bool:
    return state in await worker.states()


async def test_a_drain_with_nowhere_to_go_is_told_in_band(cluster: HttpCluster) -> None:
    prompt = new_prompt()
    async with cluster.stream(prompt, 150) as stream:
        await stream.read(5)
        for worker in cluster.decodes:
            await cluster.drain(worker, 0.05)
        await stream.finish()
    for worker in cluster.decodes:
        await worker.settle()
        await cluster.undrain(worker)
    assert stream.error is not None
    assert (stream.error["code"], stream.is_done) == ("no_capacity", False)
    assert "this worker drains" in stream.error["message"]
    assert right_answer(prompt, 150).startswith(stream.text)


async def test_after_a_storm_of_cancellations_requests_work_at_once(cluster: HttpCluster) -> None:
    before = await cluster.outcomes()
    async with AsyncExitStack() as storm:
        streams = [await storm.enter_async_context(cluster.stream(new_prompt(4), 400)) for _ in range(STORM)]
        await asyncio.gather(*(stream.read(2) for stream in streams))
    # All have left; nothing waits for the frontend or a worker to have noticed.
    prompts = [new_prompt() for _ in range(4)]
    answers = await asyncio.gather(*(cluster.complete(prompt, 8) for prompt in prompts))
    assert answers == [right_answer(prompt, 8) for prompt in prompts]
    await cluster.settled()
    assert await ended_since(cluster, before) == {"client_gone": STORM, "completed": 4}


async def ended_since(cluster: HttpCluster, before: dict[str, int]) -> dict[str, int]:
    """Outcomes counted since then, once nothing is open."""
    await cluster.until(lambda: _nothing_open(cluster), "an outcome for every request")
    after = await cluster.outcomes()
    return {outcome: n for outcome, number in after.items() if (n := number - before.get(outcome, 0))}


async def _nothing_open(cluster: HttpCluster) -> bool:
    started = await cluster.metric("pdserve_requests_started_total")
    return started == await cluster.metric("pdserve_requests_total")


async def test_a_frontend_that_was_paused_goes_on_with_its_streams(cluster: HttpCluster) -> None:
    prompt = new_prompt()
    async with cluster.stream(prompt, 150) as stream:
        await stream.read(5)
        cluster.frontend.kill(signal.SIGSTOP)
        try:
            for worker in cluster.workers:
                await cluster.until(lambda worker=worker: _is_forgotten(worker), "the lease to end")  # type: ignore[misc]
                await worker.settle()
        finally:
            cluster.frontend.kill(signal.SIGCONT)
        assert_undisturbed(await stream.finish(), prompt, 150)


async def _is_forgotten(worker: WorkerProcess) -> bool:
    return (await worker.status()).sessions == 0


async def test_a_killed_frontend_frees_everything_within_the_lease(tmp_path: Path) -> None:
    async with http_cluster(tmp_path, [PREFILL], [DECODE]) as cluster, AsyncExitStack() as clients:
        streams = [await clients.enter_async_context(cluster.stream(new_prompt(), 400)) for _ in range(8)]
        await asyncio.gather(*(stream.read(2) for stream in streams))
        in_prefill = asyncio.create_task(cluster.streamed(new_prompt(LONG_PROMPT_TOKENS), 8))
        await holder(cluster, Role.PREFILL)
        cluster.frontend.kill(signal.SIGKILL)
        await cluster.frontend.wait_exit()
        for worker in cluster.workers:
            await worker.settle(2 * DEAD_AFTER_S)
            assert (await worker.status()).sessions == 0
        await asyncio.gather(in_prefill, return_exceptions=True)
