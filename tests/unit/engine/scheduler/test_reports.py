"""What the scheduler says of itself: stages, load, and whether there is work."""

import pytest

from pdserve.core.events import Stage, StageReport
from pdserve.engine.work import Commit, Prefill, Release, Reserve
from tests.unit.engine.scheduler.bench import Bench, first_tokens, group, key


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
