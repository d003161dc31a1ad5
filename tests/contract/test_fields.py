"""Fields beyond the plainest request, each seen to do what it says."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.core.events import FinishReason
from pdserve.rpc.v1 import session_pb2
from tests.contract.answering import answering
from tests.contract.documented import assert_envelope
from tests.fake_worker import FakeWorker
from tests.frontend_stack import CONTEXT_TOKENS, Stack, answer_with, frontend_with, ids_of, pair, until
from tests.http_cluster import http_cluster

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
COMPLETION: dict[str, Any] = {"prompt": "hello there", "max_tokens": 20}
TEXT = "The quick brown fox"
STOP_ID = 2


async def told(stack: Stack, prefill: FakeWorker, path: str, body: dict[str, Any]) -> session_pb2.Attempt:
    """What the prefill worker was told of a request that succeeded."""
    before = len(prefill.taken("run"))
    status, answer = await stack.post(path, body)
    assert status == 200, answer
    attempt: session_pb2.Attempt = (await prefill.expect("run", before + 1)).run.attempt
    return attempt


@pytest.mark.asyncio
async def test_sampling_fields_reach_the_workers() -> None:
    prefill, decode = answering(ids_of(TEXT))
    async with frontend_with(prefill, decode) as stack:
        fields = {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.3,
            "frequency_penalty": -0.4,
            "seed": -1,
            "min_tokens": 3,
            "logit_bias": {"5": 2.5},
            "stop_token_ids": [9],
            "priority": -4,
            "cache_salt": "mine",
            "user": "somebody",
            "an_unknown_field": {"is": ["accepted"]},
        }
        attempt = await told(stack, prefill, "/v1/chat/completions", CHAT | fields)
        sampling = attempt.sampling
        assert sampling.temperature == 0.5
        assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.9, 7, 0.1)
        assert sampling.repetition_penalty == 1.2
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.3, -0.4)
        assert (sampling.min_tokens, sampling.max_tokens) == (3, 20)
        assert (list(sampling.bias_token_id), list(sampling.bias)) == ([5], [2.5])
        assert set(sampling.stop_ids) == {9, STOP_ID}
        assert (attempt.priority, attempt.cache_scope) == (-4, "mine")
        assert attempt.seed == 2**64 - 1


@pytest.mark.asyncio
async def test_defaults() -> None:
    prefill, decode = answering(ids_of(TEXT))
    async with frontend_with(prefill, decode) as stack:
        attempt = await told(stack, prefill, "/v1/completions", {"prompt": "hello"})
        assert attempt.sampling.max_tokens == 16
        assert (attempt.sampling.temperature, attempt.sampling.top_p) == (1.0, 1.0)
        assert not attempt.sampling.HasField("top_logprobs")
        attempt = await told(stack, prefill, "/v1/chat/completions", {"messages": CHAT["messages"]})
        assert attempt.sampling.max_tokens == CONTEXT_TOKENS - attempt.prompt_tokens


@pytest.mark.asyncio
async def test_max_completion_tokens_wins() -> None:
    prefill, decode = answering(ids_of(TEXT))
    async with frontend_with(prefill, decode) as stack:
        attempt = await told(stack, prefill, "/v1/chat/completions", CHAT | {"max_completion_tokens": 3})
        assert attempt.sampling.max_tokens == 3


@pytest.mark.asyncio
async def test_ignore_eos_leaves_only_the_requests_own_stop_ids() -> None:
    prefill, decode = answering(ids_of(TEXT))
    async with frontend_with(prefill, decode) as stack:
        attempt = await told(stack, prefill, "/v1/completions", COMPLETION | {"ignore_eos": True})
        assert list(attempt.sampling.stop_ids) == []
        attempt = await told(
            stack, prefill, "/v1/completions", COMPLETION | {"ignore_eos": True, "stop_token_ids": [9]}
        )
        assert list(attempt.sampling.stop_ids) == [9]


@pytest.mark.asyncio
@pytest.mark.parametrize(("keep", "kept"), [(1, slice(-1, None)), (3, slice(-3, None)), (-1, slice(None))])
async def test_truncate_prompt_tokens_keeps_the_last_ones(keep: int, kept: slice) -> None:
    prefill, decode = answering(ids_of(TEXT))
    async with frontend_with(prefill, decode) as stack:
        attempt = await told(stack, prefill, "/v1/completions", COMPLETION | {"truncate_prompt_tokens": keep})
        assert prefill.prompts[attempt.group, attempt.attempt] == ids_of(COMPLETION["prompt"])[kept]


@pytest.mark.asyncio
async def test_truncate_prompt_tokens_of_minus_one_keeps_what_fits() -> None:
    prefill, decode = answering(ids_of(TEXT))
    async with frontend_with(prefill, decode) as stack:
        body = {"prompt": [7] * 2000, "max_tokens": 20, "truncate_prompt_tokens": -1}
        attempt = await told(stack, prefill, "/v1/completions", body)
        assert attempt.prompt_tokens == CONTEXT_TOKENS - 20


@pytest.mark.asyncio
async def test_token_ids_come_when_asked_for() -> None:
    ids, prompt_ids = ids_of(TEXT), ids_of(COMPLETION["prompt"])
    async with frontend_with(*answering(ids)) as stack:
        fields = {"return_token_ids": True, "n": 2}
        _, body = await stack.post("/v1/completions", COMPLETION | fields)
        for choice in body["choices"]:
            assert (choice["token_ids"], choice["prompt_token_ids"]) == (ids, prompt_ids)
        _, body = await stack.post("/v1/chat/completions", CHAT | fields)
        assert [choice["token_ids"] for choice in body["choices"]] == [ids, ids]
        assert body["prompt_token_ids"]
        for path, request in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
            events = [json.loads(event) for event in (await stack.stream(path, request | fields))[:-1]]
            for index in (0, 1):
                entries = [choice for event in events for choice in event["choices"] if choice["index"] == index]
                assert [token_id for entry in entries for token_id in entry.get("token_ids", ())] == ids
            assert any("prompt_token_ids" in part for event in events for part in (event, *event["choices"]))
        _, body = await stack.post("/v1/completions", COMPLETION)
        assert "token_ids" not in body["choices"][0]


@pytest.mark.asyncio
async def test_a_stop_token_has_no_text_unless_stops_or_special_tokens_are_kept() -> None:
    async with frontend_with(*answering([*ids_of("hi"), STOP_ID], FinishReason.STOP)) as stack:
        for fields, text in (
            ({}, "hi"),
            ({"skip_special_tokens": False}, "hi"),
            ({"include_stop_str_in_output": True}, "hi"),
            ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "hi<|im_end|>"),
        ):
            _, body = await stack.post("/v1/completions", COMPLETION | fields)
            assert body["choices"][0]["text"] == text
            assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.asyncio
async def test_the_stop_string_is_kept_when_asked_for_and_not_looked_for_in_the_first_tokens() -> None:
    async with frontend_with(*answering(ids_of("a b a b a b"))) as stack:
        for fields, text in (
            ({}, "a "),
            ({"include_stop_str_in_output": True}, "a b"),
            ({"min_tokens": len(ids_of("a b a"))}, "a b a "),
        ):
            _, body = await stack.post("/v1/completions", COMPLETION | {"stop": "b"} | fields)
            assert body["choices"][0]["text"] == text


@pytest.mark.asyncio
async def test_usage_in_every_event_when_asked_for() -> None:
    async with frontend_with(*answering(ids_of(TEXT))) as stack:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = [
            json.loads(event)
            for event in (await stack.stream("/v1/completions", COMPLETION | {"stream_options": options}))[:-1]
        ]
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-1] == len(ids_of(TEXT))
        assert [event["choices"] == [] for event in events] == [False] * (len(events) - 1) + [True]


@pytest.mark.asyncio
async def test_n_is_bounded_with_the_number_of_prompts() -> None:
    prefill, decode = answering(ids_of("x"))
    async with frontend_with(prefill, decode, max_choices=130) as stack:
        status, body = await stack.post("/v1/completions", COMPLETION | {"n": 128, "max_tokens": 1})
        assert (status, len(body["choices"])) == (200, 128)
        assert [choice["index"] for choice in body["choices"]] == list(range(128))
        status, body = await stack.post("/v1/completions", COMPLETION | {"prompt": ["a", "b"], "n": 66})
        assert_envelope(status, body, "invalid_request", "n")
        assert "132" in body["error"]["message"]
        assert "130" in body["error"]["message"]
        status, body = await stack.post("/v1/completions", COMPLETION | {"n": 129})
        assert_envelope(status, body, "invalid_request", "n")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "fields", "code", "param"),
    [
        ("/v1/completions", {"best_of": 2}, "unsupported", "best_of"),
        ("/v1/completions", {"suffix": "x"}, "unsupported", "suffix"),
        ("/v1/completions", {"stream_options": {"include_usage": True}}, "invalid_request", "stream_options"),
        ("/v1/completions", {"stop": ["a", "b", "c", "d", "e"]}, "invalid_request", "stop"),
        ("/v1/completions", {"stop": ""}, "invalid_request", "stop"),
        ("/v1/completions", {"prompt": []}, "invalid_request", "prompt"),
        ("/v1/completions", {"prompt": ""}, "invalid_request", "prompt"),
        ("/v1/completions", {"prompt": [10**6]}, "invalid_request", "prompt"),
        ("/v1/completions", {"logit_bias": {"1000000": 1}}, "invalid_request", "logit_bias"),
        ("/v1/completions", {"min_tokens": 21}, "invalid_request", "min_tokens"),
        ("/v1/completions", {"max_tokens": 10_000}, "context_length_exceeded", "max_tokens"),
        ("/v1/completions", {"truncate_prompt_tokens": 0}, "invalid_request", "truncate_prompt_tokens"),
        ("/v1/completions", {"cache_salt": ""}, "invalid_request", "cache_salt"),
        ("/v1/chat/completions", {"tools": [{"type": "function"}]}, "unsupported", "tools"),
        ("/v1/chat/completions", {"tool_choice": "auto"}, "unsupported", "tool_choice"),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, "unsupported", "response_format"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "unsupported",
            "messages[0].content[0].type",
        ),
        (
            "/v1/chat/completions",
            {"add_generation_prompt": True, "continue_final_message": True},
            "invalid_request",
            "continue_final_message",
        ),
    ],
)
async def test_what_cannot_be_done_is_a_400_that_names_its_field(
    path: str, fields: dict[str, Any], code: str, param: str
) -> None:
    async with frontend_with(*answering(ids_of(TEXT))) as stack:
        base = CHAT if path.endswith("chat/completions") else COMPLETION
        status, body = await stack.post(path, base | fields)
        assert status == 400
        assert_envelope(status, body, code, param)
        status, _ = await stack.post(path, base)
        assert status == 200


@pytest.mark.asyncio
async def test_what_only_repeats_the_default_is_accepted() -> None:
    async with frontend_with(*answering(ids_of(TEXT))) as stack:
        for path, fields in (
            ("/v1/completions", {"best_of": 2, "n": 2}),
            ("/v1/completions", {"best_of": 1, "suffix": None, "user": "u", "stop": None, "logit_bias": None}),
            ("/v1/chat/completions", {"response_format": {"type": "text"}, "tools": None}),
            ("/v1/chat/completions", {"n": 3, "temperature": 0, "top_k": -1}),
        ):
            base = CHAT if path.endswith("chat/completions") else COMPLETION
            status, body = await stack.post(path, base | fields)
            assert status == 200, body


@pytest.mark.asyncio
async def test_who_is_more_urgent_goes_first_when_a_worker_comes() -> None:
    prefill, decode = pair()
    answer_with(prefill, decode, ids_of("x"))
    prefill.state = session_pb2.WORKER_STATE_DRAINING
    async with frontend_with(prefill, decode, wait_ready=False) as stack:
        line = stack.frontend.dispatcher.line
        requests = []
        for place, priority in enumerate((5, 0, 5, -5)):
            body = COMPLETION | {"prompt": [10 + place], "priority": priority}
            requests.append(asyncio.create_task(stack.post("/v1/completions", body)))
            await until(lambda place=place: len(line) == place + 1)
        prefill.state = session_pb2.WORKER_STATE_READY
        assert [status for status, _ in await asyncio.gather(*requests)] == [200] * 4
        runs = [command.run.attempt for command in prefill.taken("run")]
        assert [prefill.prompts[run.group, run.attempt] for run in runs] == [[13], [11], [10], [12]]


@pytest.mark.asyncio
async def test_two_cache_salts_share_nothing(tmp_path: Path) -> None:
    async with http_cluster(tmp_path) as cluster:

        async def cached_tokens(**fields: Any) -> int:
            status, body, _ = await cluster.post({"prompt": list(range(5, 85)), "max_tokens": 1} | fields)
            assert status == 200, body
            count: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            return count

        assert await cached_tokens(cache_salt="one") == 0
        assert await cached_tokens(cache_salt="one") == 64
        assert await cached_tokens(cache_salt="two") == 0
        assert await cached_tokens() == 0
        assert await cached_tokens() == 64
