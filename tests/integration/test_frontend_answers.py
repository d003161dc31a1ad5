"""Requests that go well: bodies, events, usage, and what workers are told."""

import asyncio
import json
from typing import Any

import pytest

from pdserve.core.events import FinishReason, Role, Stage, StageReport, Token
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.rpc.v1 import session_pb2
from tests.fake_worker import FakeWorker
from tests.frontend_stack import answer_with, frontend_with, ids_of, pair, texts, until

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}
TEXT = "The quick brown fox"


@pytest.mark.asyncio
async def test_a_chat_streams_role_content_finish_usage_and_done() -> None:
    prefill, decode = pair()
    answer_with(prefill, decode, ids_of(TEXT), FinishReason.LENGTH)
    async with frontend_with(prefill, decode) as stack:
        events = await stack.stream("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}})
        chunks = [json.loads(event) for event in events[:-1]]

        assert events[-1] == "[DONE]"
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert texts(events) == TEXT
        finishes = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert finishes == [None] * (len(finishes) - 1) + ["length"]
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == len(ids_of(TEXT))
        assert stack.outcomes() == {"completed": 1}
        stack.assert_idle()


@pytest.mark.asyncio
async def test_streamed_text_equals_buffered_text() -> None:
    prefill, decode = pair()
    answer_with(prefill, decode, ids_of("e\u0301 👩\u200d👩\u200d👧\u200d👦 안녕"))
    async with frontend_with(prefill, decode) as stack:
        streamed = texts(await stack.stream("/v1/chat/completions", CHAT))
        status, body = await stack.post("/v1/chat/completions", CHAT)
        assert status == 200
        assert body["choices"][0]["message"] == {"role": "assistant", "content": streamed, "refusal": None}


@pytest.mark.asyncio
async def test_both_workers_are_told_at_once_with_one_ticket_that_names_their_lives() -> None:
    prefill, decode = pair()
    answer_with(prefill, decode, ids_of(TEXT))
    async with frontend_with(prefill, decode) as stack:
        await stack.stream("/v1/completions", {"prompt": "hello", "seed": 7, "priority": 3, "cache_salt": "mine"})
        run = (await prefill.expect("run")).run
        reserve = (await decode.expect("reserve")).reserve
        assert run.ticket == reserve.ticket
        assert (run.ticket.prefill_epoch, run.ticket.decode_epoch) == (prefill.epoch, decode.epoch)
        assert run.ticket.nonce
        assert run.decode_address == "decode-0:1"
        assert run.attempt == reserve.attempt
        assert run.attempt.seed == 7
        assert run.attempt.priority == 3
        assert run.attempt.cache_scope == "mine"
        assert run.attempt.remaining_ms > 0
        for worker in (prefill, decode):
            assert worker.prompts[run.attempt.group, 1] == ids_of("hello")


@pytest.mark.asyncio
async def test_a_request_for_one_token_reserves_nothing() -> None:
    prefill, decode = pair()
    answer_with(prefill, decode, ids_of(TEXT)[:1])
    async with frontend_with(prefill, decode) as stack:
        status, body = await stack.post("/v1/completions", {"prompt": "hello", "max_tokens": 1})
        assert status == 200
        assert body["choices"][0]["finish_reason"] == "length"
        assert decode.commands == []
        assert not (await prefill.expect("run")).run.HasField("ticket")
        stack.assert_idle()


@pytest.mark.asyncio
async def test_an_answer_that_ends_with_its_first_token_gives_the_reservation_back() -> None:
    prefill, decode = pair()
    prefill.on_run(lambda worker, attempt: worker.tokens(attempt, ids_of(TEXT)[:1], finish=FinishReason.STOP))
    async with frontend_with(prefill, decode) as stack:
        status, body = await stack.post("/v1/completions", {"prompt": "hello"})
        assert status == 200
        assert body["choices"][0]["finish_reason"] == "stop"
        assert (await decode.expect("cancel")).cancel.reason == session_pb2.CANCEL_REASON_FINISHED
        stack.assert_idle()


@pytest.mark.asyncio
async def test_a_stop_string_ends_the_answer_here_and_cancels_it_there() -> None:
    prefill, decode = pair()
    answer_with(prefill, decode, ids_of(TEXT + " jumps over the lazy dog"))
    async with frontend_with(prefill, decode) as stack:
        status, body = await stack.post("/v1/completions", {"prompt": "hello", "max_tokens": 50, "stop": [" brown"]})
        assert status == 200
        assert body["choices"][0]["text"] == "The quick"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == len(ids_of("The quick brown"))
        assert (await decode.expect("cancel")).cancel.reason == session_pb2.CANCEL_REASON_STOP_STRING
        stack.assert_idle()


@pytest.mark.asyncio
async def test_a_stop_string_of_one_sibling_cancels_only_that_one() -> None:
    prefill, decode = pair()

    def answer(worker: FakeWorker, attempt: session_pb2.Attempt) -> None:
        decode.tokens(attempt, ids_of("a STOP b"), sibling=0)
        decode.tokens(attempt, ids_of("fine"), sibling=1, finish=FinishReason.LENGTH)

    prefill.on_run(answer)
    async with frontend_with(prefill, decode) as stack:
        body = {"prompt": "hello", "max_tokens": 50, "n": 2, "stop": "STOP"}
        _, response = await stack.post("/v1/completions", body)
        assert [choice["text"] for choice in response["choices"]] == ["a ", "fine"]
        assert list((await decode.expect("cancel")).cancel.siblings) == [0]
        stack.assert_idle()


@pytest.mark.asyncio
async def test_several_prompts_with_several_answers_each_are_numbered_in_order() -> None:
    prefill, decode = pair()
    answer_with(prefill, decode, ids_of(TEXT))
    async with frontend_with(prefill, decode) as stack:
        _, body = await stack.post("/v1/completions", {"prompt": ["one", "two"], "n": 2, "echo": True, "max_tokens": 9})
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in body["choices"]][:2] == ["one" + TEXT] * 2
        assert body["usage"]["prompt_tokens"] == len(ids_of("one")) + len(ids_of("two"))
        assert body["usage"]["completion_tokens"] == 4 * len(ids_of(TEXT))


