"""What a prompt need not compute again, and when its blocks are given back."""

from dataclasses import replace

import numpy as np
import pytest

from pdserve.engine.work import Commit, Prefill, Release, Stop
from tests.unit.engine.scheduler.bench import Bench, first_tokens, group, key


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
