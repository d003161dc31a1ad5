import asyncio
import time

import pytest

from pdserve.telemetry.loop_lag import sample_loop_lag


async def samples(count: int, *, block_s: float = 0.0) -> list[float]:
    lags: list[float] = []
    sampler = asyncio.create_task(sample_loop_lag(lags.append, interval_s=0.01))
    async with asyncio.timeout(20):
        while not lags:
            await asyncio.sleep(0.001)
        time.sleep(block_s)
        while len(lags) < count:
            await asyncio.sleep(0.001)
    sampler.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sampler
    return lags


@pytest.mark.asyncio
async def test_it_samples_until_it_is_cancelled() -> None:
    assert all(lag >= 0 for lag in await samples(3))


@pytest.mark.asyncio
async def test_what_blocks_the_loop_shows_as_lag() -> None:
    # The next sample is due within 0.01 s, and late by the rest.
    assert max(await samples(3, block_s=0.1)) >= 0.08
