"""Text is never produced from a cache that has not been verified (invariant 10): every way in which a push can be wrong."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc.aio
import numpy as np
import pytest

from pdserve.core.decode_state import SendReady
from pdserve.core.errors import ErrorCode
from pdserve.core.events import Token
from pdserve.core.ids import AttemptKey, Ticket
from pdserve.engine.scripted import SCRIPTED_GEOMETRY, scripted_kv
from pdserve.rpc.v1 import kv_pb2, kv_pb2_grpc
from pdserve.wire.convert import ticket_to_proto
from pdserve.wire.frames import encode_frame, frame_spans
from pdserve.wire.server import dial
from pdserve.wire.tokens import tokens_to_columns
from tests.worker_pair import GREEDY, WorkerPair, answer_to, prompt_of, wait_until, worker_pair

pytestmark = pytest.mark.asyncio

PROMPT = prompt_of(80)
# Small frames, so that there are several to cut, swap and repeat.
FRAME_BYTES = SCRIPTED_GEOMETRY.token_layer_bytes * 16


def frames_for(ticket: Ticket) -> list[kv_pb2.PushMessage]:
    """The right frames of PROMPT."""
    geometry = SCRIPTED_GEOMETRY
    per_layer = scripted_kv(np.asarray(PROMPT, np.int32)).reshape(geometry.num_layers, 2, geometry.num_kv_heads, 80, -1)
    messages = []
    for span in frame_spans(geometry, range(80), range(geometry.num_layers), FRAME_BYTES):
        part = per_layer[span.layers.start : span.layers.stop, :, :, span.tokens.start : span.tokens.stop]
        data = np.ascontiguousarray(part).view(np.uint8).reshape(-1)
        messages.append(kv_pb2.PushMessage(frame=encode_frame(span, geometry, ticket.nonce, data)))
    return messages


def commit_for(key: AttemptKey) -> kv_pb2.PushMessage:
    first = Token(key, 0, len(PROMPT), answer_to(PROMPT, GREEDY)[0])
    return kv_pb2.PushMessage(commit=kv_pb2.PushCommit(first_tokens=tokens_to_columns([first])))


@asynccontextmanager
async def open_push(pair: WorkerPair, ticket: Ticket) -> "AsyncIterator[object]":
    """A raw push, with its ticket sent."""
    channel = dial(pair.decode.worker.identity.kv_address)
    call = kv_pb2_grpc.KVServiceStub(channel).Push()
    await call.write(kv_pb2.PushMessage(open=kv_pb2.PushOpen(ticket=ticket_to_proto(ticket))))
    try:
        yield call
    finally:
        call.cancel()
        await channel.close()


async def push(pair: WorkerPair, ticket: Ticket, messages: list[kv_pb2.PushMessage]) -> kv_pb2.PushReply:
    """Push these messages after `ready`; returns the last reply."""
    async with open_push(pair, ticket) as call:
        ready = await call.read()
        if not ready.HasField("ready"):
            return ready
        # A refusal may come before everything is written; whoever then has no read pending never sees it.
        last_reply = asyncio.create_task(call.read())
        try:
            for message in messages:
                await call.write(message)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            assert (await last_reply).HasField("failed")
        return await last_reply


def reserved(pair: WorkerPair) -> tuple[AttemptKey, Ticket]:
    key = pair.new_key()
    ticket = pair.ticket(key)
    pair.reserve(pair.attempt(key, PROMPT, GREEDY), PROMPT, ticket)
    return key, ticket


async def test_the_right_push_is_acknowledged_and_decodes() -> None:
    async with worker_pair() as pair:
        key, ticket = reserved(pair)
        reply = await push(pair, ticket, [*frames_for(ticket), commit_for(key)])
        assert reply.HasField("committed")
        await pair.finish(key)
        assert pair.decode.heard.ids(key) == answer_to(PROMPT, GREEDY)
        await pair.settle()


def corrupt(messages: list[kv_pb2.PushMessage]) -> list[kv_pb2.PushMessage]:
    data = bytearray(messages[1].frame.data)
    data[len(data) // 2] ^= 1
    messages[1].frame.data = bytes(data)
    return messages


def cut(messages: list[kv_pb2.PushMessage]) -> list[kv_pb2.PushMessage]:
    messages[1].frame.data = messages[1].frame.data[:-1]
    return messages


def move(messages: list[kv_pb2.PushMessage]) -> list[kv_pb2.PushMessage]:
    """A right frame that claims to be elsewhere."""
    messages[1].frame.token_start += 16
    return messages


FAULTS: dict[str, Callable[[list[kv_pb2.PushMessage]], list[kv_pb2.PushMessage]]] = {
    "corrupted": corrupt,
    "cut": cut,
    "moved": move,
    "repeated": lambda messages: [messages[0], *messages],
    "reordered": lambda messages: [messages[1], messages[0], *messages[2:]],
    "missing": lambda messages: messages[:-2] + messages[-1:],
    "none": lambda messages: messages[-1:],
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_bad_frames_fail_the_attempt_loudly(fault: str) -> None:
    async with worker_pair() as pair:
        key, ticket = reserved(pair)
        reply = await push(pair, ticket, FAULTS[fault]([*frames_for(ticket), commit_for(key)]))
        assert reply.failed.code == ErrorCode.bad_frame
        await wait_until(lambda: key in pair.decode.heard.failures, "the frontend to hear of it")
        assert pair.decode.heard.failures[key].code is ErrorCode.bad_frame
        assert not pair.decode.heard.ids(key)
        await pair.settle()


async def test_frames_of_another_ticket_are_refused() -> None:
    async with worker_pair() as pair:
        key, ticket = reserved(pair)
        other = ticket._replace(nonce=ticket.nonce + 1)
        reply = await push(pair, ticket, [*frames_for(other), commit_for(key)])
        assert reply.failed.code == ErrorCode.bad_frame
        await pair.settle()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"nonce": 1}, ErrorCode.unknown_ticket),
        ({"prefill_epoch": 1}, ErrorCode.unknown_ticket),
        ({"decode_epoch": 1}, ErrorCode.stale_epoch),
    ],
)
async def test_only_the_live_reservations_own_ticket_opens_it(change: dict[str, int], code: ErrorCode) -> None:
    async with worker_pair() as pair:
        key, ticket = reserved(pair)
        reply = await push(pair, ticket._replace(**change), [])
        assert reply.failed.code == code
        reply = await push(pair, ticket, [*frames_for(ticket), commit_for(key)])
        assert reply.HasField("committed")
        await pair.finish(key)
        await pair.settle()


async def test_a_ticket_of_an_older_attempt_is_refused() -> None:
    async with worker_pair() as pair:
        key, ticket = reserved(pair)
        newer = AttemptKey(key.group, 2)
        pair.reserve(pair.attempt(newer, PROMPT, GREEDY), PROMPT, pair.ticket(newer), replaces=1)
        await wait_until(lambda: newer in pair.decode.worker.held and key not in pair.decode.worker.held, "replacement")
        assert (await push(pair, ticket, [])).failed.code == ErrorCode.unknown_ticket
        pair.cancel(newer, pair.decode)
        await pair.settle()


async def test_a_ticket_works_once() -> None:
    async with worker_pair() as pair:
        key, ticket = reserved(pair)
        async with open_push(pair, ticket) as call:
            assert (await call.read()).HasField("ready")
            assert (await push(pair, ticket, [])).failed.code == ErrorCode.unknown_ticket
            for message in [*frames_for(ticket), commit_for(key)]:
                await call.write(message)
            assert (await call.read()).HasField("committed")
        await pair.finish(key)
        await pair.settle()


async def test_a_push_that_shows_no_ticket_is_no_transfer_and_is_ended() -> None:
    async with worker_pair() as pair:
        channel = dial(pair.decode.worker.identity.kv_address)
        call = kv_pb2_grpc.KVServiceStub(channel).Push()
        await call.wait_for_connection()
        assert pair.decode.worker.transfers == 0
        assert (await call.code()).name == "FAILED_PRECONDITION"
        await channel.close()


async def test_a_push_waits_for_the_reservation_that_it_overtook() -> None:
    async with worker_pair() as pair:
        key = pair.new_key()
        ticket = pair.ticket(key)
        async with open_push(pair, ticket) as call:
            await wait_until(lambda: pair.decode.worker.transfers == 1, "the push to be there")
            pair.reserve(pair.attempt(key, PROMPT, GREEDY), PROMPT, ticket)
            assert (await call.read()).HasField("ready")
            for message in [*frames_for(ticket), commit_for(key)]:
                await call.write(message)
            assert (await call.read()).HasField("committed")
        await pair.finish(key)
        await pair.settle()


async def test_a_push_that_breaks_frees_the_reservation_and_tells_the_frontend() -> None:
    async with worker_pair() as pair:
        key, ticket = reserved(pair)
        async with open_push(pair, ticket) as call:
            assert (await call.read()).HasField("ready")
            await call.write(frames_for(ticket)[0])
        await wait_until(lambda: key in pair.decode.heard.failures, "the frontend to hear of it")
        assert pair.decode.heard.failures[key].code is ErrorCode.transfer_failed
        await pair.settle()


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancel_while_ready_is_being_written_ends_the_push(turns: int) -> None:
    """So many turns of the loop after the grant."""
    async with worker_pair() as pair, asyncio.timeout(20):
        attempts = pair.decode.worker._attempts
        carry_out = attempts._carry_out

        async def cancel(held: object) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            attempts.cancel(held, unless_running=False)

        cancels = []

        def cancel_after_grant(held: object, effect: object) -> None:
            carry_out(held, effect)
            if isinstance(effect, SendReady):
                cancels.append(asyncio.create_task(cancel(held)))

        attempts._carry_out = cancel_after_grant
        _, ticket = reserved(pair)
        async with open_push(pair, ticket) as call:
            replies = []
            while isinstance(reply := await call.read(), kv_pb2.PushReply):
                replies.append(reply)
        await asyncio.gather(*cancels)
        assert replies[-1].failed.code == ErrorCode.cancelled
        await pair.settle()


async def test_a_lost_acknowledgement_is_not_a_failure() -> None:
    async with worker_pair() as pair:
        key, ticket = reserved(pair)
        async with open_push(pair, ticket) as call:
            assert (await call.read()).HasField("ready")
            for message in [*frames_for(ticket), commit_for(key)]:
                await call.write(message)
            # Decode has taken the commit; the push is cut before anybody reads its acknowledgement.
            await wait_until(lambda: bool(pair.decode.heard.ids(key)), "decode to run")
        await pair.finish(key)
        assert pair.decode.heard.ids(key) == answer_to(PROMPT, GREEDY)
        assert key not in pair.decode.heard.failures
        await pair.settle()


async def test_workers_of_another_geometry_are_refused_with_both_named() -> None:
    async with worker_pair() as pair:
        peers = pair.prefill.worker._peers
        geometry = peers._geometry
        peers._geometry = type(geometry)(**{**_fields(geometry), "block_size": 32})
        key = pair.dispatch(PROMPT, GREEDY)
        await wait_until(lambda: key in pair.prefill.heard.failures, "a refusal")
        error = pair.prefill.heard.failures[key]
        assert error.code is ErrorCode.geometry_mismatch
        assert pair.prefill.worker.worker_id in error.message
        assert pair.decode.worker.worker_id in error.message
        assert "block_size: 32 / 16" in error.message
        pair.cancel(key)
        await pair.settle()


async def test_an_unreachable_decode_worker_fails_the_attempt() -> None:
    async with worker_pair() as pair:
        pair.decode.welcome.kv_address = "127.0.0.1:1"
        key = pair.dispatch(PROMPT, GREEDY)
        await wait_until(lambda: key in pair.prefill.heard.failures, "the failure")
        assert pair.prefill.heard.failures[key].code is ErrorCode.worker_lost
        pair.cancel(key)
        await asyncio.sleep(0)
        await pair.settle()


def _fields(geometry: object) -> dict[str, object]:
    return {name: getattr(geometry, name) for name in type(geometry).__dataclass_fields__}
