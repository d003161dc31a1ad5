"""What a step costs, however many wait."""

import pytest

from pdserve.engine.work import Commit, Prefill, Reserve, Sampled, Stop
from tests.calls import count_calls
from tests.unit.engine.scheduler.bench import Bench, first_tokens, group, key


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
