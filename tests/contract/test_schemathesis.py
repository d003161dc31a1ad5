"""Requests made up from the OpenAPI document, right ones and wrong ones, against a whole cluster."""

import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.contract.documented import ENVELOPE_KEYS
from tests.http_cluster import http_cluster
from tests.scripted_words import MODEL

EXAMPLES = 25
# What a made-up request may ask for at most, so that a run takes seconds.
MOST_TOKENS = 8
MOST_CHOICES = 3


def tamed(body: Any) -> Any:
    """The body, mostly for the model that is served, and without hours of work."""
    if not isinstance(body, dict):
        return body
    if isinstance(body.get("model"), str) and len(body["model"]) % 4:
        body["model"] = MODEL
    for field in ("max_tokens", "max_completion_tokens"):
        if isinstance(body.get(field), int) and body[field] > MOST_TOKENS:
            body[field] = MOST_TOKENS
    if "messages" in body and "max_tokens" not in body:
        body["max_tokens"] = MOST_TOKENS
    if isinstance(body.get("n"), int) and MOST_CHOICES < body["n"] <= 128:
        body["n"] = MOST_CHOICES
    return body


def attack(url: str) -> dict[int, int]:
    """Every operation with made-up requests; how often each status came.

    Raises:
        AssertionError: a 5xx, or a refusal that is not in the envelope; requests' own errors for a broken connection.
    """
    import schemathesis
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_url(url + "/openapi.json")
    statuses: dict[int, int] = {}
    for operation in (result.ok() for result in schema.get_all_operations()):
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and operation.method.upper() == "GET":
                continue

            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                derandomize=True,
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                case.body = tamed(case.body)
                response = case.call(timeout=30)
                statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
                assert response.status_code < 500, response.text
                assert response.headers["x-request-id"]
                if response.status_code != 200:
                    assert set(response.json()) == {"error"}, response.text
                    assert set(response.json()["error"]) == ENVELOPE_KEYS

            send()
    return statuses


@pytest.mark.asyncio
@pytest.mark.timeout(300)
async def test_made_up_requests_never_break_the_server(tmp_path: Path) -> None:
    scripted = {"engine": {"scripted": {"step_s": 0.001}}}
    async with http_cluster(tmp_path, prefill=[scripted], decode=[scripted]) as cluster:
        with warnings.catch_warnings():
            # Of the tool's own dependencies.
            warnings.simplefilter("ignore")
            statuses = await asyncio.to_thread(attack, cluster.url)
        assert statuses[200] > EXAMPLES
        assert statuses[400] > EXAMPLES
        await cluster.settled()
        assert await cluster.complete([5, 6, 7], max_tokens=4)
