"""What a client sees when workers fail: nothing, or a clear error."""

import asyncio
import json
from typing import Any

import pytest

from pdserve.core.errors import ErrorCode
from pdserve.core.events import FinishReason, Role
from pdserve.rpc.v1 import session_pb2
from services.frontend import attempts
from services.frontend.orders import Orders
from tests.fake_worker import FakeWorker
from tests.frontend_stack import Stack, answer_with, frontend_with, ids_of, pair, texts, until

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}
TEXT = "The quick brown fox jumps over the lazy dog"
IDS = ids_of(TEXT)


def chat(stack: Stack, **fields: object) -> "asyncio.Task[list[str]]":
    return asyncio.create_task(stack.stream("/v1/chat/completions", CHAT | fields))


def chosen_first(run: session_pb2.Run, decode: FakeWorker, other: FakeWorker) -> tuple[FakeWorker, FakeWorker]:
    """The decode worker that this attempt was given, and the other."""
    return (decode, other) if run.decode_address == f"{decode.worker_id}:1" else (other, decode)


@pytest.mark.asyncio
async def test_a_request_that_cannot_be_sent_fails_alone_and_costs_no_session(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both wait for workers, so it is a worker's pulse that sends them."""
    prefill, decode = pair()
    answer_with(prefill, decode, IDS)
    decode.state = session_pb2.WORKER_STATE_DRAINING

    def write_broken(*args: Any) -> Orders:
        monkeypatch.undo()
        raise ZeroDivisionError("a defect")

    async with frontend_with(prefill, decode, wait_ready=False) as stack:
        requests = [asyncio.create_task(stack.post("/v1/chat/completions", CHAT)) for _ in range(2)]
        await until(lambda: len(stack.frontend.dispatcher.line) == 2)
        monkeypatch.setattr(attempts, "write_orders", write_broken)
        decode.state = session_pb2.WORKER_STATE_READY
        answers = await asyncio.gather(*requests)
        assert sorted(status for status, _ in answers) == [200, 500]
        assert (prefill.sessions_opened, decode.sessions_opened) == (1, 1)
        assert "ZeroDivisionError: a defect" in caplog.text
        stack.assert_idle()


@pytest.mark.asyncio
async def test_a_prefill_worker_lost_before_the_first_token_is_replaced_unseen() -> None:
    prefill, decode = pair()
    other = FakeWorker(Role.PREFILL, "prefill-1")
    async with frontend_with(prefill, other, decode) as stack:
        request = chat(stack)
        await decode.expect("reserve")
        await until(lambda: bool(prefill.held or other.held))
        first, second = (prefill, other) if prefill.held else (other, prefill)
        answer_with(second, decode, IDS)
        await first.stop()
        # Decode is asked whether it runs, and says that it does not.
        cancel = (await decode.expect("cancel")).cancel
        assert cancel.unless_running
        decode.fail((await decode.expect("reserve")).reserve.attempt, ErrorCode.cancelled)

        assert texts(await request) == TEXT
        attempts = [(await decode.expect("reserve", count)).reserve.attempt.attempt for count in (1, 2)]
        assert attempts == [1, 2]
        assert stack.outcomes() == {"completed": 1}
        stack.assert_idle()


@pytest.mark.asyncio
async def test_a_decode_worker_that_only_gives_up_what_prefill_lost_is_not_avoided() -> None:
    prefill, decode = pair()
    other = FakeWorker(Role.DECODE, "decode-1")
    decode.total_blocks = 2 * other.total_blocks  # it is the better choice, each time
    async with frontend_with(prefill, decode, other, retry_backoff_s=0.001) as stack:
        request = chat(stack)
        attempt = (await decode.expect("reserve")).reserve.attempt
        await prefill.expect("run")
        prefill.fail(attempt, ErrorCode.engine_failed)
        await decode.expect("cancel")
        answer_with(prefill, decode, IDS)
        # What was dispatched before the last pulses weighs nothing any more.
        candidates = [worker.candidate for worker in stack.frontend.membership]
        await until(lambda: not any(found.since.sequences for find in candidates if (found := find()) is not None))
        decode.fail(attempt, ErrorCode.cancelled)
        await decode.expect("reserve", 2)
        assert texts(await request) == TEXT
        assert not other.taken("reserve")
        stack.assert_idle()


@pytest.mark.asyncio
async def test_a_decode_worker_that_runs_overrules_the_loss_of_prefill() -> None:
    prefill, decode = pair()
    async with frontend_with(prefill, decode) as stack:
        request = chat(stack)
        attempt = (await decode.expect("reserve")).reserve.attempt
        await prefill.expect("run")
        await prefill.stop()
        await decode.expect("cancel")
        decode.tokens(attempt, IDS, finish=FinishReason.LENGTH)
        assert texts(await request) == TEXT
        assert len(decode.taken("reserve")) == 1


@pytest.mark.asyncio
async def test_a_decode_worker_lost_in_mid_stream_is_replaced_and_no_text_repeats() -> None:
    prefill, decode = pair()
    other = FakeWorker(Role.DECODE, "decode-1")
    async with frontend_with(prefill, decode, other) as stack:
        request = chat(stack)
        run = (await prefill.expect("run")).run
        prefill.tokens(run.attempt, IDS[:1])
        first, second = chosen_first(run, decode, other)
        first.tokens(run.attempt, IDS[:5])
        await until(lambda: stack.accepted() == 5)
        answer_with(prefill, second, IDS)
        await first.stop()

        events = await request
        assert texts(events) == TEXT
        replay = (await second.expect("reserve")).reserve.attempt
        assert replay.attempt == 2
        assert replay.total_tokens - replay.prompt_tokens == 5
        assert replay.sampling.max_tokens == 50
        assert second.prompts[replay.group, 2][-5:] == IDS[:5]
        assert [choice["finish_reason"] for event in events[:-1] for choice in json.loads(event)["choices"]][
            -1
        ] == "length"
        stack.assert_idle()


@pytest.mark.asyncio
async def test_siblings_that_have_begun_are_replayed_one_by_one() -> None:
    prefill, decode = pair()
    other = FakeWorker(Role.DECODE, "decode-1")
    async with frontend_with(prefill, decode, other) as stack:
        request = asyncio.create_task(stack.post("/v1/completions", {"prompt": "hello", "n": 3, "max_tokens": 50}))
        run = (await prefill.expect("run")).run
        assert list(run.attempt.siblings) == [0, 1, 2]
        first, second = chosen_first(run, decode, other)
        first.tokens(run.attempt, IDS, sibling=1, finish=FinishReason.LENGTH)
        first.tokens(run.attempt, IDS[:2], sibling=2)
        await until(lambda: stack.accepted() == len(IDS) + 2)
        answer_with(prefill, second, IDS)
        await first.stop()

        _, body = await request
        assert [choice["text"] for choice in body["choices"]] == [TEXT] * 3
        replays = [(await second.expect("reserve", count)).reserve.attempt for count in (1, 2)]
        assert {tuple(replay.siblings): replay.total_tokens - replay.prompt_tokens for replay in replays} == {
            (0,): 0,
            (2,): 2,
        }
        assert {replay.attempt for replay in replays} == {2, 3}
        stack.assert_idle()


@pytest.mark.asyncio
async def test_attempts_are_bounded_and_the_error_has_its_own_status() -> None:
    prefill, decode = pair()
    prefill.on_run(lambda worker, attempt: decode.fail(attempt, ErrorCode.transfer_failed))
    async with frontend_with(prefill, decode, max_attempts=2, retry_backoff_s=0.001) as stack:
        status, body = await stack.post("/v1/chat/completions", CHAT)
        assert (status, body["error"]["code"]) == (503, "transfer_failed")
        assert len(prefill.taken("run")) == 2
        await until(lambda: not prefill.held)
        stack.assert_idle()


@pytest.mark.asyncio
async def test_a_failure_after_the_first_byte_is_told_in_band_and_the_stream_has_no_done() -> None:
    prefill, decode = pair()
    async with frontend_with(prefill, decode, max_attempts=1) as stack:
        request = chat(stack)
        attempt = (await prefill.expect("run")).run.attempt
        prefill.tokens(attempt, IDS[:1])
        decode.tokens(attempt, IDS[:4])
        await until(lambda: stack.accepted() == 4)
        decode.fail(attempt, ErrorCode.engine_failed)
        events = await request
        assert json.loads(events[-1])["error"]["code"] == "engine_failed"
        assert "[DONE]" not in events
        assert stack.outcomes() == {"engine_failed": 1}
        await until(lambda: not prefill.held)
        stack.assert_idle()


@pytest.mark.asyncio
async def test_what_is_the_clients_fault_is_not_tried_again() -> None:
    prefill, decode = pair()
    prefill.on_run(lambda worker, attempt: worker.fail(attempt, ErrorCode.context_length_exceeded))

    def on_cancel(worker: FakeWorker, command: session_pb2.Command) -> None:
        if command.HasField("cancel"):
            worker.fail(command.cancel, ErrorCode.cancelled)  # type: ignore[arg-type]

    decode.on_command = on_cancel
    async with frontend_with(prefill, decode) as stack:
        status, body = await stack.post("/v1/chat/completions", CHAT)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert len(prefill.taken("run")) == 1
        stack.assert_idle()


@pytest.mark.asyncio
async def test_refused_by_one_the_request_goes_to_the_second_at_once() -> None:
    prefill, decode = pair()
    other = FakeWorker(Role.DECODE, "decode-1")
    async with frontend_with(prefill, decode, other, max_attempts=1) as stack:
        request = chat(stack)
        run = (await prefill.expect("run")).run
        first, second = chosen_first(run, decode, other)
        answer_with(prefill, second, IDS)
        first.fail(run.attempt, ErrorCode.queue_full)
        assert texts(await request) == TEXT
        assert len(first.taken("reserve")) == 1


@pytest.mark.asyncio
async def test_refused_by_all_it_waits_for_their_next_pulses() -> None:
    prefill, decode = pair()
    async with frontend_with(prefill, decode, max_attempts=1) as stack:
        request = chat(stack)
        attempt = (await prefill.expect("run")).run.attempt
        decode.pulses = False
        decode.fail(attempt, ErrorCode.queue_full)
        await until(lambda: len(stack.frontend.dispatcher.line) == 1)
        answer_with(prefill, decode, IDS)
        decode.pulses = True
        assert texts(await request) == TEXT
        stack.assert_idle()


@pytest.mark.asyncio
async def test_without_workers_a_request_waits_and_goes_when_they_come() -> None:
    prefill, decode = pair()
    answer_with(prefill, decode, IDS)
    decode.state = session_pb2.WORKER_STATE_DRAINING
    async with frontend_with(prefill, decode, wait_ready=False) as stack:
        request = chat(stack)
        await until(lambda: len(stack.frontend.dispatcher.line) == 1)
        assert not prefill.held
        decode.state = session_pb2.WORKER_STATE_READY
        assert texts(await request) == TEXT
        stack.assert_idle()


@pytest.mark.asyncio
async def test_a_wait_in_vain_and_a_full_line_are_503_that_say_when_to_come_back() -> None:
    async with frontend_with(max_waiting=1, wait_s=0.3, workers=("127.0.0.1:9",)) as stack:
        first = asyncio.create_task(stack.http.post(stack.url + "/v1/chat/completions", json=CHAT | {"model": "tiny"}))
        await until(lambda: len(stack.frontend.dispatcher.line) == 1)
        async with stack.http.post(stack.url + "/v1/chat/completions", json=CHAT | {"model": "tiny"}) as second:
            assert second.status == 503
            assert (await second.json())["error"]["code"] == "queue_full"
            assert int(second.headers["Retry-After"]) >= 1
        async with await first as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "no_capacity"
            assert int(response.headers["Retry-After"]) >= 1
        stack.assert_idle()


@pytest.mark.asyncio
async def test_a_request_may_have_more_prompts_than_the_line_has_places() -> None:
    body = {"model": "tiny", "prompt": ["one", "two", "three"], "max_tokens": 2}
    async with frontend_with(max_waiting=1, wait_s=0.3, workers=("127.0.0.1:9",)) as stack:
        first = asyncio.create_task(stack.http.post(stack.url + "/v1/completions", json=body))
        await until(lambda: len(stack.frontend.dispatcher.line) == 3)
        async with stack.http.post(stack.url + "/v1/completions", json=body) as second:
            assert (await second.json())["error"]["code"] == "queue_full"
        async with await first as response:
            assert (await response.json())["error"]["code"] == "no_capacity"
        stack.assert_idle()


@pytest.mark.asyncio
async def test_a_prompt_waits_for_the_room_that_others_of_its_request_hold_while_their_answers_grow() -> None:
    prefill, decode = pair()
    async with frontend_with(prefill, decode, wait_s=0.3) as stack:
        body = {"prompt": ["one", "two"], "max_tokens": 50}
        request = asyncio.create_task(stack.post("/v1/completions", body))
        first, second = [(await prefill.expect("run", count)).run.attempt for count in (1, 2)]

        def refuse(worker: FakeWorker, command: session_pb2.Command) -> None:
            if command.HasField("reserve"):
                worker.fail(command.reserve.attempt, ErrorCode.queue_full)

        decode.on_command = refuse
        decode.fail(second, ErrorCode.queue_full)
        for index, token_id in enumerate(IDS[:-1]):
            decode.tokens(first, [token_id], start=index)
            await asyncio.sleep(0.9 / len(IDS))
        assert not request.done()
        decode.on_command = lambda *_: None
        answer_with(prefill, decode, IDS)
        decode.tokens(first, IDS[-1:], start=len(IDS) - 1, finish=FinishReason.LENGTH)
        status, answer = await request
        assert status == 200, answer
        assert [choice["text"] for choice in answer["choices"]] == [TEXT, TEXT]
        stack.assert_idle()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("setting", "code", "begun"),
    [
        ("ttft_timeout_s", "ttft_timeout", 0),
        ("idle_timeout_s", "idle_timeout", 1),
        ("total_timeout_s", "total_timeout", 1),
    ],
)
async def test_each_deadline_has_its_own_outcome_and_frees_both_workers(setting: str, code: str, begun: int) -> None:
    prefill, decode = pair()
    async with frontend_with(prefill, decode, **{setting: 0.3}) as stack:
        request = asyncio.create_task(stack.post("/v1/chat/completions", CHAT))
        attempt = (await prefill.expect("run")).run.attempt
        decode.tokens(attempt, IDS[:begun])
        status, body = await request
        assert (status, body["error"]["code"]) == (504, code)
        assert (await decode.expect("cancel")).cancel.reason == session_pb2.CANCEL_REASON_DEADLINE
        await until(lambda: not prefill.held and not decode.held)
        assert stack.outcomes() == {code: 1}
        stack.assert_idle()


@pytest.mark.asyncio
async def test_a_silent_worker_counts_as_lost() -> None:
    prefill, decode = pair()
    other = FakeWorker(Role.DECODE, "decode-1")
    async with frontend_with(prefill, decode, other) as stack:
        request = chat(stack)
        run = (await prefill.expect("run")).run
        first, second = chosen_first(run, decode, other)
        answer_with(prefill, second, IDS)
        first.pulses = False
        assert texts(await request) == TEXT


@pytest.mark.asyncio
async def test_messages_of_an_older_attempt_change_nothing() -> None:
    prefill, decode = pair()
    async with frontend_with(prefill, decode, retry_backoff_s=0.001) as stack:
        request = chat(stack)
        old = (await prefill.expect("run")).run.attempt
        decode.tokens(old, IDS[:3])
        decode.fail(old, ErrorCode.engine_failed)
        new = (await prefill.expect("run", 2)).run.attempt
        decode.tokens(old, ids_of("nonsense"), start=3)
        decode.tokens(new, IDS[3:], finish=FinishReason.LENGTH)
        decode.fail(old, ErrorCode.engine_failed)
        assert texts(await request) == TEXT
        stack.assert_idle()
