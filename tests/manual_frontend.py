"""A frontend that dispatches by hand: its sessions to any workers that have an address, and all that they bring."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pdserve.config import SessionConfig
from pdserve.core.attempt import Attempt
from pdserve.core.errors import PdserveError
from pdserve.core.events import EngineLoad, Role, Stage, StageReport, Token
from pdserve.core.ids import AttemptKey, GroupId, Ticket, random_id
from pdserve.core.sampling import SamplingParams
from pdserve.rpc.v1 import session_pb2 as pb
from pdserve.wire.attempts import attempt_to_proto, prompt_parts
from pdserve.wire.convert import ticket_to_proto
from pdserve.wire.session_client import WorkerSession


async def wait_until(holds: Callable[[], bool], what: str, deadline_s: float = 60.0) -> None:
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

    def cached_tokens(self, key: AttemptKey) -> int:
        """How much of an attempt's prompt prefill has found in its cache."""
        return sum(report.cached_tokens for report in self.stages[key] if report.stage is Stage.PREFILL)


@dataclass
class Link:
    """The frontend's session to one worker."""

    session: WorkerSession
    heard: Heard

    @property
    def welcome(self) -> pb.Welcome:
        assert self.heard.welcome is not None
        return self.heard.welcome


class ManualFrontend:
    """Sessions to prefill and decode workers; where no worker is named, the first of its role is meant.

    Attributes:
        instance: random, as every frontend has it.
    """

    def __init__(self) -> None:
        self.instance = random_id()
        self.prefills: list[Link] = []
        self.decodes: list[Link] = []
        self._decode_of: dict[AttemptKey, Link] = {}
        self._groups = 0

    @property
    def prefill(self) -> Link:
        return self.prefills[0]

    @property
    def decode(self) -> Link:
        return self.decodes[0]

    async def connect(self, role: Role, address: str, config: SessionConfig, deadline_s: float = 60.0) -> Link:
        """Open a session, and wait for its Welcome."""
        heard = Heard()
        session = WorkerSession(address, self.instance, role, config, heard)
        link = Link(session, heard)
        (self.prefills if role is Role.PREFILL else self.decodes).append(link)
        session.start()
        await wait_until(lambda: heard.welcome is not None, f"a session with {role} at {address}", deadline_s)
        return link

    async def close(self) -> None:
        for link in [*self.prefills, *self.decodes]:
            await link.session.close()

    def new_key(self) -> AttemptKey:
        self._groups += 1
        return AttemptKey(GroupId(self.instance, self._groups), 1)

    def ticket(
        self, key: AttemptKey, *, prefill: Link | None = None, decode: Link | None = None, **changes: int
    ) -> Ticket:
        fields = {
            "prefill_epoch": (prefill or self.prefill).welcome.epoch,
            "decode_epoch": (decode or self.decode).welcome.epoch,
        }
        return Ticket(key=key, **({"nonce": random_id()} | fields | changes))

    def attempt(self, key: AttemptKey, prompt: Sequence[int], params: SamplingParams, **fields: Any) -> Attempt:
        defaults: dict[str, Any] = {"siblings": (0,), "prompt_tokens": len(prompt), "seed": 7}
        if "model" not in fields:
            defaults["model"] = self.decode.welcome.model
        return Attempt(key=key, total_tokens=len(prompt), params=params, **(defaults | fields))

    def reserve(
        self,
        attempt: Attempt,
        prompt: Sequence[int],
        ticket: Ticket | None,
        replaces: int = 0,
        decode: Link | None = None,
    ) -> None:
        decode = self._decode_of[attempt.key] = decode or self.decode
        command = pb.Command(
            reserve=pb.Reserve(
                attempt=attempt_to_proto(attempt),
                ticket=ticket_to_proto(ticket) if ticket is not None else None,
                replaces=replaces,
            )
        )
        decode.session.send([*_parts(attempt.key, prompt), command])

    def run(
        self,
        attempt: Attempt,
        prompt: Sequence[int],
        ticket: Ticket | None,
        *,
        prefill: Link | None = None,
        decode: Link | None = None,
    ) -> None:
        run = pb.Run(attempt=attempt_to_proto(attempt), decode_address=(decode or self.decode).welcome.kv_address)
        if ticket is not None:
            run.ticket.CopyFrom(ticket_to_proto(ticket))
        (prefill or self.prefill).session.send([*_parts(attempt.key, prompt), pb.Command(run=run)])

    def dispatch(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        key: AttemptKey | None = None,
        *,
        prefill: Link | None = None,
        decode: Link | None = None,
        **fields: Any,
    ) -> AttemptKey:
        """Reserve and Run at the same moment."""
        key = key or self.new_key()
        attempt, ticket = self.attempt(key, prompt, params, **fields), self.ticket(key, prefill=prefill, decode=decode)
        self.reserve(attempt, prompt, ticket, decode=decode)
        self.run(attempt, prompt, ticket, prefill=prefill, decode=decode)
        return key

    def cancel(self, key: AttemptKey, *links: Link, siblings: Sequence[int] = (), unless_running: bool = False) -> None:
        cancel = pb.Cancel(
            group=key.group.counter, attempt=key.attempt, siblings=siblings, unless_running=unless_running
        )
        for link in links or (*self.prefills, *self.decodes):
            link.session.send([pb.Command(cancel=cancel)])

    async def finish(self, key: AttemptKey, siblings: Sequence[int] = (0,), deadline_s: float = 60.0) -> None:
        """Until decode has sent every sibling's last token."""
        heard = self._decode_of[key].heard
        links = [*self.prefills, *self.decodes]

        def settled() -> bool:
            return heard.ended(key) >= set(siblings) or any(key in link.heard.failures for link in links)

        await wait_until(settled, f"the last token of {key}", deadline_s)
        failures = [link.heard.failures[key] for link in links if key in link.heard.failures]
        assert not failures, f"{key} failed: {failures}"

    def answer(self, key: AttemptKey, sibling: int = 0) -> list[int]:
        """The token ids that decode has sent so far."""
        return self._decode_of[key].heard.ids(key, sibling)


def _parts(key: AttemptKey, prompt: Sequence[int]) -> list[pb.Command]:
    parts = prompt_parts(key.group.counter, key.attempt, np.asarray(prompt, np.int32), 1 << 19)
    return [pb.Command(prompt_part=part) for part in parts]
