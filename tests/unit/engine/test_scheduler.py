"""What a step is made of, who is admitted when, and what becomes of every command in every phase."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pdserve.core.errors import ErrorCode, IllegalTransition, InvalidRequest, PdserveError
from pdserve.core.events import FinishReason, Stage, StageReport, Token
from pdserve.engine.settings import SchedulerSettings
from pdserve.engine.work import (
    NO_TOKEN,
    BlockCopy,
    Command,
    Commit,
    Granted,
    Group,
    Prefill,
    Progress,
    Release,
    Reserve,
    Sampled,
    StepPlan,
    Stop,
)
from tests.calls import count_calls
from tests.unit.engine.scheduling import BLOCK_SIZE, Bench, first_tokens, group, key

# A step.


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


# Admission.


def test_priority_comes_before_age_and_age_before_the_order_of_coming() -> None:
    bench = Bench(step_tokens=100)
    young, old, urgent = group(1, arrival_s=3.0), group(2, arrival_s=1.0), group(3, arrival_s=9.0, priority=-1)
    twin = group(4, arrival_s=3.0)
    bench.apply(*(Prefill(prompt) for prompt in (young, old, urgent, twin)))
    assert [token.key for token in bench.step().tokens] == [prompt.key for prompt in (urgent, old, young, twin)]


def test_a_prompt_is_admitted_whole_or_not_at_all() -> None:
    bench = Bench(total_blocks=10, step_tokens=8)
    bench.prefilled(group(1, prompt_tokens=4 * BLOCK_SIZE))
    bench.apply(Prefill(group(2, prompt_tokens=7 * BLOCK_SIZE)))
    bench.step()
    assert bench.used_blocks == 4
    assert not bench.scheduler.has_work
    bench.apply(Release(key(1)))
    bench.step()
    assert bench.used_blocks == 7


def test_a_waiting_attempt_is_not_overtaken_by_younger_ones_that_would_fit() -> None:
    bench = Bench(total_blocks=10, step_tokens=100)
    bench.prefilled(group(1, prompt_tokens=4 * BLOCK_SIZE, arrival_s=1.0))
    bench.apply(Prefill(group(2, prompt_tokens=7 * BLOCK_SIZE, arrival_s=2.0)), Prefill(group(3, 4, arrival_s=3.0)))
    assert bench.step().tokens == []
    bench.apply(Release(key(1)))
    assert [token.key for token in bench.step().tokens] == [key(2), key(3)]


def test_when_the_one_in_front_leaves_the_next_is_admitted() -> None:
    bench = Bench(total_blocks=10, step_tokens=100)
    bench.prefilled(group(1, prompt_tokens=4 * BLOCK_SIZE, arrival_s=1.0))
    bench.apply(Prefill(group(2, prompt_tokens=7 * BLOCK_SIZE, arrival_s=2.0)), Prefill(group(3, 4, arrival_s=3.0)))
    bench.step()
    bench.apply(Stop(key(2)))
    assert [token.key for token in bench.step().tokens] == [key(3)]


def test_a_prompt_takes_only_its_own_blocks_however_many_siblings_it_has() -> None:
    bench = Bench()
    bench.prefilled(group(prompt_tokens=6, n=4, max_tokens=50))
    assert bench.used_blocks == 2


@pytest.mark.parametrize(
    ("prompt_tokens", "n", "max_tokens", "blocks"),
    [
        (6, 1, 8, 4),
        (6, 3, 8, 1 + 3 * 3),
        (8, 3, 8, 2 + 3 * 2),
        (1, 2, 1, 2),
        (4, 2, 1, 1 + 2),
        (190, 1, 100, 50),  # The context ends at 200 tokens.
    ],
)
@pytest.mark.parametrize("colocated", [False, True])
def test_a_reservation_shares_full_prompt_blocks_and_takes_all_others_for_each_sibling(
    prompt_tokens: int, n: int, max_tokens: int, blocks: int, colocated: bool
) -> None:
    prompt = group(prompt_tokens=prompt_tokens, n=n, max_tokens=max_tokens)
    for total_blocks, fits in ((blocks, True), (blocks - 1, False)):
        bench = Bench(total_blocks=total_blocks)
        bench.apply(Prefill(prompt, then_decode=True) if colocated else Reserve(prompt))
        bench.scheduler.plan()
        assert bench.used_blocks == (blocks if fits else 0)
        assert (prompt.key in bench.scheduler.attempts) == fits


def test_a_grant_names_the_prompts_blocks() -> None:
    bench = Bench()
    assert bench.granted(group(prompt_tokens=9)) == Granted(key(1), (0, 1, 2), 0)


def test_reservations_wait_for_blocks_and_for_places_in_the_batch() -> None:
    bench = Bench(total_blocks=8, max_sequences=2)
    bench.granted(group(1, prompt_tokens=16, max_tokens=12))
    bench.apply(Reserve(group(2, prompt_tokens=4, max_tokens=4)))
    assert bench.step().granted == []
    bench.apply(Release(key(1)))
    assert [granted.key for granted in bench.step().granted] == [key(2)]
    bench.apply(Reserve(group(3, prompt_tokens=4, max_tokens=4, n=2)))
    assert bench.step().granted == []
    bench.apply(Stop(key(3), frozenset([1])))
    assert [granted.key for granted in bench.step().granted] == [key(3)]


@pytest.mark.parametrize(
    ("prompt", "code", "param"),
    [
        (group(prompt_tokens=0), ErrorCode.invalid_request, "prompt"),
        (group(prompt_tokens=200), ErrorCode.context_length_exceeded, "prompt"),
        (group(prompt_tokens=60, max_tokens=8), ErrorCode.context_length_exceeded, "max_tokens"),
        (group(n=9, prompt_tokens=1, max_tokens=1), ErrorCode.invalid_request, "n"),
        (replace(group(), siblings=()), ErrorCode.invalid_request, "n"),
        (group(replayed_tokens=8, max_tokens=8), ErrorCode.invalid_request, "max_tokens"),
    ],
)
def test_what_can_never_run_is_refused_at_once(prompt: Group, code: ErrorCode, param: str) -> None:
    bench = Bench(total_blocks=16)
    bench.apply(Reserve(prompt))
    (failed,) = bench.step().failed
    assert isinstance(failed.error, InvalidRequest)
    assert (failed.key, failed.error.code, failed.error.param) == (prompt.key, code, param)
    assert failed.error.spec.http_status == 400
    assert not bench.scheduler.attempts
    assert bench.used_blocks == 0


def test_a_prompt_that_is_larger_than_the_pool_names_the_prompt() -> None:
    bench = Bench(total_blocks=4)
    bench.apply(Prefill(group(prompt_tokens=17)))
    (failed,) = bench.step().failed
    assert (failed.error.code, failed.error.param) == (ErrorCode.context_length_exceeded, "prompt")


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    bench = Bench(max_waiting=2)
    bench.apply(*(Prefill(group(counter)) for counter in (1, 2, 3)))
    outcome = bench.step()
    (failed,) = outcome.failed
    assert (failed.key, failed.error.code) == (key(3), ErrorCode.queue_full)
    assert failed.error.retry_after_s
    assert len(outcome.tokens) == 2


@pytest.mark.parametrize("limits", [{"max_sequences": 0}, {"max_sequences": 17, "step_tokens": 16}, {"max_waiting": 0}])
def test_settings_that_cannot_work_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="max_"):
        SchedulerSettings(**limits)


# The prefix cache.


def test_a_second_prompt_computes_only_what_the_first_did_not() -> None:
    bench = Bench()
    bench.prefilled(group(1, 10, first_id=0))
    bench.apply(Prefill(group(2, 13, first_id=0)))
    outcome = bench.step()
    (part,) = bench.plan.slices
    assert (part.start, part.end) == (8, 13)
    assert outcome.progress[0].computed_tokens == 13
    assert outcome.stages[-1].cached_tokens == 8


@pytest.mark.parametrize(("prompt_tokens", "held_tokens"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_at_least_one_token_is_always_left(prompt_tokens: int, held_tokens: int) -> None:
    bench = Bench()
    bench.prefilled(group(1, 20, first_id=0))
    bench.apply(Release(key(1)))
    assert bench.granted(group(2, prompt_tokens, first_id=0)).held_tokens == held_tokens


def test_nothing_is_shared_between_scopes() -> None:
    bench = Bench()
    bench.prefilled(group(1, 20, first_id=0, cache_scope="a"))
    assert bench.granted(group(2, 20, first_id=0, cache_scope="b")).held_tokens == 0
    assert bench.granted(group(3, 20, first_id=0, cache_scope="a")).held_tokens == 16


def test_blocks_are_in_the_cache_as_they_fill() -> None:
    bench = Bench(step_tokens=16)
    bench.apply(Prefill(group(1, 40, first_id=0)))
    bench.step()
    assert bench.granted(group(2, 40, first_id=0)).held_tokens == 16


def test_a_reservation_is_in_the_cache_only_once_it_is_verified() -> None:
    bench = Bench()
    prompt = group(1, 10, first_id=0)
    bench.granted(prompt)
    assert bench.granted(group(2, 10, first_id=0)).held_tokens == 0
    bench.apply(Commit(prompt.key, first_tokens(prompt)))
    assert bench.granted(group(3, 10, first_id=0)).held_tokens == 8


def test_an_answer_is_in_the_cache_for_the_next_turn() -> None:
    bench = Bench()
    prompt = group(1, 6, max_tokens=8)
    bench.granted(prompt)
    bench.apply(Commit(prompt.key, first_tokens(prompt, token_id=100)))
    answer = [token.token_id for o in bench.run(lambda spec: 100 + spec.position) for token in o.tokens]
    assert bench.used_blocks == 0
    next_turn = replace(group(2, 20), token_ids=np.array([*prompt.token_ids, *answer, *range(6)], np.int32))
    # Of 14 tokens the last was never computed.
    assert bench.granted(next_turn).held_tokens == 12


def test_prompt_blocks_are_pinned_until_release_and_cached_after() -> None:
    bench = Bench()
    bench.prefilled(group(1, 10))
    assert bench.used_blocks == 3
    bench.apply(Stop(key(1)))
    assert bench.used_blocks == 3
    bench.apply(Release(key(1)))
    assert (bench.used_blocks, bench.blocks.cached_blocks) == (0, 2)


# Siblings.


def decode_tables(bench: Bench) -> dict[int, list[int]]:
    return {part.samples[0].sibling: list(part.block_ids) for part in bench.plan.slices}


def test_siblings_share_full_blocks_and_copy_the_partly_filled_one() -> None:
    bench = Bench()
    prompt = group(prompt_tokens=6, n=3)
    granted = bench.granted(prompt)
    bench.apply(Commit(prompt.key, first_tokens(prompt)))
    bench.step()
    tables = decode_tables(bench)
    assert tables[0][:2] == list(granted.block_ids)
    assert {table[0] for table in tables.values()} == {granted.block_ids[0]}
    assert len({table[1] for table in tables.values()}) == 3
    assert bench.plan.copies == tuple(BlockCopy(granted.block_ids[1], tables[sibling][1]) for sibling in (1, 2))
    bench.step()
    assert bench.plan.copies == ()


def test_full_prompts_need_no_copy() -> None:
    bench = Bench()
    prompt = group(prompt_tokens=8, n=2)
    bench.granted(prompt)
    bench.apply(Commit(prompt.key, first_tokens(prompt)))
    bench.step()
    assert bench.plan.copies == ()
    assert len({table[2] for table in decode_tables(bench).values()}) == 2


def test_a_sibling_that_is_stopped_before_the_commit_gives_its_blocks_back_and_another_takes_the_original() -> None:
    bench = Bench()
    prompt = group(prompt_tokens=6, n=3)
    granted = bench.granted(prompt)
    assert bench.used_blocks == 10
    bench.apply(Stop(prompt.key, frozenset([0])), Commit(prompt.key, first_tokens(prompt)))
    assert bench.used_blocks == 7
    outcome = bench.step()
    assert {token.sibling for token in outcome.tokens} == {1, 2}
    assert decode_tables(bench)[1][:2] == list(granted.block_ids)


def test_a_sibling_that_ends_frees_its_own_blocks_and_the_last_one_the_groups() -> None:
    bench = Bench()
    prompt = group(prompt_tokens=6, n=2, stop_ids=[9])
    bench.granted(prompt)
    bench.apply(Commit(prompt.key, first_tokens(prompt)))
    assert bench.used_blocks == 7
    bench.step(lambda spec: 9 if spec.sibling == 0 else 50)
    assert bench.used_blocks == 4
    bench.step(lambda spec: 9)
    assert bench.used_blocks == 0
    assert not bench.scheduler.attempts


def test_copies_of_a_group_that_was_released_are_not_made() -> None:
    bench = Bench()
    prompt = group(prompt_tokens=6, n=2)
    bench.granted(prompt)
    bench.apply(Commit(prompt.key, first_tokens(prompt)), Release(prompt.key))
    bench.step()
    assert bench.plan == StepPlan(())


def test_siblings_of_a_prompt_get_a_sample_each_and_go_on_together() -> None:
    bench = Bench()
    prompt = group(prompt_tokens=6, n=3, max_tokens=2, stop_ids=[9])
    bench.apply(Prefill(prompt, then_decode=True))
    first = bench.step(lambda spec: 9 if spec.sibling == 1 else 50)
    assert [(t.sibling, t.position, t.finish) for t in first.tokens] == [
        (0, 6, None),
        (1, 6, FinishReason.STOP),
        (2, 6, None),
    ]
    second = bench.step()
    assert [(t.sibling, t.position, t.finish) for t in second.tokens] == [
        (0, 7, FinishReason.LENGTH),
        (2, 7, FinishReason.LENGTH),
    ]
    assert bench.used_blocks == 0
    assert not bench.scheduler.attempts


def test_only_the_siblings_of_a_replay_run() -> None:
    bench = Bench()
    replay = replace(group(n=1, replayed_tokens=3), siblings=(2,))
    bench.granted(replay)
    bench.apply(Commit(replay.key, first_tokens(replay)))
    assert {token.sibling for token in bench.step().tokens} == {2}


# Token rules.


@pytest.mark.parametrize(
    ("token_ids", "limits", "finish"),
    [
        ([50, 51, 9], {"max_tokens": 8}, FinishReason.STOP),
        ([9], {"max_tokens": 8}, FinishReason.STOP),
        ([50, 51, 52], {"max_tokens": 3}, FinishReason.LENGTH),
        ([50, 51, 9], {"max_tokens": 3}, FinishReason.STOP),
        ([50], {"max_tokens": 1}, FinishReason.LENGTH),
        # The first stop id that may be chosen is the one after min_tokens others.
        ([9, 9, 9], {"max_tokens": 8, "min_tokens": 2}, FinishReason.STOP),
        ([50, 50, 9], {"max_tokens": 8, "min_tokens": 2}, FinishReason.STOP),
        # The context ends at 10 tokens.
        ([50, 51, 52, 53], {"max_tokens": 8}, FinishReason.LENGTH),
        # Replayed output counts.
        ([50, 9], {"max_tokens": 8, "min_tokens": 2, "replayed_tokens": 1}, FinishReason.STOP),
        ([50, 51], {"max_tokens": 3, "replayed_tokens": 1}, FinishReason.LENGTH),
    ],
)
def test_a_sequence_ends_by_a_token_rule(token_ids: list[int], limits: dict[str, int], finish: FinishReason) -> None:
    prompt = group(prompt_tokens=6, stop_ids=[9], **limits)
    start = len(prompt.token_ids)
    bench = Bench(max_context_tokens=10)
    bench.apply(Prefill(prompt, then_decode=True))
    tokens = [token for o in bench.run(lambda spec: token_ids[spec.position - start]) for token in o.tokens]
    assert [(token.position, token.token_id) for token in tokens] == list(enumerate(token_ids, start))
    assert [token.finish for token in tokens] == [None] * (len(tokens) - 1) + [finish]


def test_decode_repeats_the_first_tokens() -> None:
    bench = Bench()
    prompt = group(n=1)
    bench.granted(prompt)
    tokens = first_tokens(prompt)
    bench.apply(Commit(prompt.key, tokens))
    assert bench.scheduler.has_work
    outcome = bench.step()
    assert outcome.tokens[0] == tokens[0]
    assert [token.position for token in outcome.tokens] == [6, 7]


def test_a_first_token_that_ends_the_shorter_context_of_decode_ends_its_sequence() -> None:
    bench = Bench(max_context_tokens=7)
    prompt = group(prompt_tokens=6)
    bench.granted(prompt)
    bench.apply(Commit(prompt.key, first_tokens(prompt)))
    assert [token.finish for token in bench.step().tokens] == [FinishReason.LENGTH]
    assert not bench.scheduler.attempts


@pytest.mark.parametrize("wrong", [lambda tokens: tokens[:1], lambda tokens: [t._replace(position=7) for t in tokens]])
def test_a_commit_with_wrong_first_tokens_fails_and_writes_nothing(wrong: Callable[[object], list[Token]]) -> None:
    bench = Bench()
    prompt = group(n=2)
    bench.granted(prompt)
    bench.apply(Commit(prompt.key, tuple(wrong(first_tokens(prompt)))))
    outcome = bench.step()
    assert [failed.error.code for failed in outcome.failed] == [ErrorCode.protocol_violation]
    assert outcome.tokens == []
    bench.apply(Release(prompt.key))
    assert (bench.used_blocks, bench.blocks.cached_blocks) == (0, 0)


# Every command in every phase.


def absent(bench: Bench) -> None:
    pass


def waiting(bench: Bench) -> None:
    bench.granted(group(99, prompt_tokens=40, max_tokens=200 - 40))
    bench.apply(Prefill(group(n=2, prompt_tokens=60)))
    bench.step()


def waiting_reservation(bench: Bench) -> None:
    bench.granted(group(99, prompt_tokens=40, max_tokens=200 - 40))
    bench.apply(Reserve(group(n=2, prompt_tokens=60)))
    bench.step()


def prefilling(bench: Bench) -> None:
    bench.apply(Prefill(group(n=2, prompt_tokens=20)))
    bench.step()


def prefilled(bench: Bench) -> None:
    bench.prefilled(group(n=2))


def reserved(bench: Bench) -> None:
    bench.granted(group(n=2))


def running(bench: Bench) -> None:
    bench.granted(group(n=2))
    bench.apply(Commit(key(1), first_tokens(group(n=2))))
    bench.step()


def stopped(bench: Bench) -> None:
    running(bench)
    bench.apply(Stop(key(1)))


PHASES = [absent, waiting, waiting_reservation, prefilling, prefilled, reserved, running, stopped]
HELD = PHASES[1:]
Enter = Callable[[Bench], None]


def settle(bench: Bench) -> None:
    """Until nothing but what holds the pool full in some phases is left."""
    bench.apply(Release(key(99)))
    bench.run()


@pytest.mark.parametrize("enter", HELD)
@pytest.mark.parametrize("command", [Prefill(group()), Reserve(group())])
def test_an_attempt_can_only_come_once(enter: Enter, command: Command) -> None:
    bench = Bench()
    enter(bench)
    with pytest.raises(IllegalTransition):
        bench.scheduler.apply(command)


@pytest.mark.parametrize("enter", [waiting, waiting_reservation, prefilling, prefilled, running])
def test_only_a_granted_reservation_can_be_committed(enter: Enter) -> None:
    bench = Bench()
    enter(bench)
    with pytest.raises(IllegalTransition, match="Commit in state"):
        bench.scheduler.apply(Commit(key(1), first_tokens(group(n=2))))


@pytest.mark.parametrize("enter", [absent, stopped])
def test_a_commit_that_comes_too_late_has_no_effect(enter: Enter) -> None:
    bench = Bench()
    enter(bench)
    used_blocks = bench.used_blocks
    bench.apply(Commit(key(1), first_tokens(group(n=2))))
    outcome = bench.step()
    assert (outcome.tokens, outcome.failed, bench.used_blocks) == ([], [], used_blocks)


@pytest.mark.parametrize("enter", PHASES)
def test_what_is_stopped_is_out_before_the_next_step_and_keeps_its_blocks(enter: Enter) -> None:
    bench = Bench()
    enter(bench)
    used_blocks = bench.used_blocks
    bench.apply(Stop(key(1)))
    outcome = bench.step()
    assert not bench.plan
    assert outcome.tokens == []
    assert (outcome.load.running_sequences, outcome.load.queued_sequences, outcome.load.queued_tokens) == (0, 0, 0)
    assert bench.used_blocks == used_blocks
    bench.apply(Stop(key(1)), Release(key(1)))
    settle(bench)
    assert bench.used_blocks == 0
    assert not bench.scheduler.attempts


@pytest.mark.parametrize("enter", PHASES)
def test_what_is_released_is_gone(enter: Enter) -> None:
    bench = Bench()
    enter(bench)
    bench.apply(Release(key(1)))
    assert key(1) not in bench.scheduler.attempts
    bench.apply(Release(key(1)), Stop(key(1)))
    settle(bench)
    assert bench.used_blocks == 0
    assert bench.step().load.free_blocks + bench.blocks.cached_blocks == 64


@pytest.mark.parametrize("enter", HELD)
def test_stopping_one_sibling_leaves_the_other(enter: Enter) -> None:
    bench = Bench()
    enter(bench)
    bench.apply(Stop(key(1), frozenset([0])), Stop(key(1), frozenset([0, 5])))
    bench.apply(Release(key(99)))
    outcomes = bench.run()
    if enter is waiting_reservation or enter is reserved:
        bench.apply(Commit(key(1), first_tokens(group(n=2, prompt_tokens=60 if enter is waiting_reservation else 6))))
        outcomes = bench.run()
    siblings = {token.sibling for outcome in outcomes for token in outcome.tokens}
    assert siblings == (set() if enter in (prefilled, stopped) else {1})
    bench.apply(Release(key(1)))
    assert bench.used_blocks == 0


@pytest.mark.parametrize("enter", HELD)
def test_stopping_the_last_sibling_stops_the_group(enter: Enter) -> None:
    bench = Bench()
    enter(bench)
    bench.apply(Stop(key(1), frozenset([0])), Stop(key(1), frozenset([1])))
    assert not bench.step().load.running_sequences
    bench.apply(Release(key(1)))
    settle(bench)
    assert bench.used_blocks == 0


def test_a_group_in_which_one_was_stopped_is_free_when_the_other_ends() -> None:
    bench = Bench()
    running(bench)
    bench.apply(Stop(key(1), frozenset([0])))
    bench.run()
    assert bench.used_blocks == 0
    assert not bench.scheduler.attempts


@pytest.mark.parametrize("enter", [prefilled, running])
def test_an_attempt_whose_logits_are_not_numbers_fails_alone(enter: Enter) -> None:
    bench = Bench()
    other = group(2)
    bench.prefilled(other)
    bench.apply(Release(other.key))
    enter(bench)
    if enter is prefilled:
        bench.apply(Release(key(1)), Prefill(group(1, n=2, attempt=2)))
    failing = key(1, 2) if enter is prefilled else key(1)
    bench.apply(Prefill(group(3)))
    outcome = bench.step(lambda spec: NO_TOKEN.token_id if spec.token_ids[0] < 2000 else 50)
    assert [failed.key for failed in outcome.failed] == [failing]
    assert {token.key for token in outcome.tokens} == {key(3)}
    bench.apply(Release(failing), Release(key(3)))
    settle(bench)
    assert bench.used_blocks == 0


# Reports.


def test_stages_are_measured_on_the_given_clock() -> None:
    bench = Bench(total_blocks=12, step_tokens=8)
    bench.apply(Prefill(group(1, 12), then_decode=True))
    bench.now_s += 2.0
    stages = [stage for _ in range(4) for stage in bench.step(duration_s=0.25).stages]
    assert stages == [
        StageReport(key(1), Stage.QUEUE, 2.0),
        StageReport(key(1), Stage.PREFILL, 0.5),
        StageReport(key(1), Stage.FIRST_STEP, 0.25),
    ]


def test_decode_reports_the_time_from_commit_to_the_end_of_its_first_step() -> None:
    bench = Bench()
    prompt = group(n=2)
    bench.granted(prompt)
    bench.apply(Commit(prompt.key, first_tokens(prompt)))
    bench.now_s += 1.0
    assert bench.step(duration_s=0.25).stages == [StageReport(prompt.key, Stage.FIRST_STEP, 1.25)]
    assert bench.step().stages == []


def test_the_load_counts_what_waits_and_what_runs() -> None:
    bench = Bench(step_tokens=16)
    bench.apply(Prefill(group(1, 20)), Prefill(group(2, 30)), Reserve(group(3, 10)))
    load = bench.step(duration_s=0.5).load
    assert (load.queued_tokens, load.queued_sequences, load.running_sequences) == (4 + 30, 2, 1)
    assert (load.free_blocks, load.cached_blocks, load.total_blocks) == (59, 0, 64)
    assert load.tokens_per_s == pytest.approx(32.0)


def test_an_idle_scheduler_has_no_work_while_its_queue_waits_for_blocks() -> None:
    bench = Bench(total_blocks=4)
    bench.granted(group(1, prompt_tokens=8, max_tokens=8))
    bench.apply(Reserve(group(2, prompt_tokens=8, max_tokens=8)))
    assert bench.scheduler.has_work
    bench.step()
    assert not bench.scheduler.has_work
    bench.apply(Release(key(1)))
    assert bench.scheduler.has_work


# Cost.


@pytest.mark.parametrize("blocked", [False, True])
def test_a_step_costs_the_same_however_many_wait(blocked: bool) -> None:
    def cost(num_waiting: int) -> list[int]:
        bench = Bench(total_blocks=20_000, max_waiting=20_000, step_tokens=16, max_sequences=8)
        bench.apply(Reserve(group(1, 4, n=7)))
        bench.scheduler.commit(bench.scheduler.plan(), [])
        for counter in range(2, 2 + num_waiting):
            of = group(counter, prompt_tokens=40, n=8 if blocked else 1, arrival_s=float(counter))
            bench.scheduler.apply(Reserve(of) if blocked else Prefill(of))
        bench.scheduler.apply(Commit(key(1), first_tokens(group(1, 4, n=7))))

        def step() -> None:
            plan = bench.scheduler.plan()
            bench.scheduler.commit(plan, [[Sampled(50) for _ in part.samples] for part in plan.slices])

        # Leaving from the middle of the queue is as cheap as a step is.
        stop = Stop(key(1 + num_waiting // 2))
        return [
            count_calls(step),
            count_calls(step),
            count_calls(lambda: bench.scheduler.apply(stop)),
            count_calls(step),
        ]

    assert cost(10_000) == cost(20)


def test_those_who_left_the_queue_leave_nothing_behind() -> None:
    bench = Bench(total_blocks=4)
    bench.granted(group(1, prompt_tokens=8, max_tokens=8))
    for counter in range(2, 2000):
        of = group(counter, prompt_tokens=8, max_tokens=8)
        bench.scheduler.apply(Reserve(of))
        bench.scheduler.apply(Stop(of.key))
    assert list(bench.scheduler.attempts) == [key(1)]
    assert count_calls(bench.scheduler.plan) < 30


# Log-probabilities of prompts.


def scored(bench: Bench, of: Group) -> list[float]:
    """The log-probabilities that came for a group, from its second token on, without a gap."""
    logprobs: list[float] = []
    for outcome in bench.run():
        for part in outcome.prompt_logprobs:
            assert part.key == of.key
            assert part.start == len(logprobs) + 1
            logprobs += [entry.logprob for entry in part.entries]
    return logprobs


@pytest.mark.parametrize("prompt_tokens", [1, 2, 15, 16, 17, 37])
def test_every_prompt_token_but_the_first_is_scored(prompt_tokens: int) -> None:
    bench = Bench(step_tokens=16)
    prompt = group(prompt_tokens=prompt_tokens, prompt_logprobs=2)
    bench.apply(Prefill(prompt))
    assert scored(bench, prompt) == [-float(token_id) for token_id in prompt.token_ids[1:]]


def test_replayed_output_is_not_scored() -> None:
    bench = Bench(step_tokens=16)
    prompt = group(prompt_tokens=10, replayed_tokens=20, max_tokens=30, prompt_logprobs=0)
    bench.apply(Prefill(prompt))
    assert scored(bench, prompt) == [-float(token_id) for token_id in prompt.token_ids[1:10]]


def test_what_the_cache_holds_is_computed_again_where_it_is_scored() -> None:
    bench = Bench()
    bench.prefilled(group(1, 12, first_id=5))
    again = group(2, 12, first_id=5, prompt_logprobs=1)
    bench.apply(Prefill(again))
    assert scored(bench, again) == [-float(token_id) for token_id in again.token_ids[1:]]
    plain = group(3, 12, first_id=5)
    bench.apply(Prefill(plain))
    (part,) = bench.scheduler.plan().slices
    assert (part.start, part.scores) == (8, None)


def test_a_step_scores_so_many_tokens_and_leaves_the_rest_to_others() -> None:
    bench = Bench(512, step_tokens=1000, max_context_tokens=2000)
    bench.apply(Prefill(group(1, 600, prompt_logprobs=0)), Prefill(group(2, 50)))
    sizes = []
    while bench.scheduler.has_work:
        bench.step()
        sizes.append([len(part.token_ids) for part in bench.plan.slices])
    assert sizes == [[256, 50], [256], [88]]
