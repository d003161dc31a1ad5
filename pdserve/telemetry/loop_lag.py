"""How late an event loop runs what is due: the sign of something that blocks it."""

import asyncio
from collections.abc import Callable
from typing import NoReturn


async def sample_loop_lag(observe: Callable[[float], None], interval_s: float = 0.5) -> NoReturn:
    """Tell `observe`, every `interval_s`, by how many seconds the running loop was late. Runs until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        observe(max(0.0, loop.time() - due_s))
