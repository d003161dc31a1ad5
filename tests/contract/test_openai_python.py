"""The official Python SDK does its ordinary work here."""

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from pdserve.core.errors import ErrorCode
from pdserve.core.events import FinishReason
from tests.contract.answering import answering
from tests.fake_worker import MODEL, FakeWorker
from tests.frontend_stack import Stack, frontend_with, ids_of, pair

STOP_ID = 2
TEXT = "The quick brown 😀 fox"
MESSAGES: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
]


def client_of(stack: Stack, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=stack.url + "/v1", api_key="none", max_retries=0, **options)


def synchronous_use(url: str) -> None:
    with OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=50)
        assert chat.choices[0].message.content == TEXT
        chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=50, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).owned_by == "pdserve"


@pytest.mark.asyncio
async def test_the_synchronous_client() -> None:
    async with frontend_with(*answering(ids_of(TEXT))) as stack:
        await asyncio.to_thread(synchronous_use, stack.url)


@pytest.mark.asyncio
async def test_a_chat_with_everything_typed() -> None:
    async with frontend_with(*answering(ids_of(TEXT))) as stack, client_of(stack) as client:
        chat = await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_completion_tokens=50,
            n=2,
            temperature=0.2,
            seed=1,
            logprobs=True,
            top_logprobs=2,
            logit_bias={"5": 1},
            user="somebody",
            extra_body={"top_k": 4, "cache_salt": "mine"},
        )
        assert chat.object == "chat.completion"
        assert chat.id.startswith("chatcmpl-")
        assert [choice.message.content for choice in chat.choices] == [TEXT, TEXT]
        assert [choice.finish_reason for choice in chat.choices] == ["length", "length"]
        assert chat.choices[0].message.refusal is None
        assert chat.choices[0].logprobs is not None
        assert chat.choices[0].logprobs.content is not None
        assert len(chat.choices[0].logprobs.content) == len(ids_of(TEXT))
        assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 2 * len(ids_of(TEXT))
        assert chat.usage.prompt_tokens_details is not None
        assert chat.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.asyncio
async def test_a_stream_with_usage() -> None:
    async with frontend_with(*answering(ids_of(TEXT))) as stack, client_of(stack) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=50, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(ids_of(TEXT))
        assert chunks[-2].choices[0].finish_reason == "length"


@pytest.mark.asyncio
async def test_the_streaming_helper_puts_the_answer_together() -> None:
    async with (
        frontend_with(*answering([*ids_of(TEXT), STOP_ID], FinishReason.STOP)) as stack,
        client_of(stack) as client,
        client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=50) as stream,
    ):
        kinds = {event.type async for event in stream}
        assert {"chunk", "content.delta", "content.done"} <= kinds
        final = await stream.get_final_completion()
        assert final.choices[0].message.content == TEXT


@pytest.mark.asyncio
async def test_completions_of_text_and_of_ids() -> None:
    async with frontend_with(*answering(ids_of(TEXT))) as stack, client_of(stack) as client:
        for prompt in ("hello", ["hello", "there"], [7, 8], [[7], [8, 9]]):
            answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=50, logprobs=1)
            assert answer.object == "text_completion"
            assert [choice.text for choice in answer.choices] == [TEXT] * len(answer.choices)
            assert answer.choices[0].logprobs is not None
            assert answer.choices[0].logprobs.text_offset is not None
        stream = await client.completions.create(model=MODEL, prompt="hello", max_tokens=50, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT


@pytest.mark.asyncio
async def test_raw_responses_and_request_ids() -> None:
    async with frontend_with(*answering(ids_of(TEXT))) as stack, client_of(stack) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=MESSAGES, max_tokens=50, extra_headers={"X-Request-ID": "mine"}
        )
        assert raw.headers["x-request-id"] == "mine"
        assert raw.parse().choices[0].message.content == TEXT
        chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=50)
        assert chat._request_id


@pytest.mark.asyncio
async def test_errors_have_their_types() -> None:
    prefill, decode = pair()
    prefill.on_run(lambda worker, attempt: worker.fail(attempt, ErrorCode.invalid_request))
    async with (
        frontend_with(prefill, decode, max_body_bytes=2000, ttft_timeout_s=5) as stack,
        client_of(stack) as client,
    ):
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as bad:
            await create(model=MODEL, messages=MESSAGES, temperature=9)
        assert (bad.value.code, bad.value.param, bad.value.type) == (
            "invalid_request",
            "temperature",
            "invalid_request_error",
        )
        assert bad.value.request_id
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="another", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("another")
        with pytest.raises(openai.APIStatusError) as large:
            await create(model=MODEL, messages=[{"role": "user", "content": "x" * 5000}])
        assert large.value.status_code == 413
        with pytest.raises(openai.BadRequestError):
            await create(model=MODEL, messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}])


@pytest.mark.asyncio
async def test_no_capacity_and_timeouts_are_server_errors() -> None:
    prefill, decode = pair()
    async with frontend_with(prefill, decode, ttft_timeout_s=0.2) as stack, client_of(stack) as client:
        with pytest.raises(openai.InternalServerError) as late:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert late.value.status_code == 504
    async with (
        frontend_with(FakeWorker(prefill.role, "alone"), wait_s=0.1) as stack,
        client_of(stack) as client,
    ):
        with pytest.raises(openai.InternalServerError) as full:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert full.value.status_code == 503
        assert int(full.value.response.headers["retry-after"]) >= 1


@pytest.mark.asyncio
async def test_a_stream_that_breaks_raises() -> None:
    prefill, decode = pair()
    prefill.on_run(lambda worker, attempt: decode.tokens(attempt, ids_of("The quick")))
    async with frontend_with(prefill, decode, idle_timeout_s=0.3) as stack, client_of(stack) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        text = ""

        async def read() -> None:
            nonlocal text
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""

        with pytest.raises(openai.APIError, match="further token"):
            await read()
        assert text == "The quick"
