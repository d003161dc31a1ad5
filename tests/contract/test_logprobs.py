"""Log-probabilities of both APIs: the same streamed and buffered, the first token's included, and never -inf."""

import json
from typing import Any

import pytest

from pdserve.core.events import FinishReason
from services.frontend.responses import LOGPROB_FLOOR
from tests.contract.answering import answering, logprob_of
from tests.contract.documented import assert_envelope
from tests.frontend_stack import TOKENIZER, frontend_with, ids_of

TEXT = "The Bär 👩\u200d👧 says: 안녕\u2028 e\u0301"
IDS = ids_of(TEXT)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "logprobs": True}
COMPLETION: dict[str, Any] = {"prompt": "x", "max_tokens": 200}


def name_of(token_id: int) -> str:
    """A completion's name for a token."""
    raw = TOKENIZER.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


async def chat_logprobs(stack: Any, body: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Entries of the buffered and of the streamed answer."""
    _, buffered = await stack.post("/v1/chat/completions", body)
    events = [json.loads(event) for event in (await stack.stream("/v1/chat/completions", body))[:-1]]
    parts = [choice["logprobs"] for event in events for choice in event["choices"]]
    streamed = [entry for part in parts if part is not None for entry in part["content"]]
    return buffered["choices"][0]["logprobs"]["content"], streamed


async def completion_logprobs(stack: Any, body: dict[str, Any]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Columns of the buffered and of the streamed answer."""
    _, buffered = await stack.post("/v1/completions", body)
    events = [json.loads(event) for event in (await stack.stream("/v1/completions", body))[:-1]]
    parts = [choice["logprobs"] for event in events for choice in event["choices"]]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    streamed = {name: [row for part in parts if part is not None for row in part[name]] for name in names}
    return buffered["choices"][0]["logprobs"], streamed


@pytest.mark.asyncio
@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("top", [0, 3, 20])
async def test_chat_entries(top: int, one_by_one: bool) -> None:
    async with frontend_with(*answering(IDS, one_by_one=one_by_one)) as stack:
        buffered, streamed = await chat_logprobs(stack, CHAT | {"top_logprobs": top})
        assert streamed == buffered
        assert len(buffered) == len(IDS)
        assert bytes(byte for entry in buffered for byte in entry["bytes"]).decode() == TEXT
        for index, (entry, token_id) in enumerate(zip(buffered, IDS, strict=True)):
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            assert entry["logprob"] == pytest.approx(logprob_of(index))
            assert entry["bytes"] == list(TOKENIZER.token_bytes(token_id))
            assert entry["token"] == bytes(entry["bytes"]).decode(errors="replace")
            assert len(entry["top_logprobs"]) == top
            assert all(set(best) == {"token", "logprob", "bytes"} for best in entry["top_logprobs"])
            falling = [best["logprob"] for best in entry["top_logprobs"]]
            assert falling == sorted(falling, reverse=True)
            if top > 1:
                assert falling[-1] == LOGPROB_FLOOR


@pytest.mark.asyncio
async def test_chat_without_top_logprobs_lists_none() -> None:
    async with frontend_with(*answering(IDS)) as stack:
        buffered, streamed = await chat_logprobs(stack, CHAT)
        assert streamed == buffered
        assert [entry["top_logprobs"] for entry in buffered] == [[]] * len(IDS)


@pytest.mark.asyncio
@pytest.mark.parametrize("top", [0, 2, 5])
async def test_completion_columns(top: int) -> None:
    async with frontend_with(*answering(IDS)) as stack:
        buffered, streamed = await completion_logprobs(stack, COMPLETION | {"logprobs": top})
        assert streamed == buffered
        assert buffered["tokens"] == [name_of(token_id) for token_id in IDS]
        assert buffered["token_logprobs"] == pytest.approx([logprob_of(index) for index in range(len(IDS))])
        for token_id, best in zip(IDS, buffered["top_logprobs"], strict=True):
            assert name_of(token_id) in best
            assert len(best) == max(top, 1)
            assert min(best.values()) >= LOGPROB_FLOOR


@pytest.mark.asyncio
async def test_text_offsets_say_where_each_tokens_text_begins() -> None:
    async with frontend_with(*answering(IDS)) as stack:
        _, body = await stack.post("/v1/completions", COMPLETION | {"logprobs": 0})
        [choice] = body["choices"]
        offsets = choice["logprobs"]["text_offset"]
        assert offsets == sorted(offsets)
        for name, offset in zip(choice["logprobs"]["tokens"], offsets, strict=True):
            if not name.startswith("bytes:"):
                assert choice["text"][offset:].startswith(name)


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_event_has_the_logprobs_of_the_tokens_whose_text_begins_in_it(path: str) -> None:
    body = CHAT if path.endswith("chat/completions") else COMPLETION | {"logprobs": 0}
    async with frontend_with(*answering(IDS)) as stack:
        events = [json.loads(event) for event in (await stack.stream(path, body | {"return_token_ids": True}))[:-1]]
        entries = [choice for event in events for choice in event["choices"]]
        assert [token_id for entry in entries for token_id in entry.get("token_ids", ())] == IDS
        for entry in entries:
            text = entry["text"] if "text" in entry else entry["delta"].get("content", "")
            if text:
                assert entry["logprobs"] is not None
            count = len(entry.get("token_ids", ()))
            if entry["logprobs"] is not None:
                assert len(entry["logprobs"].get("content", entry["logprobs"].get("tokens"))) == count


@pytest.mark.asyncio
async def test_tokens_of_a_stop_string_are_listed_though_their_text_is_not() -> None:
    """As vLLM does: every generated token that counts has its row. OpenAI leaves the stop string's rows out."""
    async with frontend_with(*answering(ids_of("one two STOP three"))) as stack:
        wanted = ids_of("one two STOP")
        for extra in ({}, {"include_stop_str_in_output": True}):
            buffered, streamed = await chat_logprobs(stack, CHAT | {"stop": "STOP"} | extra)
            assert streamed == buffered
            joined = bytes(byte for entry in buffered for byte in entry["bytes"])
            assert joined.startswith(b"one two STOP"[: len(joined)])
            assert len(buffered) <= len(wanted) + 1
            _, body = await stack.post("/v1/chat/completions", CHAT | {"stop": "STOP"} | extra)
            assert body["usage"]["completion_tokens"] == len(buffered)


@pytest.mark.asyncio
async def test_a_stop_token_is_listed_with_no_text_of_its_own() -> None:
    ids = [*ids_of("hi"), 2]
    async with frontend_with(*answering(ids, FinishReason.STOP)) as stack:
        buffered, streamed = await chat_logprobs(stack, CHAT)
        assert streamed == buffered
        assert len(buffered) == len(ids)
        columns, _ = await completion_logprobs(stack, COMPLETION | {"logprobs": 0})
        assert columns["text_offset"][-1] == len("hi")


@pytest.mark.asyncio
async def test_logprobs_are_null_unless_asked_for() -> None:
    async with frontend_with(*answering(IDS)) as stack:
        for path, body in (("/v1/chat/completions", CHAT | {"logprobs": False}), ("/v1/completions", COMPLETION)):
            _, answer = await stack.post(path, body)
            assert answer["choices"][0]["logprobs"] is None
            events = [json.loads(event) for event in (await stack.stream(path, body))[:-1]]
            assert {choice["logprobs"] for event in events for choice in event["choices"]} == {None}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": 2}, "logprobs"),
        ("/v1/completions", {"logprobs": 6}, "logprobs"),
        ("/v1/completions", {"logprobs": True}, "logprobs"),
    ],
)
async def test_what_is_out_of_range_is_refused(path: str, fields: dict[str, Any], param: str) -> None:
    async with frontend_with(*answering(IDS)) as stack:
        base = CHAT if path.endswith("chat/completions") else COMPLETION
        status, body = await stack.post(path, base | fields)
        assert status == 400
        assert_envelope(status, body, "invalid_request", param)
