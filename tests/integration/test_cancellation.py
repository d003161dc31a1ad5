"""A cancelled sequence is out by the next step, whatever phase it was in, on both workers (invariants 4 and 5)."""

import asyncio
import itertools

import pytest

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.sampling import SamplingParams
from tests.worker_pair import GREEDY, WorkerPair, answer_to, prompt_of, scripted_settings, wait_until, worker_pair

pytestmark = pytest.mark.asyncio

LONG = SamplingParams(max_tokens=400, temperature=0.0)
STEP_S = 0.01


def state(pair: WorkerPair, side: str) -> set[str]:
    """Names of the states that a worker's attempts are in."""
    worker = (pair.prefill if side == "prefill" else pair.decode).worker
    return {worker.state_name(key) for key in worker.held}


async def assert_all_gone_and_well(pair: WorkerPair) -> None:
    """Nothing is held, and the next request is right."""
    await pair.settle()
    prompt = prompt_of(40, seed=99)
    key = pair.dispatch(prompt, GREEDY)
    await pair.finish(key)
    assert pair.decode.heard.ids(key) == answer_to(prompt, GREEDY)
    await pair.settle()


async def test_while_it_waits_for_blocks_at_decode() -> None:
    async with worker_pair(decode=scripted_settings(engine={"num_blocks": 40, "scripted": {"step_s": STEP_S}})) as pair:
        running = pair.dispatch(prompt_of(100), LONG)
        await wait_until(lambda: state(pair, "decode") == {"Running"}, "the first to run")
        waiting = pair.dispatch(prompt_of(200, seed=1), LONG)
        await wait_until(lambda: "Reserved" in state(pair, "decode"), "the second to wait")
        assert "Queued" in state(pair, "prefill")
        pair.cancel(waiting)
        await wait_until(lambda: waiting not in pair.decode.worker.held, "the second to leave decode")
        await wait_until(lambda: not pair.prefill.worker.held, "the second to leave prefill")
        assert running in pair.decode.worker.held
        pair.cancel(running)
        await assert_all_gone_and_well(pair)


async def test_the_freed_slot_is_taken_by_the_one_that_waits() -> None:
    async with worker_pair(decode=scripted_settings(engine={"num_blocks": 40, "scripted": {"step_s": STEP_S}})) as pair:
        running = pair.dispatch(prompt_of(100), LONG)
        waiting = pair.dispatch(prompt_of(100, seed=1), LONG)
        await wait_until(lambda: state(pair, "decode") == {"Running", "Reserved"}, "one to run, one to wait")
        pair.cancel(running)
        await wait_until(lambda: len(pair.decode.heard.ids(waiting)) > 3, "the one that waited to run")
        pair.cancel(waiting)
        await pair.settle()


async def test_in_prefill_it_does_not_run_on() -> None:
    slow = scripted_settings(engine={"step_tokens": 32, "max_running": 16, "scripted": {"step_s": STEP_S}})
    async with worker_pair(prefill=slow) as pair:
        key = pair.dispatch(prompt_of(600), GREEDY)
        await wait_until(lambda: state(pair, "prefill") == {"Running"}, "prefill to compute")
        pair.cancel(key)
        await assert_all_gone_and_well(pair)
        assert not pair.prefill.heard.ids(key)


async def test_in_the_handoff_blocks_stay_until_the_transfer_has_stopped() -> None:
    async with worker_pair() as pair:
        gate = asyncio.Event()
        decode = pair.decode.worker
        commit = decode._attempts.commit

        def hold_commit(held: object, first_tokens: object) -> None:
            gate.set()

        decode._attempts.commit = hold_commit
        key = pair.dispatch(prompt_of(50), GREEDY)
        await asyncio.wait_for(gate.wait(), 5)
        await wait_until(lambda: state(pair, "prefill") == {"HandingOff"}, "prefill to hand off")
        pair.cancel(key)
        decode._attempts.commit = commit
        await assert_all_gone_and_well(pair)


async def test_while_it_decodes() -> None:
    async with worker_pair(decode=scripted_settings(engine={"scripted": {"step_s": STEP_S}})) as pair:
        key = pair.dispatch(prompt_of(50), LONG)
        await wait_until(lambda: len(pair.decode.heard.ids(key)) > 3, "decode to run")
        pair.cancel(key, pair.decode)
        await pair.settle()
        assert len(pair.decode.heard.ids(key)) < LONG.max_tokens
        await assert_all_gone_and_well(pair)


