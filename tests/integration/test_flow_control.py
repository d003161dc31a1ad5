"""One slow client among many costs no memory and no time of others, is given up by a deadline, and is counted once."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import psutil
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from tests.bare_client import Leaving, bare_client
from tests.http_cluster import HttpCluster, http_cluster
from tests.scripted_words import right_answer
from tests.worker_pair import new_prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKER = {
    "engine": {"num_blocks": 16384, "step_tokens": 256, "max_running": 256, "scripted": {"step_s": 0.005}},
}
STALL_TIMEOUT_S = 5.0
# Prompts for which the first token comes too late, and steps of which there are too many in the time for an answer.
SLOW_PREFILL = {"engine": {"scripted": {"prefill_token_s": 0.01}}}
SLOW_DECODE = {"engine": {"num_blocks": 1024, "scripted": {"step_s": 0.05}}}
LIMITS = {"heartbeat_s": 0.2, "ttft_timeout_s": 1.5, "idle_timeout_s": 0.8, "total_timeout_s": 4.0, "max_attempts": 1}
LONG_PROMPT_TOKENS = 600
LONG_ANSWER_TOKENS = 400
STREAMS = 64
TOKENS = 100
# Of the one that never reads: many short answers, for the scripted engine reads a sequence's whole cache for a token.
STALLED_CHOICES = 128
STALLED_TOKENS = 2000
# Of the one that reads late.
LATE_CHOICES = 16
LATE_TOKENS = 300
# The least that one token's event takes, with usage in it.
EVENT_BYTES = 300


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpCluster]:
    folder = tmp_path_factory.mktemp("flow")
    frontend = {"stall_timeout_s": STALL_TIMEOUT_S}
    async with http_cluster(folder, [WORKER], [WORKER], frontend) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(running: HttpCluster) -> AsyncIterator[HttpCluster]:
    yield running
    await running.settled()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_to_limits(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpCluster]:
    folder = tmp_path_factory.mktemp("limits")
    async with http_cluster(folder, [SLOW_PREFILL], [SLOW_DECODE], LIMITS) as cluster:
        yield cluster


async def interruptions(cluster: HttpCluster) -> dict[tuple[str, str], int]:
    """Streams that were interrupted so far, by cause and reason."""
    async with cluster.http.get(cluster.url + "/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    samples = [sample for family in families for sample in family.samples]
    return {
        (sample.labels["cause"], sample.labels["reason"]): int(sample.value)
        for sample in samples
        if sample.name == "pdserve_stream_interrupted_total"
    }


def since(before: Mapping[tuple[str, str], int], after: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    return {label: more for label, number in after.items() if (more := number - before.get(label, 0))}


async def answer_others(cluster: HttpCluster, number: int) -> None:
    """So many streams at once, all of which read; each answer must be right."""
    prompts = [new_prompt(8) for _ in range(number)]
    streams = await asyncio.gather(*(cluster.streamed(prompt, TOKENS) for prompt in prompts))
    for prompt, stream in zip(prompts, streams, strict=True):
        assert (stream.error, stream.is_done, stream.text) == (None, True, right_answer(prompt, TOKENS))


async def interrupted_stream(cluster: HttpCluster, prompt_tokens: int, code: str) -> None:
    """A stream of a long answer, which ends with this error in band."""
    stream = await cluster.streamed(new_prompt(prompt_tokens), LONG_ANSWER_TOKENS)
    assert stream.error is not None
    assert (stream.error["code"], stream.is_done) == (code, False)


async def wait_written(cluster: HttpCluster, tokens: float) -> None:
    """Until so many tokens are there, whoever reads them."""

    async def written() -> bool:
        return await cluster.metric("pdserve_tokens_out_total") >= tokens

    await cluster.until(written, f"{tokens} tokens", 60.0)


async def test_one_of_64_that_never_reads_costs_no_memory_and_ends_by_its_deadline(cluster: HttpCluster) -> None:
    await answer_others(cluster, STREAMS)
    outcomes, interrupted = await cluster.outcomes(), await interruptions(cluster)
    accepted = await cluster.metric("pdserve_tokens_out_total")
    frontend = psutil.Process(cluster.frontend.pid)
    memory_bytes = frontend.memory_info().rss
    peak_bytes = memory_bytes
    options = {"continuous_usage_stats": True, "include_usage": True}
    body = {
        "prompt": new_prompt(8),
        "max_tokens": STALLED_TOKENS,
        "n": STALLED_CHOICES,
        "stream": True,
        "stream_options": options,
    }
    async with bare_client(cluster.port, body, receive_buffer_bytes=4096):
        others = asyncio.create_task(answer_others(cluster, STREAMS - 1))

        async def given_up() -> bool:
            nonlocal peak_bytes
            peak_bytes = max(peak_bytes, frontend.memory_info().rss)
            return (await cluster.outcomes()).get("client_gone", 0) > outcomes.get("client_gone", 0)

        await cluster.until(given_up, "the deadline of a reader that takes nothing", 10 * STALL_TIMEOUT_S)
        await others
    answered = (STREAMS - 1) * TOKENS
    produced_bytes = (await cluster.metric("pdserve_tokens_out_total") - accepted - answered) * EVENT_BYTES
    growth_bytes = peak_bytes - memory_bytes
    assert growth_bytes < 2**21 + produced_bytes / 4, f"{growth_bytes} bytes for events of {produced_bytes}"
    assert since(interrupted, await interruptions(cluster)) == {("client", "client_gone"): 1}
    assert (await cluster.outcomes())["completed"] == outcomes["completed"] + STREAMS - 1


async def test_one_that_reads_late_but_in_time_gets_all_of_its_text(cluster: HttpCluster) -> None:
    interrupted = await interruptions(cluster)
    accepted = await cluster.metric("pdserve_tokens_out_total")
    prompt = new_prompt(8)
    body = {"prompt": prompt, "max_tokens": LATE_TOKENS, "n": LATE_CHOICES, "stream": True}
    async with bare_client(cluster.port, body, receive_buffer_bytes=4096) as client:
        await asyncio.gather(
            answer_others(cluster, STREAMS - 1),
            wait_written(cluster, accepted + LATE_CHOICES * LATE_TOKENS + (STREAMS - 1) * TOKENS),
        )
        await client.read_until(b"data: [DONE]")
    assert client.texts == dict.fromkeys(range(LATE_CHOICES), right_answer(prompt, LATE_TOKENS))
    # What gathered came as one event a choice, not one a token.
    assert client.received.count(b"data: ") < LATE_CHOICES * LATE_TOKENS / 2
    assert since(interrupted, await interruptions(cluster)) == {}


async def the_client_leaves(cluster: HttpCluster) -> None:
    body = {"prompt": new_prompt(8), "max_tokens": LONG_ANSWER_TOKENS, "stream": True}
    async with bare_client(cluster.port, body) as client:
        await client.read_tokens(2)
        client.leave(Leaving.CLOSE)


async def the_decode_worker_is_lost(cluster: HttpCluster) -> None:
    (decode,) = cluster.decodes
    async with cluster.stream(new_prompt(8), LONG_ANSWER_TOKENS) as stream:
        await stream.read(2)
        decode.kill(signal.SIGKILL)
        await stream.finish()
        assert stream.error is not None
    await decode.wait_exit()
    cluster.replace(decode)
    await cluster.wait_ready()


async def no_first_token_comes(cluster: HttpCluster) -> None:
    await interrupted_stream(cluster, LONG_PROMPT_TOKENS, "ttft_timeout")


async def no_next_token_comes(cluster: HttpCluster) -> None:
    (decode,) = cluster.decodes
    async with cluster.stream(new_prompt(8), LONG_ANSWER_TOKENS) as stream:
        await stream.read(2)
        # Not for so long that the worker counts as lost.
        decode.kill(signal.SIGSTOP)
        try:
            await stream.finish()
        finally:
            decode.kill(signal.SIGCONT)
        assert stream.error is not None
        assert stream.error["code"] == "idle_timeout"


async def the_answer_takes_too_long(cluster: HttpCluster) -> None:
    await interrupted_stream(cluster, 8, "total_timeout")


@pytest.mark.parametrize(
    ("induce", "cause", "reason"),
    [
        (the_client_leaves, "client", "client_gone"),
        (the_decode_worker_is_lost, "provider", "worker_lost"),
        (no_first_token_comes, "timeout", "ttft_timeout"),
        (no_next_token_comes, "timeout", "idle_timeout"),
        (the_answer_takes_too_long, "timeout", "total_timeout"),
    ],
)
async def test_each_cause_of_interruption_moves_exactly_one_counter_by_one(
    running_to_limits: HttpCluster, induce: Callable[[HttpCluster], Awaitable[None]], cause: str, reason: str
) -> None:
    cluster = running_to_limits
    await cluster.wait_ready()
    interrupted, outcomes = await interruptions(cluster), await cluster.outcomes()
    await induce(cluster)
    await cluster.settled()
    assert since(interrupted, await interruptions(cluster)) == {(cause, reason): 1}
    after = await cluster.outcomes()
    assert {outcome for outcome in after if after[outcome] != outcomes.get(outcome, 0)} == {reason}
    assert after[reason] == outcomes.get(reason, 0) + 1


async def test_an_answer_that_failed_before_its_first_byte_is_no_interrupted_stream(cluster: HttpCluster) -> None:
    interrupted = await interruptions(cluster)
    status, _, _ = await cluster.post({"prompt": new_prompt(8), "stream": True, "n": 0})
    assert status == 400
    assert await interruptions(cluster) == interrupted
