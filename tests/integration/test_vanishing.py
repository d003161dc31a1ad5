"""A client whose machine vanishes without a FIN: the kernel knows, and both engines are free."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.bare_client import bare_client
from tests.far_machine import FarMachine, far_machine
from tests.http_cluster import HttpCluster, http_cluster
from tests.scripted_words import right_answer
from tests.worker_pair import new_prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREFILL = {"engine": {"step_tokens": 16, "max_running": 16, "num_blocks": 512, "scripted": {"prefill_token_s": 0.02}}}
DECODE = {"engine": {"num_blocks": 512, "scripted": {"step_s": 0.05}}}
LONG_PROMPT_TOKENS = 3000
LONG_ANSWER_TOKENS = 3000
VANISHED_TIMEOUT_S = 2.0
# Kernel timers have their own grain; the other deadlines (30 s and more) are far away.
NOTICED_S = 12.0


@pytest.fixture(scope="module")
def machine() -> Iterator[FarMachine]:
    with far_machine() as machine:
        yield machine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(machine: FarMachine, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpCluster]:
    folder = tmp_path_factory.mktemp("vanishing")
    frontend = {"host": "0.0.0.0", "vanished_timeout_s": VANISHED_TIMEOUT_S}
    async with http_cluster(folder, [PREFILL], [DECODE], frontend) as cluster:
        yield cluster


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "buffered"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_client_that_vanishes_is_gone_by_its_timeout(
    cluster: HttpCluster, machine: FarMachine, phase: str, stream: bool
) -> None:
    before = await cluster.outcomes()
    interrupted = await cluster.metric("pdserve_stream_interrupted_total", cause="client")
    prompt_tokens = LONG_PROMPT_TOKENS if phase == "prefill" else 16
    body = {"prompt": new_prompt(prompt_tokens), "max_tokens": LONG_ANSWER_TOKENS, "stream": stream}
    worker = cluster.prefills[0] if phase == "prefill" else cluster.decodes[0]

    async def running() -> bool:
        return await worker.states() == {"Running"}

    async def gone() -> bool:
        return await cluster.outcomes() == before | {"client_gone": before.get("client_gone", 0) + 1}

    async with bare_client(cluster.port, body, host=machine.here, make_socket=machine.make_socket) as client:
        await cluster.until(running, f"a request in {phase}")
        if stream and phase == "decode":
            await client.read_tokens(3)
        assert await cluster.outcomes() == before
        machine.pull_cable()
        try:
            await cluster.until(gone, "the client to count as gone", NOTICED_S)
        finally:
            machine.plug_cable()
    await cluster.settled()
    has_begun = stream and phase == "decode"
    assert await cluster.metric("pdserve_stream_interrupted_total", cause="client") == interrupted + has_begun
    prompt = new_prompt(5)
    assert await cluster.complete(prompt, 3) == right_answer(prompt, 3)


async def test_a_slow_reader_that_pauses_again_and_again_is_there(cluster: HttpCluster) -> None:
    """Each pause is shorter than the timeout; from the first one to the last it is longer."""
    before = await cluster.outcomes()
    body = {"prompt": new_prompt(16), "max_tokens": 400, "n": 16, "temperature": 1, "stream": True}
    async with bare_client(cluster.port, body, receive_buffer_bytes=4096) as client:
        await client.read_tokens(1)
        for _ in range(3):
            # Long enough for every buffer to fill, and the window to close.
            await asyncio.sleep(VANISHED_TIMEOUT_S * 0.6)
            try:
                async with asyncio.timeout(VANISHED_TIMEOUT_S * 0.6):
                    await client.read_until(b"[DONE]")
            except TimeoutError:
                # It goes on: that is all that was to be seen.
                continue
        assert await cluster.outcomes() == before
    await cluster.settled()
