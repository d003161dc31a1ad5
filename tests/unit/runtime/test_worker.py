"""What workers of all roles have in common, without a network around them."""

import asyncio

import pytest

from pdserve.core.errors import ErrorCode, PdserveError
from services.decode.worker import DecodeWorker
from tests.manual_frontend import wait_until
from tests.worker_pair import scripted_settings

pytestmark = pytest.mark.asyncio


async def test_a_worker_that_stops_is_neither_kept_nor_given_more_time() -> None:
    worker = DecodeWorker(scripted_settings())
    await worker.start()
    await worker.stop(drain_s=0.0)
    with pytest.raises(PdserveError) as refusal:
        worker.undrain()
    assert refusal.value.code is ErrorCode.shutting_down
    worker.drain(1000.0)
    assert not worker._drains


async def test_a_worker_that_cannot_pulse_any_more_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = DecodeWorker(scripted_settings())
    await worker.start()
    await wait_until(lambda: worker._engine_built is not None, "the engine")

    def fail() -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(worker, "pulse", fail)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(worker.wait_closed(), 10)
    await worker.stop(drain_s=0.0)
