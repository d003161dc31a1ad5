"""What a step is made of, and what is learned from it."""

import numpy as np
import pytest

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import Token
from pdserve.engine.work import Commit, Prefill, Progress, Sampled, StepPlan
from tests.unit.engine.scheduler.bench import BLOCK_SIZE, Bench, first_tokens, group, key


def test_a_prompt_is_computed_in_chunks_of_the_step_budget() -> None:
    bench = Bench(step_tokens=16)
    prompt = group(prompt_tokens=37)
    bench.apply(Prefill(prompt))
    chunks, progress, tokens = [], [], []
    for outcome in (bench.step() for _ in range(3)):
        (part,) = bench.plan.slices
        chunks.append((part.start, part.end, len(part.samples)))
        np.testing.assert_array_equal(part.token_ids, prompt.token_ids[part.start : part.end])
        progress += outcome.progress
        tokens += outcome.tokens
    assert chunks == [(0, 16, 0), (16, 32, 0), (32, 37, 1)]
    block_ids = tuple(bench.plan.slices[0].block_ids)
    assert progress == [Progress(prompt.key, computed, block_ids) for computed in (16, 32, 37)]
    assert tokens == [Token(prompt.key, 0, 37, 50)]
    assert not bench.scheduler.has_work


def test_what_a_prompt_leaves_of_the_budget_goes_to_the_next() -> None:
    bench = Bench(step_tokens=16)
    bench.apply(Prefill(group(1, 20)), Prefill(group(2, 6)), Prefill(group(3, 30)))
    steps = []
    while bench.scheduler.has_work:
        bench.step()
        steps.append([(int(part.token_ids[0]) // 1000, len(part.token_ids)) for part in bench.plan.slices])
    assert steps == [[(1, 16)], [(1, 4), (2, 6), (3, 6)], [(3, 16)], [(3, 8)]]


def test_running_sequences_come_first_and_prompts_get_the_rest_of_the_budget() -> None:
    bench = Bench(step_tokens=16)
    bench.apply(Prefill(group(1, 4, n=3), then_decode=True))
    bench.step()
    bench.apply(Prefill(group(2, 40)))
    bench.step()
    assert [len(part.token_ids) for part in bench.plan.slices] == [1, 1, 1, 13]


def test_a_decode_step_computes_the_last_token_and_samples_the_next() -> None:
    bench = Bench()
    prompt = group(prompt_tokens=6)
    bench.granted(prompt)
    bench.apply(Commit(prompt.key, first_tokens(prompt, token_id=77)))
    bench.step(lambda spec: 88)
    for position, last in ((7, 77), (8, 88), (9, 88)):
        (part,) = bench.plan.slices
        assert (part.start, part.token_ids.tolist()) == (position - 1, [last])
        assert len(part.block_ids) * BLOCK_SIZE >= position
        (spec,) = part.samples
        assert (spec.position, spec.num_output_tokens, spec.seed, spec.sibling) == (position, position - 6, 7, 0)
        np.testing.assert_array_equal(spec.token_ids[:6], prompt.token_ids)
        assert len(spec.token_ids) == position
        bench.step(lambda spec: 88)


def test_an_empty_plan_is_false_and_commits() -> None:
    bench = Bench()
    assert not bench.scheduler.plan()
    assert bench.step().load.total_blocks == 64
    assert not bench.scheduler.has_work


def test_only_the_last_plan_can_be_learned_from_and_only_with_fitting_results() -> None:
    bench = Bench()
    bench.apply(Prefill(group()))
    plan = bench.scheduler.plan()
    with pytest.raises(ValueError, match="last plan"):
        bench.scheduler.commit(StepPlan(()), [])
    with pytest.raises(ValueError, match="last plan"):
        bench.scheduler.fail(StepPlan(()), PdserveError(ErrorCode.engine_failed, ""))
    for wrong in ([], [[]], [[Sampled(1), Sampled(2)]]):
        with pytest.raises(ValueError, match="last plan"):
            bench.scheduler.commit(plan, wrong)


def test_a_plan_that_could_not_be_run_fails_every_attempt_in_it() -> None:
    bench = Bench(step_tokens=8)
    bench.apply(Prefill(group(1, 3, n=2), then_decode=True))
    bench.step()
    bench.apply(Prefill(group(2, 20)), Prefill(group(3, 20)))
    error = PdserveError(ErrorCode.engine_failed, "")
    outcome = bench.scheduler.fail(bench.scheduler.plan(), error)
    assert [(failed.key, failed.error) for failed in outcome.failed] == [(key(1), error), (key(2), error)]
    bench.scheduler.check()
