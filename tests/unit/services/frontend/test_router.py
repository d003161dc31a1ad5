"""Routing decides by load, prefix and chance, and by nothing else."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.events import EngineLoad
from services.frontend.router import Candidate, Dispatched, Pick, affinity_of, choose_decode, choose_prefill

NOTHING = Dispatched()


def never(_: int) -> int:
    raise AssertionError("nothing was to be drawn")


def drawing(*numbers: int) -> Pick:
    remaining = list(numbers)
    return lambda below: remaining.pop(0) % below


def prefill(name: str, queued_tokens: int = 0, since_tokens: int = 0, tokens_per_s: float = 1000.0) -> Candidate:
    load = EngineLoad(queued_tokens=queued_tokens, tokens_per_s=tokens_per_s)
    return Candidate(name, load, Dispatched(tokens=since_tokens))


def decode(name: str, running: int = 0, free_blocks: int = 100, since: Dispatched = NOTHING) -> Candidate:
    return Candidate(name, EngineLoad(running_sequences=running, free_blocks=free_blocks, total_blocks=100), since)


def test_of_two_prefill_workers_the_one_with_the_shorter_wait_is_chosen() -> None:
    assert choose_prefill([prefill("a", 500), prefill("b", 100)], 10, b"", never).name == "b"
    # The longer queue is the shorter wait on a faster worker.
    assert choose_prefill([prefill("a", 500, tokens_per_s=9000), prefill("b", 100)], 10, b"", never).name == "a"


def test_own_dispatches_since_the_last_pulse_count() -> None:
    assert choose_prefill([prefill("a", 0, since_tokens=900), prefill("b", 100)], 10, b"", never).name == "b"
    given_three = Dispatched(sequences=3)
    assert choose_decode([decode("a", running=2, since=given_three), decode("b", running=4)], 1, never).name == "b"


def test_of_many_workers_two_random_ones_are_compared() -> None:
    candidates = [prefill(name, queued) for name, queued in (("a", 0), ("b", 400), ("c", 300), ("d", 200))]
    assert choose_prefill(candidates, 10, b"", drawing(1, 1)).name == "c"


@given(count=st.integers(3, 8), first=st.integers(0, 100), second=st.integers(0, 100))
def test_the_two_random_ones_are_never_the_same(count: int, first: int, second: int) -> None:
    candidates = [decode(str(i), running=i) for i in range(count)]
    chosen = choose_decode(candidates, 1, drawing(first, second))
    first_index, other = first % count, second % (count - 1)
    assert chosen.name == str(min(first_index, other + (other >= first_index)))


def test_decode_prefers_room_then_few_sequences_then_free_blocks() -> None:
    assert (
        choose_decode([decode("full", 0, free_blocks=5), decode("busy", 9, free_blocks=50)], 10, never).name == "busy"
    )
    assert choose_decode([decode("a", 3, free_blocks=90), decode("b", 2, free_blocks=20)], 10, never).name == "b"
    assert choose_decode([decode("a", 3, free_blocks=90), decode("b", 3, free_blocks=20)], 10, never).name == "a"


def prompts(count: int, tokens: int = 64) -> list[bytes]:
    return [affinity_of([number * 1000 + i for i in range(tokens)], 16, "") for number in range(count)]


def favourites(names: Sequence[str]) -> list[str]:
    return [choose_prefill([prefill(name) for name in names], 64, affinity, never).name for affinity in prompts(200)]


def test_prompts_with_the_same_beginning_go_to_the_same_worker() -> None:
    beginning = list(range(48))
    same = {affinity_of([*beginning, last], 16, "mine") for last in range(5)}
    assert len(same) == 1
    assert affinity_of([*beginning, 1], 16, "yours") not in same


@pytest.mark.parametrize("tokens", [1, 15, 16])
def test_a_prompt_without_a_whole_block_before_its_last_token_has_no_favourite(tokens: int) -> None:
    assert affinity_of(range(tokens), 16, "") == b""


def test_a_worker_that_leaves_moves_only_its_own_prompts() -> None:
    before = favourites(["a", "b", "c", "d"])
    after = favourites(["a", "b", "d"])
    assert all(now == was for was, now in zip(before, after, strict=True) if was != "c")
    assert {"a", "b", "c", "d"} == set(before)


def test_a_favourite_that_is_too_busy_is_passed_over() -> None:
    affinity = prompts(1)[0]
    names = ["a", "b", "c"]
    favourite = choose_prefill([prefill(name) for name in names], 64, affinity, never).name
    busy = [prefill(name, 5000 if name == favourite else 0) for name in names]
    assert choose_prefill(busy, 64, affinity, drawing(0, 0)).name != favourite
    evenly = [prefill(name, 5000) for name in names]
    assert choose_prefill(evenly, 64, affinity, never).name == favourite
