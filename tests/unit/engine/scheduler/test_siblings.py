"""The answers to one prompt: which blocks they share, and how each ends."""

from dataclasses import replace

from pdserve.core.events import FinishReason
from pdserve.engine.work import BlockCopy, Commit, Prefill, Release, StepPlan, Stop
from tests.unit.engine.scheduler.bench import Bench, first_tokens, group


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
