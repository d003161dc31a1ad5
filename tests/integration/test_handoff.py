"""Prefill, push and decode on real ports with the scripted engine, whose answers depend on every byte of the cache."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pdserve.core.errors import ErrorCode
from pdserve.core.events import FinishReason, Stage
from pdserve.core.sampling import SamplingParams
from pdserve.engine.interfaces import Bytes
from pdserve.engine.work import NO_TOKEN, Sampled
from tests.worker_pair import GREEDY, answer_to, prompt_of, scripted_settings, wait_until, worker_pair

pytestmark = pytest.mark.asyncio

BLOCK, CHUNK = 16, 64


@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 200])
async def test_answer_through_the_split_equals_the_engine_alone(num_tokens: int) -> None:
    settings = scripted_settings(engine={"step_tokens": CHUNK, "max_running": 32})
    async with worker_pair(settings, settings) as pair:
        prompt = prompt_of(num_tokens)
        for _ in ("cold", "warm"):
            key = pair.dispatch(prompt, GREEDY)
            await pair.finish(key)
            assert pair.decode.heard.ids(key) == answer_to(prompt, GREEDY)
            assert pair.prefill.heard.ids(key) == answer_to(prompt, GREEDY)[:1]
            await pair.settle()


async def test_a_layer_arrives_while_its_step_computes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's second layer waits here until decode has the first one."""
    monkeypatch.setattr("services.prefill.cursor.layers_per_frame", lambda geometry, num_tokens: 1)
    arrived = threading.Event()
    settings = scripted_settings(engine={"step_tokens": CHUNK, "max_running": 32})
    async with worker_pair(settings, settings) as pair:
        prefill_pool = pair.prefill.worker._engine_built.runner.pool
        decode_pool = pair.decode.worker._engine_built.runner.pool
        write, receive = prefill_pool.write, decode_pool.write
        received = []

        def write_later(block_ids: Sequence[int], tokens: range, layers: range, data: Bytes) -> None:
            assert layers.start == 0 or arrived.wait(20), "the first layer was not sent"
            arrived.clear()
            write(block_ids, tokens, layers, data)

        def note(block_ids: Sequence[int], tokens: range, layers: range, data: Bytes) -> None:
            receive(block_ids, tokens, layers, data)
            if len(tokens) > 1:  # no decode step's
                received.append((tokens, layers))
                if layers.start == 0:
                    arrived.set()

        prefill_pool.write, decode_pool.write = write_later, note
        prompt = prompt_of(CHUNK + 10)
        key = pair.dispatch(prompt, GREEDY)
        await pair.finish(key)
        assert received == [
            (tokens, layers)
            for tokens in (range(CHUNK), range(CHUNK, CHUNK + 10))
            for layers in (range(1), range(1, 2))
        ]
        assert pair.decode.heard.ids(key) == answer_to(prompt, GREEDY)
        await pair.settle()


async def test_a_prompt_that_fails_when_layers_of_it_have_arrived_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.prefill.cursor.layers_per_frame", lambda geometry, num_tokens: 1)
    arrived = threading.Event()
    async with worker_pair() as pair:
        runner = pair.prefill.worker._engine_built.runner
        decode_pool = pair.decode.worker._engine_built.runner.pool
        run, receive = runner.run, decode_pool.write

        def run_in_vain(*step: Any) -> list[list[Sampled]]:
            rows = run(*step)
            assert arrived.wait(20), "no layer was sent"
            return [[NO_TOKEN for _ in row] for row in rows]

        def note(*part: Any) -> None:
            receive(*part)
            arrived.set()

        runner.run, decode_pool.write = run_in_vain, note
        prompt = prompt_of(30)
        key = pair.dispatch(prompt, GREEDY)
        for link in (pair.prefill, pair.decode):
            await wait_until(lambda link=link: key in link.heard.failures, "the failure")
            assert link.heard.failures[key].code is ErrorCode.engine_failed
            assert key not in link.heard.tokens
        runner.run = run
        # Nothing of it is taken for computed.
        key = pair.dispatch(prompt, GREEDY)
        await pair.finish(key)
        assert pair.prefill.heard.cached_tokens(key) == 0
        assert pair.decode.heard.ids(key) == answer_to(prompt, GREEDY)
        await pair.settle()