async def test_one_sibling_of_three() -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0)
    async with worker_pair(decode=scripted_settings(engine={"scripted": {"step_s": STEP_S}})) as pair:
        key = pair.dispatch(prompt_of(50), params, siblings=(0, 1, 2))
        await wait_until(lambda: len(pair.decode.heard.ids(key)) > 3, "decode to run")
        pair.cancel(key, siblings=(1,))
        await pair.finish(key, (0, 2))
        assert len(pair.decode.heard.ids(key, 1)) < 40
        assert len(pair.decode.heard.ids(key, 0)) == len(pair.decode.heard.ids(key, 2)) == 40
        await assert_all_gone_and_well(pair)


async def test_twice_unknown_and_finished_change_nothing() -> None:
    async with worker_pair() as pair:
        pair.cancel(pair.new_key())
        key = pair.dispatch(prompt_of(50), GREEDY)
        await pair.finish(key)
        pair.cancel(key)
        pair.cancel(key)
        await assert_all_gone_and_well(pair)


async def test_unless_running_is_answered_exactly_once() -> None:
    async with worker_pair(decode=scripted_settings(engine={"scripted": {"step_s": STEP_S}})) as pair:
        running = pair.dispatch(prompt_of(50), LONG)
        await wait_until(lambda: len(pair.decode.heard.ids(running)) > 1, "decode to run")
        reserved, prompt = pair.new_key(), prompt_of(50, seed=1)
        pair.reserve(pair.attempt(reserved, prompt, LONG), prompt, pair.ticket(reserved))
        for key in (running, reserved):
            pair.cancel(key, pair.decode, unless_running=True)
        await wait_until(lambda: reserved in pair.decode.heard.failures, "an answer")
        assert pair.decode.heard.failures[reserved].code is ErrorCode.cancelled
        seen = len(pair.decode.heard.ids(running))
        await wait_until(lambda: len(pair.decode.heard.ids(running)) > seen, "the running one to go on")
        assert running not in pair.decode.heard.failures
        pair.cancel(running)
        await assert_all_gone_and_well(pair)


async def test_storm_in_every_phase_leaves_nothing() -> None:
    """Five hundred requests, each cancelled after its own number of loop turns."""
    settings = scripted_settings(engine={"num_blocks": 300, "max_running": 64, "step_tokens": 128})
    async with worker_pair(settings, settings) as pair:
        turns = itertools.cycle([0, 1, 2, 3, 5, 8, 13, 21])

        async def dispatch_and_leave(seed: int) -> None:
            key = pair.dispatch(prompt_of(20 + seed % 150, seed), LONG)
            for _ in range(next(turns)):
                await asyncio.sleep(0.001)
            pair.cancel(key)
            pair.cancel(key)

        for start in range(0, 500, 50):
            await asyncio.gather(*(dispatch_and_leave(seed) for seed in range(start, start + 50)))
        await assert_all_gone_and_well(pair)


async def test_lost_session_frees_everything_before_the_next_hello_is_answered() -> None:
    async with worker_pair(decode=scripted_settings(engine={"scripted": {"step_s": STEP_S}})) as pair:
        for seed in range(5):
            pair.dispatch(prompt_of(50, seed), LONG)
        await wait_until(lambda: state(pair, "decode") == {"Running"}, "decode to run")
        for link in (pair.prefill, pair.decode):
            link.session._connection._break(PdserveError(ErrorCode.worker_lost, "cut by the test"))
        for link in (pair.prefill, pair.decode):
            await wait_until(lambda link=link: bool(link.heard.losses), "the loss")
            await wait_until(lambda link=link: link.heard.welcome is not None, "a new session")
        assert not pair.decode.worker.held
        assert not pair.prefill.worker.held
        await assert_all_gone_and_well(pair)


async def test_silent_frontend_loses_its_lease() -> None:
    decode = scripted_settings(engine={"scripted": {"step_s": STEP_S}}, session={"dead_after_s": 0.5})
    async with worker_pair(decode=decode) as pair:
        pair.dispatch(prompt_of(50), LONG)
        await wait_until(lambda: state(pair, "decode") == {"Running"}, "decode to run")
        # The connection stays, but nothing is said any more.
        connection = pair.decode.session._connection
        connection._timer.cancel()
        await wait_until(lambda: not pair.decode.worker.held, "the lease to end")
        await wait_until(lambda: bool(pair.decode.heard.losses), "the session to be closed")
        await wait_until(lambda: pair.decode.heard.welcome is not None, "a new session")
        await assert_all_gone_and_well(pair)
