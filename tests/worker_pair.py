"""Real workers on real ports in this process, and a frontend's sessions to them: what tests of the handoff stand on."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from pdserve.config import Settings, load_settings
from pdserve.core.sampling import SamplingParams
from pdserve.engine.scripted import scripted_answer
from pdserve.runtime.worker import Worker
from services.decode.worker import DecodeWorker
from services.prefill.worker import PrefillWorker
from tests.manual_frontend import Link, ManualFrontend, wait_until

# Everything runs on one loop here, so whoever is dead is not a matter of milliseconds.
SESSIONS = {"pulse_s": 0.05, "ticket_wait_s": 0.1}
# Beyond those that tests choose by themselves.
_SEEDS = count(1000)


def scripted_settings(**slices: dict[str, Any]) -> Settings:
    """Settings of a scripted worker with fast timers; `slices` override."""
    engine = {"kind": "scripted", "num_blocks": 64, "scripted": {"step_s": 0.0}} | slices.pop("engine", {})
    session = SESSIONS | slices.pop("session", {})
    return load_settings(environ={}, overrides={"engine": engine, "session": session, **slices})


@dataclass
class WorkerLink(Link):
    """The frontend's session to a worker of this process."""

    worker: Worker


class WorkerPair(ManualFrontend):
    """A prefill and a decode worker of this process, and a frontend that dispatches to them by hand."""

    prefills: list[WorkerLink]  # type: ignore[assignment]
    decodes: list[WorkerLink]  # type: ignore[assignment]

    @property
    def prefill(self) -> WorkerLink:
        return self.prefills[0]

    @property
    def decode(self) -> WorkerLink:
        return self.decodes[0]

    async def settle(self) -> None:
        """Until both workers hold nothing and every block is free or cached (invariant 4)."""
        for link in (self.prefill, self.decode):
            await wait_until(lambda link=link: not link.worker.held, f"an empty table at {link.worker.role}")
            await wait_until(
                lambda link=link: used_blocks(link.worker) == 0 and link.worker.transfers == 0,
                f"blocks and transfers back at {link.worker.role}",
            )


def used_blocks(worker: Worker) -> int:
    pulse = worker.pulse()
    return pulse.total_blocks - pulse.free_blocks - pulse.cached_blocks


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """A prompt that differs from those of other seeds from its first token on."""
    return np.random.default_rng(seed).integers(1000, 2000, num_tokens).tolist()


def new_prompt(num_tokens: int = 40) -> list[int]:
    """A prompt that no other test has had: nothing of it is in a cache."""
    return prompt_of(num_tokens, seed=next(_SEEDS))


def answer_to(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """What a scripted pair must answer."""
    return scripted_answer(np.asarray(prompt, np.int32), params)


GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@asynccontextmanager
async def worker_pair(prefill: Settings | None = None, decode: Settings | None = None) -> AsyncIterator[WorkerPair]:
    """A pair with its sessions open; everything is stopped at the end."""
    pair = WorkerPair()
    workers = (PrefillWorker(prefill or scripted_settings()), DecodeWorker(decode or scripted_settings()))
    try:
        for worker, links in zip(workers, (pair.prefills, pair.decodes), strict=True):
            identity = await worker.start()
            link = await pair.connect(worker.role, identity.session_address, worker.settings.session)
            links[:] = [WorkerLink(link.session, link.heard, worker)]
        yield pair
    finally:
        await pair.close()
        for worker in workers:
            await worker.stop(drain_s=0.0)
