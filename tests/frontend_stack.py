"""A frontend on a real port with workers that a test scripts."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from pdserve.config import FrontendConfig, ModelConfig, SessionConfig
from pdserve.core.events import FinishReason, Role
from pdserve.rpc.v1 import session_pb2
from services.frontend.admission import ServedModel
from services.frontend.frontend import Frontend
from services.frontend.tokenizer import Tokenizer
from tests.fake_worker import MODEL, PULSE_S, FakeWorker, running
from tests.tiny_tokenizers import byte_level_bpe, save_model_folder

SESSION = SessionConfig(pulse_s=PULSE_S, quiet_after_s=0.4, dead_after_s=1.0)
CONTEXT_TOKENS = 512


def _tiny_tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.load(save_model_folder(byte_level_bpe(), Path(folder)))


# Loaded here, before any event loop runs.
TOKENIZER = _tiny_tokenizer()


@dataclass
class Stack:
    """What a test talks to."""

    frontend: Frontend
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.frontend.port}"

    async def post(self, path: str, body: dict[str, Any], **kwargs: Any) -> tuple[int, Any]:
        """Status and JSON of a buffered request."""
        async with self.http.post(self.url + path, json={"model": MODEL} | body, **kwargs) as response:
            return response.status, await response.json()

    async def stream(self, path: str, body: dict[str, Any]) -> list[str]:
        """The data of every event of a streamed request."""
        async with self.http.post(self.url + path, json={"model": MODEL, "stream": True} | body) as response:
            assert response.status == 200
            text = await response.text()
        return [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: ")]

    async def outcome(self, name: str, timeout_s: float = 5.0) -> None:
        """Wait until a request has ended so."""
        await until(lambda: self.outcomes().get(name, 0) > 0, timeout_s)

    def outcomes(self) -> dict[str, float]:
        """Requests by outcome."""
        samples = (sample for metric in self.frontend.registry.collect() for sample in metric.samples)
        return {sample.labels["outcome"]: sample.value for sample in samples if sample.name == "pdserve_requests_total"}

    def accepted(self) -> int:
        """Tokens accepted into answers so far."""
        return int(self.frontend.registry.get_sample_value("pdserve_tokens_out_total") or 0)

    def assert_idle(self) -> None:
        """Every table is empty."""
        assert len(self.frontend.exchanges) == 0
        assert len(self.frontend.dispatcher.line) == 0
        assert [worker.carried for worker in self.frontend.membership] == [{} for _ in self.frontend.membership]


@asynccontextmanager
async def frontend_with(
    *workers: FakeWorker, wait_ready: bool = True, context_tokens: int = CONTEXT_TOKENS, **config: Any
) -> AsyncIterator[Stack]:
    """A frontend whose fixed workers these are; they are started and stopped too."""
    async with running(*workers):
        config = {
            "workers": tuple(worker.address for worker in workers),
            "balancer_wait_s": 0,
            "shutdown_s": 0,
        } | config
        settings = FrontendConfig(port=0, **config)
        served = ServedModel(MODEL, vocab_size=420, max_context_tokens=context_tokens, created=1)
        frontend = Frontend(settings, SESSION, ModelConfig(name=MODEL), TOKENIZER, served)
        await frontend.start()
        try:
            async with aiohttp.ClientSession() as http:
                stack = Stack(frontend, http)
                if wait_ready:
                    await until(lambda: sum(worker.ready for worker in frontend.membership) == len(workers))
                yield stack
        finally:
            if not frontend.stopping:
                await frontend.stop()


async def until(holds: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.005)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def answer_with(
    prefill: FakeWorker, decode: FakeWorker, ids: Sequence[int], finish: FinishReason = FinishReason.LENGTH
) -> None:
    """Script both workers: each attempt is answered with what is left of `ids` after the tokens that it replays."""

    def answer(worker: FakeWorker, attempt: session_pb2.Attempt) -> None:
        rest = list(ids[attempt.total_tokens - attempt.prompt_tokens :])
        for sibling in attempt.siblings:
            worker.tokens(attempt, rest[:1], sibling=sibling, finish=finish if len(rest) == 1 else None)
            if len(rest) > 1:
                decode.tokens(attempt, rest, sibling=sibling, finish=finish)

    prefill.on_run(answer)


def pair() -> tuple[FakeWorker, FakeWorker]:
    return FakeWorker(Role.PREFILL, "prefill-0"), FakeWorker(Role.DECODE, "decode-0")


def texts(events: Sequence[str]) -> str:
    """The content of a chat stream's events, joined."""
    return "".join(
        choice["delta"].get("content", "")
        for event in events
        if event != "[DONE]"
        for choice in json.loads(event)["choices"]
    )
