"""Real workers on real ports in this process, and a frontend's sessions to them: what tests of the handoff stand on."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pdserve.config import Settings, load_settings
from pdserve.core.attempt import Attempt
from pdserve.core.errors import PdserveError
from pdserve.core.events import EngineLoad, StageReport, Token
from pdserve.core.ids import AttemptKey, GroupId, Ticket, random_id
from pdserve.core.sampling import SamplingParams
from pdserve.engine.scripted import scripted_answer
from pdserve.rpc.v1 import session_pb2 as pb
from pdserve.runtime.worker import Worker
from pdserve.wire.attempts import attempt_to_proto, prompt_parts
from pdserve.wire.convert import ticket_to_proto
from pdserve.wire.session_client import WorkerSession
from services.decode.worker import DecodeWorker
from services.prefill.worker import PrefillWorker

# Twenty times faster than by default.
FAST_SESSIONS = {"pulse_s": 0.05, "quiet_after_s": 0.1, "dead_after_s": 0.25, "ticket_wait_s": 0.1}


def scripted_settings(**slices: dict[str, Any]) -> Settings:
    """Settings of a scripted worker with fast timers; `slices` override."""
    engine = {"kind": "scripted", "num_blocks": 64, "scripted": {"step_s": 0.0}} | slices.pop("engine", {})
    session = FAST_SESSIONS | slices.pop("session", {})
    return load_settings(environ={}, overrides={"engine": engine, "session": session, **slices})


async def wait_until(holds: Callable[[], bool], what: str, deadline_s: float = 10.0) -> None:
    """Wait for a condition; fails the test with `what` when it does not come true."""
    until_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < until_s, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(0.005)


@dataclass
class Heard:
    """A session's listener that keeps everything."""

    welcome: pb.Welcome | None = None
    tokens: dict[AttemptKey, list[Token]] = field(default_factory=dict)
    stages: dict[AttemptKey, list[StageReport]] = field(default_factory=dict)
    failures: dict[AttemptKey, PdserveError] = field(default_factory=dict)
    state: int = pb.WORKER_STATE_UNSPECIFIED
    went_away: bool = False
    losses: list[PdserveError] = field(default_factory=list)

    def on_welcome(self, welcome: pb.Welcome) -> None:
        self.welcome = welcome

    def on_tokens(self, tokens: Sequence[Token]) -> None:
        for token in tokens:
            self.tokens.setdefault(token.key, []).append(token)

    def on_stages(self, stages: Sequence[StageReport]) -> None:
        for stage in stages:
            self.stages.setdefault(stage.key, []).append(stage)

    def on_failed(self, key: AttemptKey, error: PdserveError) -> None:
        self.failures[key] = error

    def on_pulse(self, load: EngineLoad, state: int) -> None:
        self.state = state

    def on_go_away(self, deadline_s: float) -> None:
        self.went_away = True

    def on_lost(self, error: PdserveError) -> None:
        self.welcome = None
        self.losses.append(error)

    def ids(self, key: AttemptKey, sibling: int = 0) -> list[int]:
        return [token.token_id for token in self.tokens.get(key, []) if token.sibling == sibling]

    def ended(self, key: AttemptKey) -> set[int]:
        """Siblings whose last token has come."""
        return {token.sibling for token in self.tokens.get(key, []) if token.finish is not None}


@dataclass
class Link:
    """One worker and the frontend's session to it."""

    worker: Worker
    session: WorkerSession
    heard: Heard

    @property
    def welcome(self) -> pb.Welcome:
        assert self.heard.welcome is not None
        return self.heard.welcome


