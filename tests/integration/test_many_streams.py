"""Two thousand streams at once through one frontend process: no error, and every one of them complete and right."""

import asyncio
import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.http_cluster import HttpCluster, http_cluster
from tests.scripted_words import MODEL, right_answer
from tests.worker_pair import prompt_of

STREAMS = 2000
TOKENS = 15
PROMPTS = 50
# One for each stream, and some for everything else.
FILES = STREAMS + 200
ENGINE = {"num_blocks": 3 * STREAMS, "step_tokens": 4096, "max_running": 4096, "max_waiting": 4096}
# A step is so long that the first streams are still open when the last ones begin.
STEP_S = 2.4
PREFILL = {"engine": ENGINE | {"scripted": {"step_s": 0.001}}}
DECODE = {"engine": ENGINE | {"scripted": {"step_s": STEP_S}}}
FRONTEND = {"max_waiting": 4096, "wait_s": 60.0}
LIMIT_S = 110.0
_READ_LIMIT_BYTES = 1 << 20


@pytest.fixture
def enough_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < FILES:
        pytest.skip(f"not run: {FILES} open files are needed, and this machine allows {hard} (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Connection:
    """One client."""

    def __init__(self, prompt: list[int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.prompt = prompt
        self._reader = reader
        self._writer = writer

    def ask(self) -> None:
        body = {"model": MODEL, "prompt": self.prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        text = json.dumps(body)
        head = f"Host: words\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        self._writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}{text}".encode())

    async def read_first(self) -> None:
        """Until the headers, which come with the first token."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head

    async def read_rest(self) -> str:
        """The answer's text."""
        data = await self._reader.readuntil(b"data: [DONE]\n\n")
        events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
        self._writer.close()
        return "".join(choice["text"] for event in events for choice in event["choices"])


async def connect(port: int, prompt: list[int]) -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_READ_LIMIT_BYTES)
    return Connection(prompt, reader, writer)


async def open_exchanges(cluster: HttpCluster) -> int:
    started = await cluster.metric("pdserve_requests_started_total")
    return int(started - await cluster.metric("pdserve_requests_total"))


@pytest.mark.asyncio
async def test_two_thousand_streams_at_once(
    enough_files: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [prompt_of(8, seed=seed) for seed in range(PROMPTS)]
    wanted = {tuple(prompt): right_answer(prompt, TOKENS) for prompt in prompts}
    async with asyncio.timeout(LIMIT_S), http_cluster(tmp_path, [PREFILL], [DECODE], FRONTEND) as cluster:
        frontend = psutil.Process(cluster.frontend.pid)
        idle_bytes = frontend.memory_info().rss
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        # All at once: the listen backlog takes what the frontend has not accepted yet.
        clients = await asyncio.gather(*(connect(cluster.port, prompts[index % PROMPTS]) for index in range(STREAMS)))
        for client in clients:
            client.ask()
        await asyncio.gather(*(client.read_first() for client in clients))
        opened_s = loop.time() - begun_s
        assert await open_exchanges(cluster) == STREAMS
        growth_bytes = frontend.memory_info().rss - idle_bytes
        texts = await asyncio.gather(*(client.read_rest() for client in clients))
        assert [text == wanted[tuple(client.prompt)] for client, text in zip(clients, texts, strict=True)] == [
            True
        ] * STREAMS
        await cluster.settled()
        outcomes = await cluster.outcomes()
    assert outcomes == {"completed": STREAMS}
    with capsys.disabled():
        sys.stdout.write(
            f"\n{STREAMS} streams open at once, the last after {opened_s:.1f} s; "
            f"{growth_bytes / STREAMS / 1024:.1f} KiB of the frontend's memory for each\n"
        )
