"""Decode's table: what it tells its engine, and that the engine has nothing left of an attempt that the table has forgotten."""

from collections.abc import Iterable

import numpy as np
import pytest

from pdserve.config import SessionConfig
from pdserve.core.attempt import Attempt
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import Token
from pdserve.core.ids import AttemptKey, GroupId, Ticket
from pdserve.core.sampling import SamplingParams
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.scripted import SCRIPTED_GEOMETRY
from pdserve.engine.settings import SchedulerSettings
from pdserve.engine.work import Command, Sampled, StepOutcome
from pdserve.rpc.v1 import session_pb2 as pb
from pdserve.runtime.attempts import Admission
from pdserve.runtime.sessions import FrontendSession
from pdserve.wire.attempts import attempt_to_proto, prompt_parts
from pdserve.wire.convert import ticket_to_proto
from services.decode.attempts import DecodeAttempts, DecodeHeld
from services.decode.reception import Reception

pytestmark = pytest.mark.asyncio

EPOCH = 5
PROMPT = list(range(100, 140))
STOP_ID = 7


class Bench:
    """A table and a scheduler in one thread: commands wait until `step`, and outcomes until `learn`."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(BlockManager(64), SCRIPTED_GEOMETRY, 1000, SchedulerSettings())
        self.session = FrontendSession(3, SessionConfig())
        self.commands: list[Command] = []
        self.table = DecodeAttempts(Admission("m", 1000, 10), self.commands.append, EPOCH, 0.1, colocated=False)

    def reserve(self, attempt: int = 1, siblings: tuple[int, ...] = (0, 1), replaces: int = 0) -> DecodeHeld:
        key = AttemptKey(GroupId(self.session.instance, 1), attempt)
        described = Attempt(
            key=key,
            siblings=siblings,
            prompt_tokens=len(PROMPT),
            total_tokens=len(PROMPT),
            params=SamplingParams(max_tokens=20, stop_ids=frozenset({STOP_ID})),
            seed=1,
            model="m",
        )
        for part in prompt_parts(1, attempt, np.asarray(PROMPT, np.int32), 1 << 16):
            self.table.handle(self.session, pb.Command(prompt_part=part))
        ticket = ticket_to_proto(Ticket(1, EPOCH, key, 9))
        reserve = pb.Reserve(attempt=attempt_to_proto(described), ticket=ticket, replaces=replaces)
        self.table.handle(self.session, pb.Command(reserve=reserve))
        return self.table.held[key]

    def cancel(self, held: DecodeHeld, *siblings: int) -> None:
        cancel = pb.Cancel(group=held.key.group.counter, attempt=held.key.attempt, siblings=siblings)
        self.table.handle(self.session, pb.Command(cancel=cancel))

    async def receive(self, held: DecodeHeld) -> Reception:
        """Open its push, and let the engine grant its blocks."""
        assert held.ticket is not None
        _, reception = await self.table.open_push(held.ticket)
        self.table.take_outcome(self.step())
        return reception

    def commit(self, held: DecodeHeld, first_ids: Iterable[int]) -> None:
        tokens = (Token(held.key, sibling, len(PROMPT), token_id) for sibling, token_id in enumerate(first_ids))
        self.table.commit(held, tuple(t._replace(finish=1 if t.token_id == STOP_ID else None) for t in tokens))

    def step(self, sampled: Iterable[int] = ()) -> StepOutcome:
        commands, self.commands[:] = list(self.commands), []
        for command in commands:
            self.scheduler.apply(command)
        plan, ids = self.scheduler.plan(), iter(sampled)
        return self.scheduler.commit(plan, [[Sampled(next(ids, 50))] for _ in plan.slices])

    def check_idle(self) -> None:
        self.table.take_outcome(self.step())
        assert not self.table.held
        assert not self.scheduler.attempts
        assert self.scheduler.blocks.used_blocks == 0


async def test_answers_that_their_first_token_ended_do_not_run_and_the_others_do() -> None:
    bench = Bench()
    held = bench.reserve(siblings=(0, 1, 2))
    await bench.receive(held)
    bench.commit(held, [50, STOP_ID, 51])
    outcome = bench.step()
    assert not outcome.failed
    assert {token.sibling for token in outcome.tokens} == {0, 2}
    bench.table.take_outcome(outcome)
    bench.table.take_outcome(bench.step([STOP_ID, STOP_ID]))
    bench.check_idle()


async def test_an_answer_that_was_cancelled_at_prefill_first_does_not_run() -> None:
    bench = Bench()
    held = bench.reserve()
    await bench.receive(held)
    bench.commit(held, [50])
    outcome = bench.step()
    assert not outcome.failed
    assert {token.sibling for token in outcome.tokens} == {0}
    bench.cancel(held, 1)
    bench.table.take_outcome(bench.step([STOP_ID]))
    bench.check_idle()


async def test_an_answer_cancelled_while_the_others_end_is_on_its_way_leaves_no_blocks() -> None:
    bench = Bench()
    held = bench.reserve()
    await bench.receive(held)
    bench.commit(held, [50, 51])
    on_its_way = bench.step([STOP_ID])
    bench.cancel(held, 1)
    bench.table.take_outcome(bench.step())
    bench.table.take_outcome(on_its_way)
    bench.check_idle()


async def test_a_replaced_reservation_keeps_its_blocks_until_its_push_has_stopped() -> None:
    bench = Bench()
    old = bench.reserve(attempt=1)
    reception = await bench.receive(old)
    new = bench.reserve(attempt=2, replaces=1)
    bench.table.take_outcome(bench.step())
    assert old.key in bench.scheduler.attempts
    bench.table.close_push(old, reception, None)
    bench.table.take_outcome(bench.step())
    assert list(bench.scheduler.attempts) == [new.key]
    bench.cancel(new)
    bench.check_idle()


async def test_an_attempt_that_is_held_cannot_be_reserved_again() -> None:
    """To fail it would say that it is not held, while the first one goes on."""
    bench = Bench()
    held = bench.reserve()
    with pytest.raises(PdserveError, match="is here already") as violation:
        bench.reserve()
    assert violation.value.code is ErrorCode.protocol_violation
    assert bench.session.outbox.pending_bytes == 0
    assert bench.table.held == {held.key: held}


async def test_what_came_of_a_refused_attempt_is_forgotten() -> None:
    bench = Bench()
    bench.reserve()
    for part in prompt_parts(1, 9, PROMPT, 1 << 16):
        bench.table.handle(bench.session, pb.Command(prompt_part=part))
    refused = pb.Attempt(group=1, attempt=9, total_tokens=len(PROMPT), prompt_tokens=len(PROMPT))
    bench.table.handle(bench.session, pb.Command(reserve=pb.Reserve(attempt=refused)))
    assert bench.session.prompts.num_tokens == 0
