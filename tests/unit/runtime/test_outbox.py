"""Steps join the message that waits; everything else keeps its place."""

import asyncio

import pytest

from pdserve.core.events import PromptLogprobs, Stage, StageReport, Token, TokenLogprobs
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.rpc.v1 import session_pb2
from pdserve.runtime.outbox import Outbox

KEY = AttemptKey(GroupId(1, 1), 1)
PULSE = session_pb2.Event(pulse=session_pb2.WorkerPulse())


def tokens(*positions: int) -> list[Token]:
    return [Token(KEY, 0, position, 7) for position in positions]


@pytest.mark.asyncio
async def test_steps_join_while_one_is_being_written() -> None:
    outbox = Outbox(1 << 20)
    outbox.put_step(tokens(0))
    first = await outbox.take()
    for position in (1, 2, 3):
        outbox.put_step(tokens(position))
    second = await outbox.take()
    assert list(first.step.tokens.position) == [0]
    assert list(second.step.tokens.position) == [1, 2, 3]


@pytest.mark.asyncio
async def test_stages_travel_with_the_step() -> None:
    outbox = Outbox(1 << 20)
    outbox.put_step(tokens(0))
    outbox.put_step((), [StageReport(KEY, Stage.HANDOFF, 0.5)])
    event = await outbox.take()
    assert len(event.step.tokens.position) == len(event.step.stages) == 1


@pytest.mark.asyncio
async def test_prompt_logprobs_stay_below_the_limit_of_a_message() -> None:
    outbox = Outbox(1 << 12)
    entry = TokenLogprobs(-1e30, (2**31 - 1,) * 20, (-1e30,) * 20)
    for start in range(1, 41, 10):
        outbox.put_step((), (), [PromptLogprobs(KEY, start, (entry,) * 10)])
    events = [await outbox.take() for _ in range(4)]
    assert [part.start for event in events for part in event.step.prompt_logprobs] == [1, 11, 21, 31]
    assert all(event.ByteSize() < 1 << 12 for event in events)


@pytest.mark.asyncio
async def test_another_event_keeps_its_place_between_steps() -> None:
    outbox = Outbox(1 << 20)
    outbox.put_step(tokens(0))
    outbox.put(PULSE)
    outbox.put_step(tokens(1))
    kinds = [(await outbox.take()).WhichOneof("kind") for _ in range(3)]
    assert kinds == ["step", "pulse", "step"]


@pytest.mark.asyncio
async def test_a_message_stays_below_its_limit() -> None:
    limit_bytes = 1 << 14
    outbox = Outbox(limit_bytes)
    best = TokenLogprobs(-1.0, tuple(range(40_000, 40_020)), (-1.0,) * 20)
    for position in range(1000):
        outbox.put_step([Token(KEY, 0, position, 40_000, None, best)])
    positions: list[int] = []
    while len(positions) < 1000:
        event = await outbox.take()
        assert event.ByteSize() <= limit_bytes
        positions.extend(event.step.tokens.position)
    assert positions == list(range(1000))


@pytest.mark.asyncio
async def test_what_has_been_written_no_longer_counts() -> None:
    outbox = Outbox(1 << 20)
    outbox.put_step(tokens(*range(100)))
    outbox.put(PULSE)
    assert outbox.pending_bytes > 0
    for _ in range(2):
        await outbox.take()
    taker = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert outbox.pending_bytes == 0
    assert outbox.oldest_age_s() == 0.0
    taker.cancel()


@pytest.mark.asyncio
async def test_age_is_that_of_the_message_that_nobody_takes() -> None:
    outbox = Outbox(1 << 20)
    assert outbox.oldest_age_s() == 0.0
    outbox.put(PULSE)
    await outbox.take()
    age_s = outbox.oldest_age_s()
    assert outbox.oldest_age_s() > age_s > 0.0