class WorkerPair:
    """A prefill and a decode worker and a frontend that dispatches to them by hand.

    Attributes:
        instance: the frontend's.
    """

    def __init__(self) -> None:
        self.instance = random_id()
        self.prefill: Link
        self.decode: Link
        self._groups = 0

    def new_key(self) -> AttemptKey:
        self._groups += 1
        return AttemptKey(GroupId(self.instance, self._groups), 1)

    def ticket(self, key: AttemptKey, **changes: int) -> Ticket:
        fields = {"prefill_epoch": self.prefill.welcome.epoch, "decode_epoch": self.decode.welcome.epoch}
        return Ticket(key=key, **({"nonce": random_id()} | fields | changes))

    def attempt(self, key: AttemptKey, prompt: Sequence[int], params: SamplingParams, **fields: Any) -> Attempt:
        defaults = {"siblings": (0,), "prompt_tokens": len(prompt), "seed": 7, "model": self.decode.welcome.model}
        return Attempt(key=key, total_tokens=len(prompt), params=params, **(defaults | fields))

    def reserve(self, attempt: Attempt, prompt: Sequence[int], ticket: Ticket, replaces: int = 0) -> None:
        command = pb.Command(
            reserve=pb.Reserve(attempt=attempt_to_proto(attempt), ticket=ticket_to_proto(ticket), replaces=replaces)
        )
        self.decode.session.send([*_parts(attempt.key, prompt), command])

    def run(self, attempt: Attempt, prompt: Sequence[int], ticket: Ticket | None) -> None:
        run = pb.Run(attempt=attempt_to_proto(attempt), decode_address=self.decode.welcome.kv_address)
        if ticket is not None:
            run.ticket.CopyFrom(ticket_to_proto(ticket))
        self.prefill.session.send([*_parts(attempt.key, prompt), pb.Command(run=run)])

    def dispatch(
        self, prompt: Sequence[int], params: SamplingParams, key: AttemptKey | None = None, **fields: Any
    ) -> AttemptKey:
        """Reserve and Run at the same moment."""
        key = key or self.new_key()
        attempt, ticket = self.attempt(key, prompt, params, **fields), self.ticket(key)
        self.reserve(attempt, prompt, ticket)
        self.run(attempt, prompt, ticket)
        return key

    def cancel(self, key: AttemptKey, *links: Link, siblings: Sequence[int] = (), unless_running: bool = False) -> None:
        cancel = pb.Cancel(
            group=key.group.counter, attempt=key.attempt, siblings=siblings, unless_running=unless_running
        )
        for link in links or (self.prefill, self.decode):
            link.session.send([pb.Command(cancel=cancel)])

    async def finish(self, key: AttemptKey, siblings: Sequence[int] = (0,)) -> None:
        """Until decode has sent every sibling's last token."""
        await wait_until(lambda: self.decode.heard.ended(key) >= set(siblings), f"the last token of {key}")

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


def _parts(key: AttemptKey, prompt: Sequence[int]) -> list[pb.Command]:
    parts = prompt_parts(key.group.counter, key.attempt, np.asarray(prompt, np.int32), 1 << 19)
    return [pb.Command(prompt_part=part) for part in parts]


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """A prompt that differs from those of other seeds from its first token on."""
    return np.random.default_rng(seed).integers(1000, 2000, num_tokens).tolist()


def answer_to(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """What a scripted pair must answer."""
    return scripted_answer(np.asarray(prompt, np.int32), params)


GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@asynccontextmanager
async def worker_pair(prefill: Settings | None = None, decode: Settings | None = None) -> AsyncIterator[WorkerPair]:
    """A pair with its sessions open; everything is stopped at the end."""
    pair = WorkerPair()
    workers = (PrefillWorker(prefill or scripted_settings()), DecodeWorker(decode or scripted_settings()))
    links = []
    for worker in workers:
        identity = await worker.start()
        heard = Heard()
        session = WorkerSession(identity.session_address, pair.instance, worker.role, worker.settings.session, heard)
        session.start()
        links.append(Link(worker, session, heard))
    pair.prefill, pair.decode = links
    try:
        for link in links:
            await wait_until(lambda link=link: link.heard.welcome is not None, f"a session with {link.worker.role}")
        yield pair
    finally:
        for link in links:
            await link.session.close()
            await link.worker.stop(drain_s=0.0)
