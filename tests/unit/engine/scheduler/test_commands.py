"""What becomes of every command in every phase of an attempt."""

from collections.abc import Callable

import pytest

from pdserve.core.errors import IllegalTransition
from pdserve.engine.work import NO_TOKEN, Command, Commit, Prefill, Release, Reserve, Stop
from tests.unit.engine.scheduler.bench import Bench, first_tokens, group, key


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
