"""echo: the prompt stands before its answer, with the log-probabilities of its tokens where they are asked for."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.core.errors import ErrorCode
from pdserve.core.events import FinishReason, PromptLogprobs, Role, TokenLogprobs
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.rpc.v1 import session_pb2
from pdserve.wire.prompt_logprobs import prompt_logprobs_to_proto
from services.frontend.responses import LOGPROB_FLOOR
from tests.contract.answering import answering
from tests.contract.documented import documented
from tests.contract.test_logprobs import completion_logprobs, name_of
from tests.fake_worker import FakeWorker
from tests.frontend_stack import TOKENIZER, frontend_with, ids_of, pair, until
from tests.http_cluster import http_cluster

PROMPT = "The Bär 😀 fox"
PROMPT_IDS = ids_of(PROMPT)
TEXT = " says: 안녕"
IDS = ids_of(TEXT)
ECHO: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 50, "echo": True}


def score_of(position: int) -> TokenLogprobs:
    """What the scripted worker says of the prompt's token at a position."""
    worst = float("-inf") if position == 2 else -2.0
    return TokenLogprobs(-0.125 * position, (position, position + 1), (-0.0625, worst))


def scored_part(worker: FakeWorker, attempt: session_pb2.Attempt, positions: range) -> None:
    """Tell these positions' log-probabilities."""
    key = AttemptKey(GroupId(worker.instance, attempt.group), attempt.attempt)
    part = PromptLogprobs(key, positions.start, tuple(map(score_of, positions)))
    step = session_pb2.Step(prompt_logprobs=[prompt_logprobs_to_proto(part)])
    worker.send(session_pb2.Event(step=step))


def in_two_parts(worker: FakeWorker, attempt: session_pb2.Attempt) -> None:
    assert attempt.sampling.prompt_logprobs == 2
    middle = attempt.prompt_tokens // 2
    scored_part(worker, attempt, range(1, middle))
    scored_part(worker, attempt, range(middle, attempt.prompt_tokens))


@pytest.mark.asyncio
async def test_the_prompt_stands_before_each_of_its_answers() -> None:
    async with frontend_with(*answering(IDS)) as stack:
        for prompt in (PROMPT, PROMPT_IDS):
            _, body = await stack.post("/v1/completions", ECHO | {"prompt": prompt, "n": 2})
            assert [choice["text"] for choice in body["choices"]] == [PROMPT + TEXT] * 2
            assert body["usage"]["completion_tokens"] == 2 * len(IDS)
            events = [
                json.loads(event) for event in (await stack.stream("/v1/completions", ECHO | {"prompt": prompt}))[:-1]
            ]
            assert events[0]["choices"][0]["text"] == PROMPT
            assert "".join(choice["text"] for event in events for choice in event["choices"]) == PROMPT + TEXT


@pytest.mark.asyncio
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT_IDS], ids=["text", "ids"])
async def test_prompt_and_answer_share_the_columns(prompt: Any) -> None:
    async with frontend_with(*answering(IDS, score=in_two_parts)) as stack:
        body = ECHO | {"prompt": prompt, "logprobs": 2}
        buffered, streamed = await completion_logprobs(stack, body)
        assert streamed == buffered
        assert buffered["tokens"] == [name_of(token_id) for token_id in PROMPT_IDS + IDS]
        assert buffered["token_logprobs"][0] is None
        assert buffered["top_logprobs"][0] is None
        count = len(PROMPT_IDS)
        assert buffered["token_logprobs"][1:count] == [score_of(i).logprob for i in range(1, count)]
        assert min(buffered["top_logprobs"][2].values()) == LOGPROB_FLOOR
        offsets = buffered["text_offset"]
        assert offsets == sorted(offsets)
        text = PROMPT + TEXT
        for name, offset in zip(buffered["tokens"], offsets, strict=True):
            if not name.startswith("bytes:"):
                assert text[offset:].startswith(name)
        judge = await documented(stack)
        judge.check_body("POST", "/v1/completions", *await stack.post("/v1/completions", body))
        judge.check_events("/v1/completions", await stack.stream("/v1/completions", body))
        stack.assert_idle()


