"""Streams read from a server that breaks in every way it can."""

import asyncio
from dataclasses import replace

import pytest

from bench.client import Api, Target, first_model, make_request, open_session, stream
from bench.samples import Outcome, Sample, judge
from tests.unit.bench.fake_server import MODEL, FakeServer


async def answer(target: Target, max_tokens: int = 8) -> Sample:
    async with open_session() as session:
        return judge(await stream(session, target, make_request(target, " one two three", max_tokens)))


@pytest.mark.asyncio
@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_a_whole_stream_has_all_its_tokens(target: Target, fake: FakeServer, api: Api) -> None:
    sample = await answer(replace(target, api=api))
    assert sample.ok
    assert (len(sample.token_times_s), sample.completion_tokens, sample.prompt_tokens) == (8, 8, 3)
    assert fake.bodies[0]["ignore_eos"] is True


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ("no_finish", Outcome.TRUNCATED),
        ("no_done", Outcome.TRUNCATED),
        ("cut", Outcome.TRUNCATED),
        ("reset", Outcome.TRUNCATED),
        ("error", Outcome.ERROR_IN_BAND),
        ("garbage", Outcome.MALFORMED),
        ("503", Outcome.REFUSED),
        ("400", Outcome.HTTP_ERROR),
    ],
)
async def test_a_broken_stream_is_a_failure(target: Target, fake: FakeServer, fault: str, outcome: Outcome) -> None:
    fake.fault = fault
    assert (await answer(target)).outcome is outcome


@pytest.mark.asyncio
async def test_a_stream_that_never_ends_times_out(target: Target, fake: FakeServer) -> None:
    fake.fault = "hang"
    sample = await answer(replace(target, timeout_s=0.2))
    assert sample.outcome is Outcome.TIMEOUT
    assert sample.token_times_s


@pytest.mark.asyncio
async def test_nobody_listening_is_a_connection_failure(target: Target) -> None:
    assert (await answer(replace(target, url="http://127.0.0.1:1"))).outcome is Outcome.CONNECTION


@pytest.mark.asyncio
async def test_further_fields_win(target: Target, fake: FakeServer) -> None:
    await answer(replace(target, fields={"temperature": 0.5, "priority": 1}))
    assert (fake.bodies[0]["temperature"], fake.bodies[0]["priority"]) == (0.5, 1)


@pytest.mark.asyncio
async def test_the_first_model_is_found(url: str) -> None:
    async with open_session() as session:
        assert await first_model(session, url) == MODEL


@pytest.mark.asyncio
async def test_a_stream_that_may_not_be_read_yet_fills_small_buffers_and_waits(
    target: Target, fake: FakeServer
) -> None:
    fake.step_s, fake.buffer_bytes = 0.001, 4096
    may_read = asyncio.Event()
    async with open_session(buffer_bytes=4096) as session:
        request = make_request(target, " one two three", 100)
        unread = asyncio.create_task(stream(session, target, request, may_read=may_read))
        assert (await answer(target, 100)).ok
        assert fake.open_now == 1
        may_read.set()
        sample = judge(await unread)
    assert sample.ok
    assert (len(sample.token_times_s), sample.largest_event_tokens > 1) == (100, True)
