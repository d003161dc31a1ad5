"""A whole cluster as clients meet it: scripted worker processes, a frontend process, real HTTP."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from pdserve.cli.machine import find_free_port
from pdserve.core.events import Role
from pdserve.wire.admin_client import AdminClient
from tests.relay import RELAY_HOST, Relay, relay_to
from tests.scripted_words import MODEL, save_words_folder
from tests.worker_processes import ServiceProcess, WorkerProcess

# A tenth of the defaults, and a little more where a busy machine would count as a silent one.
DEAD_AFTER_S = 1.5
SESSION = {"pulse_s": 0.1, "quiet_after_s": 0.6, "dead_after_s": DEAD_AFTER_S, "ticket_wait_s": 0.2}
ENGINE = {"kind": "scripted", "num_blocks": 256, "step_tokens": 64, "max_running": 64}
STEP_S = 0.02
_SETTLE_S = 15.0
_LIMIT_S = 60.0

Settings = Mapping[str, Any]


class Stream:
    """A streamed completion as its client reads it.

    Attributes:
        text: what has come so far.
        tokens: how many tokens that is: scripted ones begin with a space.
        error: of the event that ended it, if one did.
        is_done: whether [DONE] has come.
        is_over: whether the response has ended.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.text = ""
        self.error: dict[str, Any] | None = None
        self.is_done = False
        self.is_over = False

    @property
    def tokens(self) -> int:
        return self.text.count(" ")

    async def read(self, tokens: int) -> None:
        """Until so many tokens have come, or the end."""
        async with asyncio.timeout(_LIMIT_S):
            while self.tokens < tokens and not self.is_over:
                await self._read_line()

    async def finish(self) -> "Stream":
        """To its end."""
        async with asyncio.timeout(_LIMIT_S):
            while not self.is_over:
                await self._read_line()
        return self

    async def _read_line(self) -> None:
        line = await self.response.content.readline()
        data = line.removeprefix(b"data: ").strip()
        if not line:
            self.is_over = True
        elif data == b"[DONE]":
            self.is_done = True
        elif line.startswith(b"data: "):
            event = json.loads(data)
            self.error = event.get("error", self.error)
            self.text += "".join(choice["text"] for choice in event.get("choices", ()))


