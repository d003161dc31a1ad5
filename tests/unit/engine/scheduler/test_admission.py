"""Who is admitted when, who waits, and who is refused."""

from dataclasses import replace

import pytest

from pdserve.core.errors import ErrorCode, InvalidRequest
from pdserve.engine.settings import SchedulerSettings
from pdserve.engine.work import Granted, Group, Prefill, Release, Reserve, Stop
from tests.unit.engine.scheduler.bench import BLOCK_SIZE, Bench, group, key


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