@pytest.mark.asyncio
async def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    async with frontend_with(*answering(IDS)) as stack:
        _, body = await stack.post("/v1/completions", ECHO | {"prompt": [PROMPT_IDS[0]], "logprobs": 2})
        assert body["choices"][0]["logprobs"]["token_logprobs"][0] is None
        assert len(body["choices"][0]["logprobs"]["tokens"]) == 1 + len(IDS)


@pytest.mark.asyncio
async def test_a_prefill_worker_lost_before_its_last_word_is_replaced_though_decode_runs() -> None:
    lost, decode = pair()
    spare = FakeWorker(Role.PREFILL, "prefill-1")

    def half(worker: FakeWorker, attempt: session_pb2.Attempt) -> None:
        if attempt.attempt == 1:
            scored_part(worker, attempt, range(1, 3))
            decode.tokens(attempt, IDS)
            worker.fail(attempt, ErrorCode.engine_failed)
            return
        decode.tokens(attempt, IDS, finish=FinishReason.LENGTH)
        scored_part(worker, attempt, range(1, attempt.prompt_tokens))

    lost.on_run(half)
    spare.on_run(half)
    async with frontend_with(lost, spare, decode) as stack:
        status, body = await stack.post("/v1/completions", ECHO | {"logprobs": 2})
        assert status == 200, body
        [choice] = body["choices"]
        assert choice["text"] == PROMPT + TEXT
        count = len(PROMPT_IDS)
        assert choice["logprobs"]["token_logprobs"][1:count] == [score_of(i).logprob for i in range(1, count)]
        assert (await decode.expect("cancel")).cancel.attempt == 1
        await until(lambda: not decode.held or len(decode.held) == 1)
        stack.assert_idle()


@pytest.mark.asyncio
async def test_a_gap_in_a_prompts_logprobs_is_a_broken_protocol() -> None:
    prefill, decode = pair()
    prefill.on_run(lambda worker, attempt: scored_part(worker, attempt, range(2, 4)))
    async with frontend_with(prefill, decode, max_attempts=1) as stack:
        status, body = await stack.post("/v1/completions", ECHO | {"logprobs": 2})
        assert (status, body["error"]["code"]) == (500, "protocol_violation")
        stack.assert_idle()


@pytest.mark.asyncio
async def test_truncated_prompts_keep_the_offsets_of_what_is_left() -> None:
    async with frontend_with(*answering(IDS)) as stack:
        body = ECHO | {"truncate_prompt_tokens": 1, "logprobs": 2}
        _, answer = await stack.post("/v1/completions", body)
        [choice] = answer["choices"]
        assert choice["text"] == PROMPT + TEXT
        last = TOKENIZER.token_bytes(PROMPT_IDS[-1]).decode()
        assert choice["logprobs"]["tokens"][0] == last
        assert choice["logprobs"]["text_offset"][0] == len(PROMPT) - len(last)


@pytest.mark.asyncio
@pytest.mark.parametrize("max_tokens", [1, 6])
async def test_echo_with_logprobs_through_real_engines(tmp_path: Path, max_tokens: int) -> None:
    prompt = list(range(5, 205))
    async with http_cluster(tmp_path) as cluster:
        for _ in range(2):
            status, body, _ = await cluster.post(
                {"prompt": prompt, "max_tokens": max_tokens, "echo": True, "logprobs": 1, "temperature": 0}
            )
            assert status == 200, body
            logprobs = body["choices"][0]["logprobs"]
            assert len(logprobs["tokens"]) == len(prompt) + max_tokens
            assert logprobs["token_logprobs"] == [None, *[-1.0] * (len(prompt) + max_tokens - 1)]
            # Nothing of a scored prompt comes from the prefix cache.
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await cluster.settled()
