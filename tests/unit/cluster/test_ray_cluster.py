"""What is said to Ray, with the actors played: no cluster."""

import asyncio
from typing import Any

import pytest

from pdserve.cluster import ray_cluster
from pdserve.cluster.ray_cluster import RayCluster
from pdserve.core.errors import ErrorCode, PdserveError


class HungActor:
    """Takes every call, and answers none."""

    def __getattr__(self, method: str) -> "HungActor":
        return self

    def remote(self, *arguments: Any) -> "asyncio.Future[Any]":
        return asyncio.get_running_loop().create_future()


@pytest.mark.asyncio
async def test_a_lock_that_hangs_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_LOCK_ANSWER_S", 0.01)
    cluster = RayCluster()
    cluster._lease = HungActor()
    async with asyncio.timeout(10):
        with pytest.raises(PdserveError, match="has not answered") as silence:
            await cluster.acquire_lock("me", 1.0)
    assert silence.value.code is ErrorCode.worker_lost
