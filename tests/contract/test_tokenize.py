"""POST /tokenize and /detokenize, in vLLM's shape."""

from typing import Any

import pytest

from tests.contract.documented import assert_envelope, documented
from tests.frontend_stack import CONTEXT_TOKENS, TOKENIZER, frontend_with, pair

TEXT = "The Bär 😀\u2028"
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]


@pytest.mark.asyncio
async def test_a_prompt_becomes_the_ids_that_a_completion_would_see() -> None:
    async with frontend_with(*pair()) as stack:
        judge = await documented(stack)
        status, body = await stack.post("/tokenize", {"prompt": TEXT})
        ids = TOKENIZER.encode(TEXT)
        assert (status, body) == (
            200,
            {"count": len(ids), "max_model_len": CONTEXT_TOKENS, "tokens": ids, "token_strs": None},
        )
        judge.check_body("POST", "/tokenize", status, body)
        _, body = await stack.post("/tokenize", {"prompt": "a b", "return_token_strs": True})
        assert body["token_strs"] == ["a", "Ġ", "b"] or body["token_strs"] == ["a", "Ġb"]
        assert len(body["token_strs"]) == body["count"]
        _, body = await stack.post("/tokenize", {"prompt": "", "add_special_tokens": False})
        assert body["tokens"] == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, {}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"continue_final_message": True}, {"add_generation_prompt": False, "continue_final_message": True}),
    ],
)
async def test_messages_become_the_ids_that_a_chat_would_see(fields: dict[str, Any], arguments: dict[str, Any]) -> None:
    async with frontend_with(*pair()) as stack:
        status, body = await stack.post("/tokenize", {"messages": MESSAGES} | fields)
        assert status == 200
        assert body["tokens"] == TOKENIZER.render_chat([{"role": "user", "content": "hello"}], **arguments)


@pytest.mark.asyncio
async def test_detokenize_is_the_way_back() -> None:
    async with frontend_with(*pair()) as stack:
        judge = await documented(stack)
        status, body = await stack.post("/detokenize", {"tokens": TOKENIZER.encode(TEXT)})
        assert (status, body) == (200, {"prompt": TEXT})
        judge.check_body("POST", "/detokenize", status, body)
        assert (await stack.post("/detokenize", {"tokens": []}))[1] == {"prompt": ""}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/tokenize", {}, "invalid_request", "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "invalid_request", "prompt"),
        ("/tokenize", {"prompt": 5}, "invalid_request", "prompt"),
        ("/tokenize", {"messages": []}, "invalid_request", "messages"),
        ("/tokenize", {"prompt": "x", "model": "another"}, "model_not_found", "model"),
        (
            "/tokenize",
            {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}},
            "invalid_request",
            "chat_template_kwargs",
        ),
        ("/detokenize", {"tokens": [-1]}, "invalid_request", "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, "invalid_request", "tokens"),
        ("/detokenize", {"tokens": "x"}, "invalid_request", "tokens"),
        ("/detokenize", {}, "invalid_request", "tokens"),
    ],
)
async def test_bad_input_names_its_field(path: str, body: dict[str, Any], code: str, param: str) -> None:
    async with frontend_with(*pair()) as stack:
        status, answer = await stack.post(path, body)
        assert status in (400, 404)
        assert_envelope(status, answer, code, param)


@pytest.mark.asyncio
async def test_the_model_may_be_left_out() -> None:
    async with frontend_with(*pair()) as stack, stack.http.post(stack.url + "/tokenize", json={"prompt": "x"}) as reply:
        assert reply.status == 200
