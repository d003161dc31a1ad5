"""A client that leaves, in every phase and in every way: its request is out of both engines by the next step (invariant 5)."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import pytest
import pytest_asyncio

from pdserve.core.events import Role
from tests.bare_client import BareClient, Leaving, bare_client
from tests.http_cluster import HttpCluster, Stream, http_cluster
from tests.scripted_words import right_answer
from tests.worker_pair import new_prompt
from tests.worker_processes import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK_TOKENS = 16
CHUNK_TOKENS = 16
# Prefill takes a third of a second for a chunk: a long prompt would keep it busy for longer than any test waits.
SLOW_PREFILL = {"engine": {"step_tokens": CHUNK_TOKENS, "max_running": 16, "scripted": {"prefill_token_s": 0.02}}}
LONG_PROMPT_TOKENS = 900
# One answer of these is all that fits in decode.
DECODE_BLOCKS = 64
SMALL_DECODE = {"engine": {"num_blocks": DECODE_BLOCKS, "scripted": {"step_s": 0.05}}}
LONG_ANSWER_TOKENS = DECODE_BLOCKS * BLOCK_TOKENS - CHUNK_TOKENS
# Far less than what any of the requests would take.
EMPTY_WITHIN_S = 8.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpCluster]:
    folder = tmp_path_factory.mktemp("leaving")
    async with http_cluster(folder, [SLOW_PREFILL], [SMALL_DECODE], relayed=True) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(running: HttpCluster) -> AsyncIterator[HttpCluster]:
    yield running
    await running.settled()
    prompt = new_prompt(5)
    assert await running.complete(prompt, 3) == right_answer(prompt, 3)
    await running.settled()


@dataclass
class Setting:
    """Where the client's request is when it leaves.

    Attributes:
        client: whose request it is.
        occupant: another request's stream, which must not notice.
    """

    client: BareClient
    occupant: Stream | None = None


def request(stream: bool, prompt_tokens: int, max_tokens: int) -> dict[str, object]:
    return {"prompt": new_prompt(prompt_tokens), "max_tokens": max_tokens, "stream": stream}


async def states(cluster: HttpCluster) -> tuple[set[str], set[str]]:
    """Of the attempts at prefill and at decode."""
    return await cluster.prefills[0].states(), await cluster.decodes[0].states()


async def wait_states(cluster: HttpCluster, prefill: set[str], decode: set[str]) -> None:
    async def there() -> bool:
        return await states(cluster) == (prefill, decode)

    await cluster.until(there, f"{prefill} at prefill, {decode} at decode")


@asynccontextmanager
async def queued_at_the_frontend(cluster: HttpCluster, stream: bool) -> AsyncIterator[Setting]:
    decode = cluster.decodes[0]
    await cluster.drain(decode, 60.0)

    async def unwanted() -> bool:
        return (await cluster.ready())["decode"] == 0

    async def in_line() -> bool:
        return await cluster.metric("pdserve_queue_depth") == 1

    await cluster.until(unwanted, "no decode worker for new requests")
    async with bare_client(cluster.port, request(stream, 16, 8)) as client:
        await cluster.until(in_line, "a request in line")
        yield Setting(client)
    await cluster.undrain(decode)
    await cluster.wait_ready()


@asynccontextmanager
async def queued_at_prefill(cluster: HttpCluster, stream: bool) -> AsyncIterator[Setting]:
    occupying = new_prompt(CHUNK_TOKENS)
    async with cluster.stream(occupying, LONG_ANSWER_TOKENS) as occupant:
        await occupant.read(1)
        await wait_states(cluster, set(), {"Running"})
        async with bare_client(cluster.port, request(stream, 16, 8)) as client:
            await wait_states(cluster, {"Queued"}, {"Running", "Reserved"})
            yield Setting(client, occupant)
        read = occupant.tokens
        await occupant.read(read + 3)
        assert occupant.text == right_answer(occupying, occupant.tokens)


@asynccontextmanager
async def in_prefill(cluster: HttpCluster, stream: bool) -> AsyncIterator[Setting]:
    before_blocks = (await cluster.prefills[0].status()).pulse.cached_blocks
    async with bare_client(cluster.port, request(stream, LONG_PROMPT_TOKENS, 8)) as client:
        await wait_states(cluster, {"Running"}, {"Receiving"})
        yield Setting(client)
    # The rest of the prompt was never computed.
    computed_blocks = (await cluster.prefills[0].status()).pulse.cached_blocks - before_blocks
    assert computed_blocks < LONG_PROMPT_TOKENS // BLOCK_TOKENS // 2


@asynccontextmanager
async def in_the_handoff(cluster: HttpCluster, stream: bool) -> AsyncIterator[Setting]:
    (relay,) = cluster.relays
    async with bare_client(cluster.port, request(stream, 3 * CHUNK_TOKENS, 8)) as client:
        try:
            await wait_states(cluster, {"Running"}, {"Receiving"})
            relay.open.clear()
            await wait_states(cluster, {"HandingOff"}, {"Receiving"})
            yield Setting(client)
        finally:
            relay.open.set()


@asynccontextmanager
async def decoding(cluster: HttpCluster, stream: bool) -> AsyncIterator[Setting]:
    async with bare_client(cluster.port, request(stream, 16, 900)) as client:
        if stream:
            await client.read_tokens(3)
        await wait_states(cluster, set(), {"Running"})
        yield Setting(client)


PHASES: list[Callable[[HttpCluster, bool], AbstractAsyncContextManager[Setting]]] = [
    queued_at_the_frontend,
    queued_at_prefill,
    in_prefill,
    in_the_handoff,
    decoding,
]


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "buffered"])
@pytest.mark.parametrize("way", Leaving)
@pytest.mark.parametrize("phase", PHASES, ids=[phase.__name__ for phase in PHASES])
async def test_a_client_that_leaves_is_out_of_both_engines(
    cluster: HttpCluster,
    phase: Callable[[HttpCluster, bool], AbstractAsyncContextManager[Setting]],
    stream: bool,
    way: Leaving,
) -> None:
    before = await cluster.outcomes()
    async with phase(cluster, stream) as setting:
        overshot = await cluster.metric("pdserve_tokens_overshoot_total")
        setting.client.leave(way)
        await cluster.until(lambda: gone(cluster, before), "the frontend to notice")
        accepted = await cluster.metric("pdserve_tokens_out_total")
        for worker in cluster.workers:
            await wait_holds_only(cluster, worker, setting.occupant)
        # A step was under way when the client left; the cancellation came before the one after it.
        assert await cluster.metric("pdserve_tokens_overshoot_total") - overshot <= 2
        if setting.occupant is None:
            assert await cluster.metric("pdserve_tokens_out_total") == accepted


async def gone(cluster: HttpCluster, before: dict[str, int]) -> bool:
    """Whether one more request than before has ended by its client's leaving, and none otherwise."""
    wanted = before | {"client_gone": before.get("client_gone", 0) + 1}
    return await cluster.outcomes() == wanted