@pytest.mark.asyncio
async def test_cached_tokens_and_timings_come_from_stage_reports() -> None:
    prefill, decode = pair()
    async with frontend_with(prefill, decode) as stack:
        options = {"include_usage": True, "include_timings": True}
        request = asyncio.create_task(stack.stream("/v1/chat/completions", CHAT | {"stream_options": options}))
        attempt = (await prefill.expect("run")).run.attempt
        [exchange] = stack.frontend.exchanges
        prefill.stage(attempt, Stage.PREFILL, 0.25, cached_tokens=3)
        await until(lambda: exchange.answer is not None and exchange.answer.cached_tokens == 3)
        decode.tokens(attempt, ids_of(TEXT), finish=FinishReason.LENGTH)
        last = json.loads((await request)[-2])
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        assert last["timings"]["prefill"] == 0.25
        assert 0 < last["timings"]["ttft"] <= last["timings"]["total"]


@pytest.mark.asyncio
async def test_what_comes_with_the_last_token_still_counts() -> None:
    prefill, decode = pair()

    def answer(worker: FakeWorker, attempt: session_pb2.Attempt) -> None:
        key = AttemptKey(GroupId(worker.instance, attempt.group), 1)
        token = Token(key, 0, attempt.total_tokens, ids_of("x")[0], FinishReason.LENGTH)
        worker.step([token], [StageReport(key, Stage.PREFILL, 0.1, cached_tokens=1)])

    prefill.on_run(answer)
    async with frontend_with(prefill, decode) as stack:
        _, body = await stack.post("/v1/completions", {"prompt": "hello", "max_tokens": 1})
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


