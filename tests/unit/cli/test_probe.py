"""What the probe sees, what it concludes, and what it says, against servers that play a script."""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from pdserve.cli.commands import make_parser, run_command
from pdserve.cli.probe import Load, probe, run_probe
from pdserve.core.errors import PdserveError

TOKENS = 10
LOAD = Load(streams=3, tokens=TOKENS, prompt_tokens=5)
STEP_S = 0.01

METRICS = """\
# TYPE pdserve_time_to_first_token_seconds histogram
pdserve_time_to_first_token_seconds_bucket{{model="tiny",le="0.01"}} {low}
pdserve_time_to_first_token_seconds_bucket{{model="tiny",le="+Inf"}} {all}
pdserve_time_to_first_token_seconds_sum{{model="tiny"}} {sum}
"""


def event(choices: list[Any], **fields: Any) -> bytes:
    return b"data: " + json.dumps({"choices": choices} | fields).encode() + b"\n\n"


class Player:
    """A server whose streams have a token a step.

    Attributes:
        gathered: events that leave together.
        cut: streams end after their first event.
        prompts: that were asked.
        max_tokens: a request for more is refused.
        metrics: served under /metrics, the n-th time the n-th; with none there is no such page.
    """

    def __init__(
        self, gathered: int = 1, *, cut: bool = False, max_tokens: int = TOKENS, metrics: tuple[str, ...] = ()
    ) -> None:
        self.gathered = gathered
        self.cut = cut
        self.max_tokens = max_tokens
        self.prompts: list[list[int]] = []
        self.metrics = list(metrics)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.prompts.append(body["prompt"])
        if body["max_tokens"] > self.max_tokens:
            error = {"message": "too many tokens", "code": "context_length_exceeded"}
            return web.json_response({"error": error}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        count = body["max_tokens"]
        waiting = b""
        for number in range(count):
            await asyncio.sleep(STEP_S)
            finish = "length" if number == count - 1 else None
            waiting += event([{"index": 0, "text": "x", "token_ids": [number], "finish_reason": finish}])
            if (number + 1) % self.gathered == 0 or finish:
                await response.write(waiting)
                waiting = b""
                if self.cut:
                    return response
        await response.write(event([], usage={"prompt_tokens": 5, "completion_tokens": count}) + b"data: [DONE]\n\n")
        return response

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def show_metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics.pop(0)) if self.metrics else web.Response(status=404)


Serve = Callable[[Player], Awaitable[str]]


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server; returns its URL."""
    servers: list[TestServer] = []

    async def start(player: Player) -> str:
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/completions", player.complete),
                web.get("/v1/models", player.models),
                web.get("/metrics", player.show_metrics),
            ]
        )
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return str(servers[-1].make_url(""))

    yield start
    for server in servers:
        await server.close()


TYPED = make_parser().parse_args(["probe", "--json", "--streams", "3", "--tokens", str(TOKENS), "--prompt-tokens", "5"])


def typed(**options: Any) -> argparse.Namespace:
    return argparse.Namespace(**vars(TYPED) | options)


@pytest.mark.asyncio
async def test_it_measures_each_token_of_each_stream(serve: Serve) -> None:
    player = Player()
    run = await probe(await serve(player), LOAD, metrics_url="http://127.0.0.1:9")
    seen = run.seen
    assert (seen.whole, seen.failures, seen.tokens, seen.events) == (3, {}, 3 * TOKENS, 3 * TOKENS)
    assert (seen.ttft.count, seen.itl.count, seen.total.count) == (3, 3 * (TOKENS - 1), 3)
    assert STEP_S / 2 < seen.ttft.p50_s < seen.total.p50_s
    assert seen.itl.mean_s > STEP_S / 2
    assert run.server_ttft is None
    # One prompt warms up; no two are the same.
    assert [len(prompt) for prompt in player.prompts] == [5] * 4
    assert len({tuple(prompt) for prompt in player.prompts}) == 4


@pytest.mark.asyncio
async def test_the_servers_histogram_is_what_it_gained_meanwhile(serve: Serve) -> None:
    before, after = METRICS.format(low=5, all=6, sum=2.5), METRICS.format(low=6, all=9, sum=2.8)
    url = await serve(Player(metrics=(before, after)))
    run = await probe(url, LOAD, metrics_url=url)
    assert run.server_ttft is not None
    assert run.server_ttft.count == 3
    assert run.server_ttft.mean_s == pytest.approx(0.1)
    assert run.server_itl is not None
    assert run.server_itl.count == 0


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("gathered", "finding"),
    [(TOKENS, "holds answers back until they are whole"), (5, "gathers events: ")],
)
async def test_a_proxy_that_buffers_is_found(
    serve: Serve, gathered: int, finding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    direct, via = await serve(Player()), await serve(Player(gathered))
    assert await run_probe(typed(url=direct, via=via)) == 0
    report = json.loads(capsys.readouterr().out)
    assert [run["url"] for run in report["runs"]] == [direct.rstrip("/"), via.rstrip("/")]
    assert f"{via.rstrip('/')} {finding}" in report["findings"][0]
    assert report["runs"][1]["seen"]["events_per_read"] >= 2 * report["runs"][0]["seen"]["events_per_read"]


@pytest.mark.asyncio
async def test_a_cut_stream_is_counted_and_is_status_1(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    direct, via = await serve(Player()), await serve(Player(cut=True))
    assert await run_probe(typed(url=direct, via=via, json=False)) == 1
    said = capsys.readouterr().out
    assert "direct and via: as seen from here; its server: as it measures itself (/metrics)" in said.splitlines()
    assert "3 of the streams through" in said
    assert "TruncatedStream: the answer was cut" in said


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_nobody_there_is_one_line_and_no_table(
    options: list[str], unused_tcp_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    assert run_command(["probe", "--url", url, *options]) == 1
    said, error = capsys.readouterr()
    assert said == ""
    assert error.startswith(f"pdserve: no connection to {url} ")
    assert error.endswith("is `pdserve up` running there?\n")
    assert len(error.splitlines()) == 1


@pytest.mark.asyncio
async def test_streams_that_are_all_refused_are_one_line_and_no_table(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    url = await serve(Player(max_tokens=TOKENS - 1))
    with pytest.raises(PdserveError, match=f"not one token came through {url.rstrip('/')}: .*too many tokens"):
        await run_probe(typed(url=url))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("option", ["--streams", "--tokens", "--prompt-tokens"])
def test_nothing_to_measure_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["probe", option, "0"]) == 1
    assert capsys.readouterr().err == f"pdserve: {option} must be at least 1\n"
