"""What a reply's payloads say about its request."""

import json
from typing import Any

import pytest

from bench.samples import Outcome, Reply, judge

FINISH = {"choices": [{"text": "", "finish_reason": "length"}]}


def text(value: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": value, "finish_reason": None}]}


def reply(*events: object, done: bool = True, **fields: Any) -> Reply:
    payloads = [event if isinstance(event, bytes) else json.dumps(event).encode() for event in events]
    payloads += [b"[DONE]"] if done else []
    times_s = [1.0 + index / 4 for index in range(len(payloads))]
    made = Reply(due_s=0.5, sent_s=0.75, ended_s=9.0, status=200, times_s=times_s, payloads=payloads)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_latencies_count_from_when_the_request_was_due() -> None:
    sample = judge(reply(text("a"), text("b"), text("c"), FINISH))
    assert sample.outcome is Outcome.OK
    assert (sample.ttft_s, sample.itls_s, sample.tpot_s, sample.total_s) == (0.5, [0.25, 0.25], 0.25, 8.5)


def test_tokens_of_one_event_are_counted_apart() -> None:
    several = {"choices": [{"text": "abc", "token_ids": [1, 2, 3], "finish_reason": None}]}
    sample = judge(reply(text("a"), several, FINISH))
    assert sample.itls_s == [0.25, 0.0, 0.0]
    assert sample.largest_event_tokens == 3


def test_text_that_was_held_back_is_no_further_token() -> None:
    named = {"choices": [{"text": "a", "token_ids": [1], "finish_reason": None}]}
    assert len(judge(reply(named, text("rest"), FINISH)).token_times_s) == 1


def test_a_role_chunk_is_no_token() -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    content = {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}
    assert len(judge(reply(role, content, FINISH)).token_times_s) == 1


def test_usage_is_the_servers_own_count() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}
    sample = judge(reply(text("a"), text("b"), FINISH, {"choices": [], "usage": usage}))
    assert (sample.prompt_tokens, sample.completion_tokens, sample.cached_tokens) == (7, 5, 3)
    assert sample.tpot_s == 0.25 / 4


@pytest.mark.parametrize(
    ("broken", "outcome", "detail"),
    [
        (reply(text("a"), done=False), Outcome.TRUNCATED, "no finish_reason, no [DONE]"),
        (reply(text("a")), Outcome.TRUNCATED, "no finish_reason"),
        (reply(text("a"), FINISH, done=False), Outcome.TRUNCATED, "no [DONE]"),
        (reply(text("a"), FINISH, cut=True), Outcome.TRUNCATED, "cut inside an event"),
        (reply(done=False), Outcome.TRUNCATED, "no finish_reason, no [DONE]"),
        (reply(text("a"), {"error": {"code": "worker_lost"}}, done=False), Outcome.ERROR_IN_BAND, "worker_lost"),
        (reply(text("a"), {"error": {"code": "x"}}, FINISH), Outcome.ERROR_IN_BAND, "x"),
        (reply(b"{oops", FINISH), Outcome.MALFORMED, "{oops"),
        (reply(b"[1]", FINISH), Outcome.MALFORMED, "[1]"),
        (reply(done=False, status=None, broken="refused"), Outcome.CONNECTION, "refused"),
        (reply(text("a"), done=False, timed_out=True, broken="no end"), Outcome.TIMEOUT, "no end"),
        (reply(done=False, status=503, body=b"full"), Outcome.REFUSED, "503: full"),
        (reply(done=False, status=429), Outcome.REFUSED, "429"),
        (reply(done=False, status=400, body=b"bad"), Outcome.HTTP_ERROR, "400: bad"),
    ],
)
def test_each_failure_is_told_apart(broken: Reply, outcome: Outcome, detail: str) -> None:
    sample = judge(broken)
    assert sample.outcome is outcome
    assert detail in sample.detail
    assert not sample.ok
