"""Log-probabilities in the shape of each API."""

import json
from itertools import count
from typing import Any

import pytest

from pdserve.core.events import FinishReason, TokenLogprobs
from pdserve.core.ids import GroupId
from services.frontend.answers import Prompt
from services.frontend.chat_responses import ChatShape
from services.frontend.choices import Choice, Piece
from services.frontend.completion_responses import CompletionShape
from services.frontend.groups import Group
from services.frontend.request import Endpoint, GenerateRequest
from services.frontend.responses import LOGPROB_FLOOR, encode_json
from services.frontend.schemas import parse_chat, parse_completion
from services.frontend.text import ChoiceText, TextToken
from tests.frontend_stack import TOKENIZER, ids_of


class FinishedAnswer:
    """What a shape reads of an answer."""

    def __init__(self, request: GenerateRequest, prompt_text: str) -> None:
        prompt_ids = ids_of("hi")
        group = Group(
            group=GroupId(1, 1),
            prompt_ids=prompt_ids,
            params=request.sampling,
            seed=0,
            model="tiny",
            cache_scope="",
            priority=0,
            arrival_s=0.0,
            deadline_s=0.0,
            attempt_numbers=count(1),
        )
        self.choices = [Choice(0, 0, len(prompt_ids), ChoiceText(TOKENIZER.plan, prompt_ids))]
        self.prompts = [Prompt(group, self.choices, prompt_text)]
        self.prompt_tokens, self.completion_tokens, self.cached_tokens = len(prompt_ids), 2, 1


def shape_of(request: GenerateRequest, prompt_text: str = "") -> tuple[Any, FinishedAnswer]:
    answer = FinishedAnswer(request, prompt_text)
    shape = ChatShape if request.endpoint is Endpoint.CHAT else CompletionShape
    return shape(request, answer, TOKENIZER, "id-1", 5), answer  # type: ignore[arg-type]


A, B = ids_of("A")[0], ids_of("B")[0]
PIECE = Piece(
    "AB",
    (
        TextToken(A, TokenLogprobs(-0.5, (A, B), (-0.5, -1.5)), 0),
        TextToken(B, TokenLogprobs(float("-inf"), (A,), (-0.1,)), 1),
    ),
    FinishReason.STOP,
)


def test_a_chat_lists_tokens_with_their_bytes_and_the_best_ones() -> None:
    request = parse_chat(
        {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    )
    shape, _ = shape_of(request)
    body = shape.body([PIECE])
    assert body["choices"][0]["logprobs"]["content"] == [
        {
            "token": "A",
            "logprob": -0.5,
            "bytes": [65],
            "top_logprobs": [
                {"token": "A", "logprob": -0.5, "bytes": [65]},
                {"token": "B", "logprob": -1.5, "bytes": [66]},
            ],
        },
        {
            "token": "B",
            "logprob": LOGPROB_FLOOR,
            "bytes": [66],
            "top_logprobs": [{"token": "A", "logprob": -0.1, "bytes": [65]}],
        },
    ]
    assert body["choices"][0]["finish_reason"] == "stop"


def test_a_completion_has_columns_with_offsets_beyond_the_repeated_prompt() -> None:
    request = parse_completion({"model": "tiny", "prompt": "hi", "logprobs": 1})
    shape, _ = shape_of(request)
    logprobs = shape.body([PIECE])["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["A", "B"],
        "token_logprobs": [-0.5, LOGPROB_FLOOR],
        "top_logprobs": [{"A": -0.5, "B": -1.5}, {"A": -0.1, "B": LOGPROB_FLOOR}],
        "text_offset": [0, 1],
    }


def test_without_being_asked_for_they_are_null() -> None:
    shape, _ = shape_of(parse_completion({"model": "tiny", "prompt": "hi"}))
    assert shape.body([PIECE])["choices"][0]["logprobs"] is None


def test_tokens_without_text_go_with_the_finish_chunk() -> None:
    request = parse_completion({"model": "tiny", "prompt": "hi", "logprobs": 1, "return_token_ids": True})
    shape, answer = shape_of(request)
    [event] = shape.piece_events(answer.choices[0], PIECE._replace(text=""))
    assert event["choices"][0]["finish_reason"] == "stop"
    assert event["choices"][0]["token_ids"] == [A, B]
    with_text = shape.piece_events(answer.choices[0], PIECE)
    assert [entry["choices"][0].get("token_ids") for entry in with_text] == [[A, B], None]


def test_usage_in_every_chunk_if_asked_for() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    shape, answer = shape_of(
        parse_completion({"model": "tiny", "prompt": "hi", "stream": True, "stream_options": options})
    )
    usage = {
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    usage["prompt_tokens"] = answer.prompt_tokens
    usage["total_tokens"] = answer.prompt_tokens + 2
    assert [event["usage"] for event in shape.piece_events(answer.choices[0], PIECE)] == [usage, usage]


@pytest.mark.parametrize("value", ["\u2028", "é", "😀"])
def test_json_is_ascii(value: str) -> None:
    encoded: Any = encode_json({"text": value})
    assert encoded.isascii()
    assert json.loads(encoded) == {"text": value}