@pytest.mark.asyncio
async def test_bad_input_is_a_400_and_the_next_request_works() -> None:
    prefill, decode = pair()
    answer_with(prefill, decode, ids_of(TEXT))
    async with frontend_with(prefill, decode) as stack:
        for body, code in (
            (CHAT | {"temperature": 9}, "invalid_request"),
            (CHAT | {"messages": []}, "invalid_request"),
            (CHAT | {"max_tokens": 100_000}, "context_length_exceeded"),
            (CHAT | {"tools": [{}]}, "unsupported"),
        ):
            status, error = await stack.post("/v1/chat/completions", body)
            assert status == 400
            assert set(error["error"]) == {"message", "type", "param", "code"}
            assert error["error"]["code"] == code
            assert error["error"]["param"]
        status, error = await stack.post("/v1/chat/completions", CHAT | {"model": "another"})
        assert (status, error["error"]["code"]) == (404, "model_not_found")
        status, _ = await stack.post("/v1/chat/completions", CHAT)
        assert status == 200
        assert sum(stack.outcomes().values()) == 6
        stack.assert_idle()


@pytest.mark.asyncio
async def test_everything_else_is_in_the_envelope_too_and_carries_a_request_id() -> None:
    prefill, decode = pair()
    async with frontend_with(prefill, decode, max_body_bytes=4096) as stack:
        requests: list[tuple[str, str, dict[str, Any], int]] = [
            ("GET", "/nothing", {}, 404),
            ("GET", "/v1/chat/completions", {}, 405),
            (
                "POST",
                "/v1/chat/completions",
                {"data": b"x" * 5000, "headers": {"Content-Type": "application/json"}},
                413,
            ),
            ("POST", "/v1/chat/completions", {"data": b"{}", "headers": {"Content-Type": "text/plain"}}, 415),
            ("POST", "/v1/chat/completions", {"data": b"{", "headers": {"Content-Type": "application/json"}}, 400),
            ("GET", "/v1/models/other", {}, 404),
        ]
        for method, path, kwargs, status in requests:
            async with stack.http.request(method, stack.url + path, **kwargs) as response:
                assert response.status == status
                assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
                assert response.headers["x-request-id"]
        async with stack.http.get(stack.url + "/v1/models", headers={"x-request-id": "mine.1"}) as response:
            assert response.headers["x-request-id"] == "mine.1"
            assert [model["id"] for model in (await response.json())["data"]] == ["tiny"]
        for page in ("/health", "/ready", "/version", "/metrics"):
            async with stack.http.get(stack.url + page) as response:
                assert response.status == 200


@pytest.mark.asyncio
async def test_logprobs_have_the_shape_of_each_api() -> None:
    prefill, decode = pair()
    answer_with(prefill, decode, ids_of(TEXT))
    async with frontend_with(prefill, decode) as stack:
        _, chat = await stack.post("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2})
        content = chat["choices"][0]["logprobs"]["content"]
        assert [set(entry) for entry in content] == [{"token", "logprob", "bytes", "top_logprobs"}] * len(ids_of(TEXT))
        _, completion = await stack.post("/v1/completions", {"prompt": "x", "logprobs": 2, "max_tokens": 50})
        logprobs = completion["choices"][0]["logprobs"]
        assert "".join(logprobs["tokens"]) == TEXT
        assert logprobs["text_offset"][0] == 0


@pytest.mark.asyncio
async def test_a_colocated_worker_serves_alone() -> None:
    worker = FakeWorker(Role.DECODE, "decode-0", colocated=True)

    def on_reserve(_: FakeWorker, command: session_pb2.Command) -> None:
        if command.HasField("reserve"):
            attempt = command.reserve.attempt
            worker.tokens(attempt, ids_of("a STOP b"), sibling=0)
            worker.tokens(attempt, ids_of("fine"), sibling=1, finish=FinishReason.LENGTH)

    worker.on_command = on_reserve
    async with frontend_with(worker) as stack:
        async with stack.http.get(stack.url + "/ready") as response:
            assert response.status == 200
        body = {"prompt": "hello", "max_tokens": 50, "n": 2, "stop": "STOP"}
        _, response_body = await stack.post("/v1/completions", body)
        assert [choice["text"] for choice in response_body["choices"]] == ["a ", "fine"]
        assert not (await worker.expect("reserve")).reserve.HasField("ticket")
        assert list((await worker.expect("cancel")).cancel.siblings) == [0]
        stack.assert_idle()