async def wait_holds_only(cluster: HttpCluster, worker: WorkerProcess, occupant: Stream | None) -> None:
    """Until a worker's tables and blocks are empty, but for an occupant in decode."""

    async def held() -> bool:
        status = await worker.status()
        if occupant is not None and worker.role is Role.DECODE:
            return status.attempts == status.pulse.running_sequences == 1 and status.pulse.queued_sequences == 0
        return not (status.attempts or status.transfers or status.used_blocks or status.pulse.running_sequences)

    await cluster.until(held, "an empty engine", EMPTY_WITHIN_S)


@pytest.mark.parametrize("way", Leaving)
async def test_a_client_that_leaves_before_its_request_is_whole_is_sent_nowhere(
    cluster: HttpCluster, way: Leaving
) -> None:
    before, attempts = await cluster.outcomes(), await cluster.metric("pdserve_attempts_total")
    started = await cluster.metric("pdserve_requests_started_total")

    async def is_heard() -> bool:
        async with cluster.http.get(cluster.url + "/health") as response:
            return response.status == 200

    async with bare_client(cluster.port, request(True, 16, 8), unsent_bytes=10) as client:
        await cluster.until(is_heard, "the frontend to have looked at its sockets")
        client.leave(way)
        await cluster.until(lambda: gone(cluster, before), "the frontend to notice")
    assert await cluster.metric("pdserve_requests_started_total") == started + 1
    assert await cluster.metric("pdserve_attempts_total") == attempts


async def test_siblings_leave_together(cluster: HttpCluster) -> None:
    before = await cluster.outcomes()
    async with bare_client(cluster.port, request(True, 16, 100) | {"n": 4}) as client:
        await client.read_tokens(12)
        client.leave(Leaving.CLOSE)
        await cluster.until(lambda: gone(cluster, before), "the frontend to notice")


async def test_a_client_that_has_its_answer_and_leaves_is_no_interruption(cluster: HttpCluster) -> None:
    before = await cluster.outcomes()
    async with bare_client(cluster.port, request(True, 16, 3)) as client:
        await client.read_tokens(3)
        client.leave(Leaving.HALF_CLOSE)

    async def ended() -> bool:
        return sum((await cluster.outcomes()).values()) == sum(before.values()) + 1

    await cluster.until(ended, "an outcome")
