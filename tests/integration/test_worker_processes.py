"""Workers as processes: how they start and refuse to, how they end, and what the other side does when one is lost."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.machine import find_free_port
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import Role
from pdserve.core.sampling import SamplingParams
from tests.manual_frontend import ManualFrontend, wait_until
from tests.worker_pair import GREEDY, answer_to, prompt_of
from tests.worker_processes import WorkerProcess, frontend_to, worker_processes

pytestmark = pytest.mark.asyncio

LONG = SamplingParams(max_tokens=400, temperature=0.0)
# Faster than by default, slow enough for a busy machine.
DEAD_AFTER_S = 1.5
SESSION = {"pulse_s": 0.1, "quiet_after_s": 0.5, "dead_after_s": DEAD_AFTER_S, "ticket_wait_s": 0.5}
STEP_S = 0.02


def scripted(**slices: dict[str, Any]) -> dict[str, Any]:
    engine = {"kind": "scripted", "num_blocks": 100, "step_tokens": 32, "max_running": 16}
    return {
        "session": SESSION,
        "engine": engine | {"scripted": {"step_s": STEP_S}} | slices.pop("engine", {}),
        **slices,
    }


@asynccontextmanager
async def pair(
    log_dir: Path, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
) -> AsyncIterator[tuple[WorkerProcess, WorkerProcess, ManualFrontend]]:
    with worker_processes(log_dir, [prefill or scripted()], [decode or scripted()]) as (first, second):
        async with frontend_to(first, second) as frontend:
            yield first, second, frontend


async def until(holds: Callable[[], Awaitable[bool]], what: str, deadline_s: float = 10.0) -> None:
    """Wait for something that a worker has to be asked for."""
    try:
        async with asyncio.timeout(deadline_s):
            while not await holds():
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"not within {deadline_s} s: {what}")


async def pushing(prefill: WorkerProcess, decode: WorkerProcess) -> bool:
    """Whether a cache is on its way, with more of it to be computed."""
    return "Running" in await prefill.states() and "Receiving" in await decode.states()


async def assert_serves(frontend: ManualFrontend, *processes: WorkerProcess) -> None:
    """The next request is right, and nothing is held afterwards."""
    prompt = prompt_of(40, seed=99)
    key = frontend.dispatch(prompt, GREEDY)
    await frontend.finish(key)
    assert frontend.answer(key) == answer_to(prompt, GREEDY)
    for process in processes:
        await process.settle()


async def test_prefill_killed_in_a_push_frees_the_reservation_and_the_frontend_hears_of_it(tmp_path: Path) -> None:
    async with pair(tmp_path) as (prefill, decode, frontend):
        key = frontend.dispatch(prompt_of(1200), GREEDY)
        await until(lambda: pushing(prefill, decode), "a push under way")
        prefill.kill(signal.SIGKILL)
        await wait_until(lambda: key in frontend.decode.heard.failures, "the frontend to hear of it", deadline_s=2.0)
        assert frontend.decode.heard.failures[key].code is ErrorCode.transfer_failed
        await wait_until(lambda: bool(frontend.prefill.heard.losses), "the lost session", deadline_s=2.0)
        await decode.settle(deadline_s=2.0)
        assert not frontend.answer(key)


async def test_decode_killed_in_a_push_frees_prefill_and_the_frontend_hears_of_it(tmp_path: Path) -> None:
    async with pair(tmp_path) as (prefill, decode, frontend):
        key = frontend.dispatch(prompt_of(1200), GREEDY)
        await until(lambda: pushing(prefill, decode), "a push under way")
        decode.kill(signal.SIGKILL)
        await wait_until(lambda: key in frontend.prefill.heard.failures, "the frontend to hear of it", deadline_s=2.0)
        assert frontend.prefill.heard.failures[key].code in (ErrorCode.worker_lost, ErrorCode.transfer_failed)
        await wait_until(lambda: bool(frontend.decode.heard.losses), "the lost session", deadline_s=2.0)
        await prefill.settle(deadline_s=2.0)


async def test_paused_decode_is_given_up_and_changes_nothing_when_it_wakes(tmp_path: Path) -> None:
    async with pair(tmp_path) as (prefill, decode, frontend):
        running = frontend.dispatch(prompt_of(40), LONG)
        await wait_until(lambda: len(frontend.answer(running)) > 3, "decode to run")
        handed = frontend.dispatch(prompt_of(800, seed=1), GREEDY)
        await until(lambda: pushing(prefill, decode), "a push under way")
        decode.kill(signal.SIGSTOP)
        await wait_until(lambda: bool(frontend.decode.heard.losses), "the silence to count", 2 * DEAD_AFTER_S)
        # What every frontend does then: the old attempts are cancelled everywhere.
        for key in (running, handed):
            frontend.cancel(key, frontend.prefill)
        await prefill.settle(deadline_s=DEAD_AFTER_S)
        known = frontend.answer(running)
        decode.kill(signal.SIGCONT)
        await wait_until(lambda: frontend.decode.heard.welcome is not None, "a new session")
        assert not await decode.states()
        assert frontend.answer(running) == known
        assert not frontend.answer(handed)
        await assert_serves(frontend, prefill, decode)
        assert frontend.answer(running) == known


async def test_paused_prefill_is_given_up_and_changes_nothing_when_it_wakes(tmp_path: Path) -> None:
    async with pair(tmp_path) as (prefill, decode, frontend):
        key = frontend.dispatch(prompt_of(800), GREEDY)
        await until(lambda: pushing(prefill, decode), "a push under way")
        prefill.kill(signal.SIGSTOP)
        await wait_until(lambda: bool(frontend.prefill.heard.losses), "the silence to count", 2 * DEAD_AFTER_S)
        frontend.cancel(key, frontend.decode)
        await decode.settle(deadline_s=DEAD_AFTER_S)
        prefill.kill(signal.SIGCONT)
        await wait_until(lambda: frontend.prefill.heard.welcome is not None, "a new session")
        assert not await prefill.states()
        await assert_serves(frontend, prefill, decode)
        assert not frontend.answer(key)


async def test_sigterm_finishes_what_is_held_then_says_go_away_and_end(tmp_path: Path) -> None:
    async with pair(tmp_path) as (prefill, decode, frontend):
        prompt = prompt_of(40)
        params = SamplingParams(max_tokens=60, temperature=0.0)
        key = frontend.dispatch(prompt, params)
        await wait_until(lambda: len(frontend.answer(key)) > 3, "decode to run")
        decode.kill(signal.SIGTERM)
        await wait_until(lambda: frontend.decode.heard.went_away, "GoAway")
        refused = frontend.dispatch(prompt_of(40, seed=1), GREEDY)
        await wait_until(lambda: refused in frontend.decode.heard.failures, "a refusal")
        assert frontend.decode.heard.failures[refused].code is ErrorCode.draining
        await frontend.finish(key)
        assert frontend.answer(key) == answer_to(prompt, params)
        await wait_until(lambda: bool(frontend.decode.heard.losses), "End")
        assert "was ended by it" in frontend.decode.heard.losses[0].message
        assert await decode.wait_exit() == 0
        # Prefill holds nothing of it either, and ends as well.
        frontend.cancel(refused, frontend.prefill)
        await prefill.settle()
        prefill.kill(signal.SIGTERM)
        assert await prefill.wait_exit() == 0


async def test_drain_deadline_gives_what_is_held_back_to_its_frontend(tmp_path: Path) -> None:
    async with pair(tmp_path, decode=scripted(worker={"drain_s": 0.3})) as (prefill, decode, frontend):
        key = frontend.dispatch(prompt_of(40), LONG)
        await wait_until(lambda: len(frontend.answer(key)) > 3, "decode to run")
        decode.kill(signal.SIGTERM)
        assert await decode.wait_exit() == 0
        assert frontend.decode.heard.failures[key].code is ErrorCode.draining
        await prefill.settle()


async def test_second_sigterm_ends_at_once(tmp_path: Path) -> None:
    async with pair(tmp_path) as (_, decode, frontend):
        key = frontend.dispatch(prompt_of(40), LONG)
        await wait_until(lambda: len(frontend.answer(key)) > 3, "decode to run")
        decode.kill(signal.SIGTERM)
        await wait_until(lambda: frontend.decode.heard.went_away, "GoAway")
        decode.kill(signal.SIGTERM)
        assert await decode.wait_exit() == -signal.SIGTERM
        assert len(frontend.answer(key)) < LONG.max_tokens


async def test_a_worker_replaced_at_its_address_refuses_the_old_ones_tickets(tmp_path: Path) -> None:
    ports = {name: find_free_port() for name in ("session_port", "kv_port", "admin_port")}
    with ExitStack() as stack:
        prefill, old = stack.enter_context(worker_processes(tmp_path, [scripted()], [scripted(worker=ports)]))
        async with frontend_to(prefill, old) as frontend:
            await assert_serves(frontend, prefill, old)
            stale_key = frontend.new_key()
            stale = frontend.ticket(stale_key)
            old.kill(signal.SIGKILL)
            await old.wait_exit()
            (new,) = stack.enter_context(worker_processes(tmp_path, [], [scripted(worker=ports)]))
            await new.wait_ready()
            await wait_until(
                lambda: (
                    frontend.decode.heard.welcome is not None and frontend.decode.welcome.epoch != stale.decode_epoch
                ),
                "a session with the new one",
            )
            prompt = prompt_of(40)
            attempt = frontend.attempt(stale_key, prompt, GREEDY)
            frontend.run(attempt, prompt, stale)
            await wait_until(lambda: stale_key in frontend.prefill.heard.failures, "a refusal")
            assert frontend.prefill.heard.failures[stale_key].code is ErrorCode.stale_epoch
            await assert_serves(frontend, prefill, new)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


async def refusal(role: Role, log_dir: Path, settings: dict[str, Any]) -> str:
    """The one line that such a worker ends with, and nothing but log lines before it."""
    with worker_processes(log_dir, *([settings], []) if role is Role.PREFILL else ([], [settings])) as (process,):
        assert await process.wait_exit(60.0) == 1
        *before, line = process.log.splitlines()
        assert all(entry.startswith("{") and '"exception"' not in entry for entry in before), process.log
        assert line.startswith(f"{role}: ")
        return line


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("port", ["session_port", "admin_port"])
async def test_busy_port_is_one_line_that_names_it(tmp_path: Path, taken_port: int, role: Role, port: str) -> None:
    assert f"port {taken_port}" in await refusal(role, tmp_path, scripted(worker={port: taken_port}))


async def test_busy_kv_port_is_one_line_that_names_it(tmp_path: Path, taken_port: int) -> None:
    assert f"port {taken_port}" in await refusal(Role.DECODE, tmp_path, scripted(worker={"kv_port": taken_port}))


async def test_missing_model_folder_is_one_line_that_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    assert f"{folder} does not exist" in await refusal(Role.PREFILL, tmp_path, {"model": {"path": folder}})


async def test_bad_settings_are_one_line_that_names_all(tmp_path: Path) -> None:
    line = await refusal(Role.DECODE, tmp_path, {"engine": {"num_blocks": 0, "bogus": 1}})
    assert "engine.num_blocks" in line
    assert "engine.bogus" in line


async def test_it_says_who_it_is(tmp_path: Path) -> None:
    with worker_processes(tmp_path, [scripted(worker={"worker_id": "prefill-7"})], []) as (process,):
        status = await process.wait_ready()
        assert (status.worker_id, status.pid) == ("prefill-7", process.pid)
        process.kill(signal.SIGINT)
        assert await process.wait_exit() == 0
        with pytest.raises(PdserveError, match="cannot reach the worker at"):
            await process.status()