async def test_decode_repeats_the_first_token_at_its_position() -> None:
    async with worker_pair() as pair:
        key = pair.dispatch(prompt_of(20), GREEDY)
        await pair.finish(key)
        assert pair.prefill.heard.tokens[key][0] == pair.decode.heard.tokens[key][0]
        assert [token.position for token in pair.decode.heard.tokens[key]] == list(range(20, 28))


async def test_each_process_reports_its_own_stages() -> None:
    async with worker_pair() as pair:
        key = pair.dispatch(prompt_of(50), GREEDY)
        await pair.finish(key)
        await pair.settle()
        await wait_until(lambda: len(pair.prefill.heard.stages.get(key, [])) == 3, "prefill's stages")
        assert [report.stage for report in pair.prefill.heard.stages[key]] == [
            Stage.QUEUE,
            Stage.PREFILL,
            Stage.HANDOFF,
        ]
        assert [report.stage for report in pair.decode.heard.stages[key]] == [Stage.FIRST_STEP]


async def test_siblings_share_one_prefill_and_one_push() -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0)
    async with worker_pair() as pair:
        prompt = prompt_of(37)
        key = pair.dispatch(prompt, params, siblings=(0, 1, 2))
        await pair.finish(key, (0, 1, 2))
        alone = [pair.decode.heard.ids(key, sibling) for sibling in range(3)]
        for sibling in range(3):
            # A replay of one sibling draws the same numbers.
            single = pair.dispatch(prompt, params, siblings=(sibling,))
            await pair.finish(single, (sibling,))
            assert pair.decode.heard.ids(single, sibling) == alone[sibling]
        await pair.settle()


async def test_siblings_whose_first_token_ends_them_leave_the_others_to_decode() -> None:
    async with worker_pair() as pair:
        prompt, params = prompt_of(37), SamplingParams(max_tokens=8, temperature=1.0)
        key = pair.dispatch(prompt, params, siblings=(0, 1))
        await pair.finish(key, (0, 1))
        going_on, ended = (pair.decode.heard.ids(key, sibling)[0] for sibling in (0, 1))
        assert going_on != ended
        key = pair.dispatch(prompt, replace(params, stop_ids=frozenset({ended})), siblings=(0, 1))
        await pair.finish(key, (0,))
        assert pair.prefill.heard.tokens[key][1].finish is FinishReason.STOP
        assert not pair.decode.heard.ids(key, 1)
        await pair.settle()


async def test_a_replay_goes_on_where_the_output_stopped() -> None:
    async with worker_pair() as pair:
        prompt = prompt_of(37)
        whole = answer_to(prompt, GREEDY)
        key = pair.dispatch([*prompt, *whole[:3]], GREEDY, prompt_tokens=len(prompt))
        await pair.finish(key)
        assert pair.decode.heard.ids(key) == whole[3:]
        assert pair.decode.heard.tokens[key][-1].finish is FinishReason.LENGTH


async def test_one_token_reserves_and_pushes_nothing() -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    async with worker_pair() as pair:
        prompt, key = prompt_of(37), pair.new_key()
        pair.run(pair.attempt(key, prompt, params), prompt, None)
        await wait_until(lambda: pair.prefill.heard.ended(key) == {0}, "the only token")
        assert pair.prefill.heard.ids(key) == answer_to(prompt, params)
        await pair.settle()


async def test_leading_blocks_that_decode_holds_are_not_sent() -> None:
    async with worker_pair() as pair:
        sent: list[int] = []
        pool = pair.decode.worker._kv._pool

        class CountingPool:
            geometry = pool.geometry

            def write(self, block_ids: Sequence[int], tokens: range, layers: range, data: Bytes) -> None:
                if layers.start == 0:
                    sent.append(len(tokens))
                pool.write(block_ids, tokens, layers, data)

        pair.decode.worker._kv._pool = CountingPool()
        prompt = prompt_of(3 * BLOCK)
        for _ in range(2):
            await pair.finish(pair.dispatch(prompt, GREEDY))
            await pair.settle()
        # At most prompt - 1 tokens are held: the last block travels again.
        assert sent == [3 * BLOCK, BLOCK]


async def test_three_hundred_at_once_are_all_right_and_leave_nothing() -> None:
    settings = scripted_settings(engine={"num_blocks": 400, "max_running": 64})
    async with worker_pair(settings, settings) as pair:
        prompts = [prompt_of(20 + seed % 90, seed) for seed in range(300)]
        keys = [pair.dispatch(prompt, GREEDY) for prompt in prompts]
        for key, prompt in zip(keys, prompts, strict=True):
            await pair.finish(key)
            assert pair.decode.heard.ids(key) == answer_to(prompt, GREEDY)
        assert not pair.decode.heard.failures
        await pair.settle()


