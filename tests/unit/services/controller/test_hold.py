"""A controller's hold on a lock that is played: no Ray."""

import asyncio

import pytest

from pdserve.core.errors import StartupError
from services.controller.hold import Hold

pytestmark = pytest.mark.asyncio


class Lock:
    """Says who has it, or, once it hangs, nothing."""

    def __init__(self, holder: str = "me") -> None:
        self.holder = holder
        self.hangs = False
        self.released = False

    async def acquire_lock(self, owner: str, lease_s: float) -> str:
        await self._answer()
        return self.holder

    async def release_lock(self, owner: str) -> None:
        await self._answer()
        self.released = True

    async def _answer(self) -> None:
        if self.hangs:
            await asyncio.get_running_loop().create_future()


def hold_on(lock: Lock, lease_s: float) -> Hold:
    return Hold(lock, "me", lease_s)  # type: ignore[arg-type]


async def test_a_hold_that_is_renewed_goes_on() -> None:
    hold = hold_on(Lock(), 60.0)
    assert await hold.take() == "me"
    await hold.confirm()
    await hold.renew()


async def test_whoever_finds_another_in_its_place_ends() -> None:
    lock = Lock()
    hold = hold_on(lock, 60.0)
    await hold.take()
    lock.holder = "another"
    assert await hold.take() == "another"
    for ask in (hold.confirm, hold.renew):
        with pytest.raises(StartupError, match="has taken the lock"):
            await ask()


async def test_a_lock_that_does_not_answer_is_lost_when_its_lease_ends() -> None:
    lock = Lock()
    hold = hold_on(lock, 0.05)
    await hold.take()
    lock.hangs = True
    async with asyncio.timeout(10):
        with pytest.raises(StartupError, match="has not answered before its lease ended"):
            await hold.renew()


async def test_a_lock_that_cannot_be_released_is_left_to_its_lease(caplog: pytest.LogCaptureFixture) -> None:
    lock = Lock()
    hold = hold_on(lock, 0.05)
    await hold.release()
    assert lock.released
    lock.hangs = True
    async with asyncio.timeout(10):
        await hold.release()
    assert "the lock was not released: no answer" in caplog.text
