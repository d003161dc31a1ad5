"""A frontend that is told to stop: first not ready, then refusing, then telling, then gone."""

import signal
from pathlib import Path

import pytest

from tests.http_cluster import HttpCluster, http_cluster
from tests.scripted_words import right_answer
from tests.worker_pair import new_prompt

DECODE = {"engine": {"num_blocks": 1024, "scripted": {"step_s": 0.05}}}
FRONTEND = {"balancer_wait_s": 3.0, "shutdown_s": 3.0}
SHORT_TOKENS = 80
LONG_TOKENS = 1000


async def ready_status(cluster: HttpCluster) -> int:
    async with cluster.http.get(cluster.url + "/ready") as response:
        return response.status


@pytest.mark.asyncio
async def test_a_stopping_frontend_is_left_by_balancers_before_it_refuses_anybody(tmp_path: Path) -> None:
    short, late, long = (new_prompt(8) for _ in range(3))
    async with (
        http_cluster(tmp_path, [{}], [DECODE], FRONTEND) as cluster,
        cluster.stream(short, SHORT_TOKENS) as ends,
        cluster.stream(long, LONG_TOKENS) as lasts,
    ):
        await lasts.read(1)
        cluster.frontend.kill(signal.SIGTERM)

        async def unready() -> bool:
            return await ready_status(cluster) == 503

        async def refused() -> bool:
            status, body, headers = await cluster.post({"prompt": late, "max_tokens": 1})
            if status == 200:
                return False
            assert (status, body["error"]["code"]) == (503, "shutting_down")
            assert headers["Retry-After"]
            # The next request is to go elsewhere.
            assert headers["Connection"] == "close"
            return True

        await cluster.until(unready, "not ready")
        # A balancer that has not noticed yet may still send requests.
        assert await cluster.complete(late, 2) == right_answer(late, 2)
        await cluster.until(refused, "refusals")
        await ends.finish()
        assert (ends.error, ends.is_done, ends.text) == (None, True, right_answer(short, SHORT_TOKENS))
        await lasts.finish()
        assert lasts.error is not None
        assert (lasts.error["code"], lasts.is_done) == ("shutting_down", False)
        assert right_answer(long, LONG_TOKENS).startswith(lasts.text)
        assert await cluster.frontend.wait_exit() == 0
        # Workers are told, and go on without it.
        for worker in cluster.workers:
            await worker.settle()