async def test_no_circular_wait_when_decode_and_prefill_are_full() -> None:
    """Decode holds A's blocks and has none for B; prefill has room for one of the two. Blocks are taken in one order,
    decode then prefill, so B waits without prefill's blocks, and A passes."""
    prompt_blocks = 8
    tight_decode = scripted_settings(engine={"num_blocks": prompt_blocks + 1})
    tight_prefill = scripted_settings(engine={"num_blocks": prompt_blocks})
    async with worker_pair(tight_prefill, tight_decode) as pair:
        prompts = [prompt_of(prompt_blocks * BLOCK, seed) for seed in range(6)]
        keys = [pair.new_key() for _ in prompts]
        work = [
            (pair.attempt(key, prompt, GREEDY), prompt, pair.ticket(key))
            for key, prompt in zip(keys, prompts, strict=True)
        ]
        # Opposite orders at the two workers.
        for attempt, prompt, ticket in work:
            pair.reserve(attempt, prompt, ticket)
        for attempt, prompt, ticket in reversed(work):
            pair.run(attempt, prompt, ticket)
        for key, prompt in zip(keys, prompts, strict=True):
            await pair.finish(key)
            assert pair.decode.heard.ids(key) == answer_to(prompt, GREEDY)
        await pair.settle()


async def test_first_token_that_ends_everything_frees_the_reservation() -> None:
    async with worker_pair() as pair:
        prompt = prompt_of(37)
        first = answer_to(prompt, GREEDY)[0]
        params = SamplingParams(max_tokens=8, temperature=0.0, stop_ids=frozenset({first}))
        key = pair.dispatch(prompt, params)
        await wait_until(lambda: pair.prefill.heard.ended(key) == {0}, "the only token")
        await pair.settle()
        assert not pair.decode.heard.ids(key)


async def test_a_request_that_fits_no_empty_pool_is_refused() -> None:
    async with worker_pair(decode=scripted_settings(engine={"num_blocks": 4})) as pair:
        key = pair.dispatch(prompt_of(100), GREEDY)
        await wait_until(lambda: key in pair.decode.heard.failures, "a refusal")
        assert pair.decode.heard.failures[key].spec.http_status == 400
        await pair.settle()
        await pair.finish(pair.dispatch(prompt_of(20), GREEDY))


async def test_deadline_frees_both_sides() -> None:
    slow = scripted_settings(engine={"scripted": {"step_s": 0.02}})
    async with worker_pair(decode=slow) as pair:
        params = SamplingParams(max_tokens=500, temperature=0.0)
        key = pair.dispatch(prompt_of(30), params, remaining_s=0.3)
        await wait_until(lambda: key in pair.decode.heard.failures, "the deadline")
        assert pair.decode.heard.failures[key].code is ErrorCode.total_timeout
        await pair.settle()


async def test_unknown_model_is_refused_by_both() -> None:
    async with worker_pair() as pair:
        key = pair.dispatch(prompt_of(30), GREEDY, model="other")
        for link in (pair.prefill, pair.decode):
            await wait_until(lambda link=link: key in link.heard.failures, "a refusal")
            assert link.heard.failures[key].code is ErrorCode.model_not_found
        await pair.settle()


async def test_colocated_worker_needs_no_prefill_worker() -> None:
    async with worker_pair(decode=scripted_settings(worker={"colocated": True})) as pair:
        assert pair.decode.welcome.colocated
        prompt, key = prompt_of(37), pair.new_key()
        pair.reserve(pair.attempt(key, prompt, GREEDY), prompt, None)
        await pair.finish(key)
        assert pair.decode.heard.ids(key) == answer_to(prompt, GREEDY)
        await pair.settle()


async def test_reservation_without_a_ticket_is_refused_by_any_other_worker() -> None:
    async with worker_pair() as pair:
        prompt, key = prompt_of(37), pair.new_key()
        pair.reserve(pair.attempt(key, prompt, GREEDY), prompt, None)
        await wait_until(lambda: key in pair.decode.heard.failures, "a refusal")
        assert pair.decode.heard.failures[key].code is ErrorCode.protocol_violation