class HttpCluster:
    """What a test talks to.

    Attributes:
        relays: in front of the decode workers' KV ports, if there are any.
    """

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        frontend: ServiceProcess,
        relays: Sequence[Relay],
        http: aiohttp.ClientSession,
        processes: "_Processes",
    ) -> None:
        self.workers = list(workers)
        self.frontend = frontend
        self.relays = relays
        self.http = http
        self.port = 0
        self._processes = processes

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def prefills(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers if worker.role is Role.PREFILL]

    @property
    def decodes(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers if worker.role is Role.DECODE]

    # What clients do.

    async def post(self, body: Any, path: str = "/v1/completions", **kwargs: Any) -> tuple[int, Any, Mapping[str, str]]:
        """Status, JSON and headers. A mapping is sent as JSON with the model's name, all else as it is."""
        if isinstance(body, Mapping):
            body = json.dumps({"model": MODEL} | dict(body))
        kwargs.setdefault("headers", {"Content-Type": "application/json"})
        async with asyncio.timeout(_LIMIT_S), self.http.post(self.url + path, data=body, **kwargs) as response:
            return response.status, json.loads(await response.text()), response.headers

    async def complete(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> str:
        """The text of a greedy answer that succeeds."""
        status, body, _ = await self.post({"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0} | fields)
        assert status == 200, f"{body}\n{self.last_lines}"
        text: str = body["choices"][0]["text"]
        return text

    @asynccontextmanager
    async def stream(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> AsyncIterator[Stream]:
        """A greedy answer, streamed; its status line has come. The client leaves at the end of the context."""
        body = {"model": MODEL, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True}
        async with self.http.post(self.url + "/v1/completions", json=body | fields) as response:
            assert response.status == 200, f"{await response.text()}\n{self.last_lines}"
            yield Stream(response)
            response.close()

    async def streamed(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Stream:
        """The same, read to its end."""
        async with self.stream(prompt, max_tokens, **fields) as stream:
            return await stream.finish()

    # What operators see.

    @property
    def last_lines(self) -> str:
        """The end of every log, for messages of failed tests."""
        return "\n".join(process.last_lines for process in (self.frontend, *self.workers))

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels; a counter's name ends in _total."""
        async with self.http.get(self.url + "/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    async def outcomes(self) -> dict[str, int]:
        """Requests ended so far, by outcome."""
        async with self.http.get(self.url + "/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        found: dict[str, int] = {}
        for sample in (sample for family in families for sample in family.samples):
            if sample.name == "pdserve_requests_total":
                outcome = sample.labels["outcome"]
                found[outcome] = found.get(outcome, 0) + int(sample.value)
        return found

    async def ready(self) -> dict[str, int]:
        """Workers that the frontend would use, by role."""
        async with self.http.get(self.url + "/ready") as response:
            counts: dict[str, int] = (await response.json())["ready"]
        return counts

    async def wait_ready(self) -> None:
        """Until the frontend would use every worker."""
        if not self.port:
            self.port = int((await self.frontend.logged("listening on"))["message"].rpartition(":")[2])
        wanted = {"prefill": len(self.prefills), "decode": len(self.decodes)}
        await self.until(lambda: _equals(self.ready(), wanted), "every worker in use", _LIMIT_S)

    async def settled(self) -> None:
        """Until every table is empty, every block free or cached, and each request has one outcome (invariants 3, 4)."""
        for worker in self.workers:
            if worker.is_alive:
                await worker.settle(_SETTLE_S)
        await self.until(self._is_idle, "an idle frontend")

    async def until(self, holds: Callable[[], Awaitable[bool]], what: str, deadline_s: float = _SETTLE_S) -> None:
        """Wait for something that a process has to be asked for."""
        until_s = time.monotonic() + deadline_s
        while not await holds():
            assert time.monotonic() < until_s, f"not within {deadline_s} s: {what}\n{self.last_lines}"
            await asyncio.sleep(0.01)

    async def _is_idle(self) -> bool:
        started = await self.metric("pdserve_requests_started_total")
        ended = await self.metric("pdserve_requests_total")
        return started == ended and await self.metric("pdserve_queue_depth") == 0

    # What happens to workers.

    async def drain(self, worker: WorkerProcess, deadline_s: float) -> None:
        async with _admin(worker) as admin:
            await admin.drain(deadline_s)

    async def undrain(self, worker: WorkerProcess) -> None:
        async with _admin(worker) as admin:
            await admin.undrain()

    def replace(self, worker: WorkerProcess) -> WorkerProcess:
        """A new worker in a new life, in the place and at the ports of one that has ended."""
        new = self._processes.start_worker(worker.role, worker.settings)
        self.workers[self.workers.index(worker)] = new
        return new


class _Processes:
    """Everything that was started, each with its own log."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._started: list[ServiceProcess] = []

    def start_worker(self, role: Role, settings: Settings) -> WorkerProcess:
        worker = WorkerProcess(role, self._log_path(str(role)), settings)
        self._started.append(worker)
        return worker

    def start_frontend(self, settings: Settings) -> ServiceProcess:
        frontend = ServiceProcess("frontend", self._log_path("frontend"), settings)
        self._started.append(frontend)
        return frontend

    def stop(self) -> None:
        for process in self._started:
            process.stop()

    def _log_path(self, service: str) -> Path:
        return self._log_dir / f"{service}-{os.urandom(4).hex()}.log"


@asynccontextmanager
async def http_cluster(
    log_dir: Path,
    prefill: Sequence[Settings] = ({},),
    decode: Sequence[Settings] = ({},),
    frontend: Settings | None = None,
    *,
    relayed: bool = False,
    model_folder: Path | None = None,
) -> AsyncIterator[HttpCluster]:
    """Workers and a frontend, ready; all are ended at the end.

    Args:
        prefill, decode: one worker for each, with these settings beside what all of them have.
        frontend: its own slice.
        relayed: push caches through relays.
        model_folder: whose tokenizer the frontend has; None for the one of tests.scripted_words.
    """
    processes = _Processes(log_dir)
    async with AsyncExitStack() as stack:
        stack.callback(processes.stop)
        workers: list[WorkerProcess] = []
        relays: list[Relay] = []
        for role, settings in [*((Role.PREFILL, each) for each in prefill), *((Role.DECODE, each) for each in decode)]:
            ports = {name: find_free_port() for name in ("session_port", "kv_port", "admin_port")}
            place: dict[str, Any] = {"worker_id": f"{role}-{len(workers)}", **ports}
            if relayed and role is Role.DECODE:
                place["advertise_host"] = RELAY_HOST
                relays.append(await stack.enter_async_context(relay_to(ports["kv_port"])))
            workers.append(processes.start_worker(role, _worker_settings(place, settings)))
        addresses = ",".join(f"127.0.0.1:{worker.settings['worker']['session_port']}" for worker in workers)
        folder = model_folder or save_words_folder(log_dir / f"words-{os.urandom(4).hex()}")
        front = processes.start_frontend(
            {
                "model": {"name": MODEL, "path": folder},
                "session": SESSION,
                "frontend": {
                    "port": 0,
                    "workers": addresses,
                    "balancer_wait_s": 0,
                    "shutdown_s": 0,
                    "wait_s": 10,
                    **(frontend or {}),
                },
            }
        )
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        cluster = HttpCluster(workers, front, relays, http, processes)
        await cluster.wait_ready()
        yield cluster


async def _equals(asked: Awaitable[Any], wanted: Any) -> bool:
    return bool(await asked == wanted)


def _worker_settings(place: Settings, settings: Settings) -> dict[str, Any]:
    engine = settings.get("engine", {})
    scripted = {"step_s": STEP_S} | dict(engine.get("scripted", {}))
    return {
        "model": {"name": MODEL},
        "session": SESSION | dict(settings.get("session", {})),
        "engine": ENGINE | dict(engine) | {"scripted": scripted},
        "worker": {**place, **settings.get("worker", {})},
    }


@asynccontextmanager
async def _admin(worker: WorkerProcess) -> AsyncIterator[AdminClient]:
    client = AdminClient(await worker.admin_address())
    try:
        yield client
    finally:
        await client.close()
