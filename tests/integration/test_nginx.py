"""Behind a real nginx, configured as shipped: streams live through silence, come event by event, and end when clients leave."""

import io
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.client.async_client import AsyncClient
from pdserve.client.errors import TruncatedStream
from tests.bare_client import Leaving, bare_client
from tests.http_cluster import HttpCluster, Stream, http_cluster
from tests.nginx import nginx, require_nginx
from tests.scripted_words import MODEL, right_answer
from tests.worker_pair import new_prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEP_S = 2.0
DECODE = {"engine": {"scripted": {"step_s": STEP_S}}}
HEARTBEAT_S = 0.25
# Far above the heartbeat, and below the silence between two tokens.
SHORT_READ_TIMEOUT = {"proxy_read_timeout 3660s;": "proxy_read_timeout 1s;"}
# A location as it is by default.
BUFFERING = {"proxy_buffering off;": "proxy_buffering on;", "proxy_http_version 1.1;": "proxy_http_version 1.0;"}
DEAF = BUFFERING | {"proxy_buffering off;": "proxy_buffering on; proxy_ignore_headers X-Accel-Buffering;"}
TOKENS = 3


@pytest.fixture(scope="module", autouse=True)
def _nginx_is_there() -> None:
    require_nginx()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def beating(_nginx_is_there: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpCluster]:
    """With heartbeats."""
    folder = tmp_path_factory.mktemp("beating")
    async with http_cluster(folder, [{}], [DECODE], {"heartbeat_s": HEARTBEAT_S}) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def silent(_nginx_is_there: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpCluster]:
    """Without: the first one would come too late."""
    async with http_cluster(tmp_path_factory.mktemp("silent"), [{}], [DECODE], {"heartbeat_s": 60.0}) as cluster:
        yield cluster


def streamed_body(prompt: list[int], tokens: int = TOKENS) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}


async def completed(cluster: HttpCluster) -> int:
    return (await cluster.outcomes()).get("completed", 0)


async def test_with_heartbeats_below_the_read_timeout_a_stream_lives_through_silence(
    beating: HttpCluster, tmp_path: Path
) -> None:
    prompt = new_prompt(8)
    async with (
        nginx(tmp_path / "nginx", beating.port, SHORT_READ_TIMEOUT) as url,
        AsyncClient(url) as client,
        client.stream_completion(prompt, max_tokens=TOKENS, temperature=0, model=MODEL) as stream,
    ):
        answer = await stream.read_all()
    assert answer.text == right_answer(prompt, TOKENS)


async def test_without_them_it_is_cut_and_the_client_library_says_so(silent: HttpCluster, tmp_path: Path) -> None:
    prompt, interrupted = new_prompt(8), await silent.metric("pdserve_stream_interrupted_total", cause="client")
    async with nginx(tmp_path / "nginx", silent.port, SHORT_READ_TIMEOUT) as url, AsyncClient(url) as client:
        with pytest.raises(TruncatedStream) as caught:
            async with client.stream_completion(prompt, max_tokens=TOKENS, temperature=0, model=MODEL) as stream:
                await stream.read_all()
    assert caught.value.answer is not None
    # The first token comes at once, the second one after the cut.
    assert caught.value.answer.text == right_answer(prompt, 1)
    await silent.settled()
    assert await silent.metric("pdserve_stream_interrupted_total", cause="client") == interrupted + 1


@pytest.mark.parametrize("changes", [{}, BUFFERING], ids=["as shipped", "buffering"])
async def test_events_come_one_by_one(silent: HttpCluster, changes: dict[str, str], tmp_path: Path) -> None:
    """As shipped, and from a location that buffers, because streams ask for it (X-Accel-Buffering: no)."""
    prompt, before = new_prompt(8), await completed(silent)
    async with (
        nginx(tmp_path / "nginx", silent.port, changes) as url,
        silent.http.post(url + "/v1/completions", json=streamed_body(prompt)) as response,
    ):
        assert response.headers["Content-Type"] == "text/event-stream"
        stream = Stream(response)
        for tokens in range(1, TOKENS):
            await stream.read(tokens)
            assert stream.text == right_answer(prompt, tokens)
            # The rest was not there yet.
            assert await completed(silent) == before
        await stream.finish()
    assert (stream.text, stream.is_done) == (right_answer(prompt, TOKENS), True)


async def test_where_that_wish_is_ignored_events_come_late(silent: HttpCluster, tmp_path: Path) -> None:
    """What the shipped configuration is there for."""
    prompt, before = new_prompt(8), await completed(silent)
    async with (
        nginx(tmp_path / "nginx", silent.port, DEAF) as url,
        silent.http.post(url + "/v1/completions", json=streamed_body(prompt)) as response,
    ):
        stream = Stream(response)
        # The first one comes with the headers; the others wait for the last.
        await stream.read(2)
        assert await completed(silent) == before + 1
        await stream.finish()
    assert stream.text == right_answer(prompt, TOKENS)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "buffered"])
async def test_a_client_that_leaves_is_gone_behind_nginx_too(
    silent: HttpCluster, streamed: bool, tmp_path: Path
) -> None:
    before = await silent.outcomes()
    (decode,) = silent.decodes

    async def running() -> bool:
        return await decode.states() == {"Running"}

    async def gone() -> bool:
        return await silent.outcomes() == before | {"client_gone": before.get("client_gone", 0) + 1}

    body = streamed_body(new_prompt(8), 50) | {"stream": streamed}
    async with (
        nginx(tmp_path / "nginx", silent.port, {}) as url,
        bare_client(int(url.rpartition(":")[2]), body) as client,
    ):
        await silent.until(running, "a request in decode")
        client.leave(Leaving.CLOSE)
        await silent.until(gone, "the frontend to notice")
    await silent.settled()


async def test_a_refusal_comes_through_in_the_words_of_the_api(silent: HttpCluster, tmp_path: Path) -> None:
    body = io.BytesIO(b"x" * ((32 << 20) + 1))
    async with (
        nginx(tmp_path / "nginx", silent.port, {}) as url,
        silent.http.post(url + "/v1/completions", data=body, headers={"Content-Type": "application/json"}) as response,
    ):
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "body_too_large"
