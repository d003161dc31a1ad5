"""What a controller does next, case by case."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cluster.placement import Slot
from pdserve.core.events import Role
from services.controller.plan import Action, Drain, Kill, Limits, Phase, Start, Stop, Undrain, WorkerView, decide

LIMITS = Limits(start_s=60, silent_s=5, drain_s=30, stop_s=40)
P0, P1 = Slot(Role.PREFILL, 0), Slot(Role.PREFILL, 1)
D0, D1, D2 = (Slot(Role.DECODE, index) for index in range(3))


def plan(prefill: int, decode: int, *workers: WorkerView, resting: tuple[Slot, ...] = ()) -> list[Action]:
    return decide({Role.PREFILL: prefill, Role.DECODE: decode}, workers, LIMITS, resting)


def ready(slot: Slot, **seen: float) -> WorkerView:
    return WorkerView(slot, Phase.READY, **seen)  # type: ignore[arg-type]


def test_what_is_missing_is_started_in_the_lowest_free_slots() -> None:
    assert plan(1, 2) == [Start(P0), Start(D0), Start(D1)]
    assert plan(1, 3, ready(P0), ready(D1)) == [Start(D0), Start(D2)]


def test_what_runs_as_it_should_is_left_alone() -> None:
    assert plan(1, 1, ready(P0), ready(D0)) == []
    assert plan(1, 1, WorkerView(P0, Phase.PLACING, phase_s=59), WorkerView(D0, Phase.STARTING)) == []


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        (WorkerView(D0, Phase.BROKEN, phase_s=5.1), "its engine broke"),
        (WorkerView(D0, Phase.STUCK), "its engine is stuck"),
        (
            WorkerView(D0, Phase.PLACING, phase_s=61),
            "it had no ports after 60 s: no node has room for its role, or its process hangs",
        ),
        (WorkerView(D0, Phase.STARTING, phase_s=61), "it was not ready after 60 s"),
        (WorkerView(D0, Phase.STOPPING, phase_s=41), "it had not stopped after 40 s"),
        (ready(D0, silent_s=5.1), "it has not answered for 5.1 s"),
        (WorkerView(D0, Phase.DRAINING, silent_s=5.1), "it has not answered for 5.1 s"),
    ],
)
def test_what_has_failed_is_killed_before_its_slot_is_filled_again(worker: WorkerView, reason: str) -> None:
    assert plan(0, 1, worker)[0] == Kill(D0, reason)
    if worker.phase is not Phase.STOPPING:
        assert plan(0, 1, worker) == [Kill(D0, reason)]
    assert plan(0, 1) == [Start(D0)]


def test_a_worker_that_broke_has_time_to_say_why() -> None:
    assert plan(0, 1, WorkerView(D0, Phase.BROKEN, phase_s=4.9)) == []


def test_a_slot_that_keeps_failing_rests_and_no_other_takes_its_place() -> None:
    assert plan(0, 1, resting=(D0,)) == []
    assert plan(0, 2, resting=(D0,)) == [Start(D1)]


def test_one_too_many_drains_then_stops_when_it_holds_nothing() -> None:
    assert plan(0, 1, ready(D0), ready(D1)) == [Drain(D1)]
    drained = WorkerView(D1, Phase.DRAINING, held=3, leaving=True)
    assert plan(0, 1, ready(D0), drained) == []
    assert plan(0, 1, ready(D0), WorkerView(D1, Phase.DRAINING, held=0, leaving=True)) == [Stop(D1)]
    assert plan(0, 1, ready(D0), WorkerView(D1, Phase.DRAINING, phase_s=31, held=3, leaving=True)) == [Stop(D1)]
    assert plan(0, 1, ready(D0), WorkerView(D1, Phase.STOPPING)) == []


def test_first_goes_what_is_going_already_then_what_serves_nobody() -> None:
    assert plan(0, 1, WorkerView(D0, Phase.DRAINING, leaving=True), ready(D1)) == [Stop(D0)]
    assert plan(0, 1, WorkerView(D0, Phase.STARTING), ready(D1)) == [Kill(D0, "it is no longer wanted")]
    assert plan(0, 1, WorkerView(D0, Phase.PLACING), ready(D1)) == [Kill(D0, "it is no longer wanted")]


def test_one_that_was_leaving_is_kept_when_it_is_wanted_again() -> None:
    leaving = WorkerView(D1, Phase.DRAINING, held=1, leaving=True)
    assert plan(0, 2, ready(D0), leaving) == [Undrain(D1)]


def test_one_that_an_operator_drains_counts_and_stays_drained() -> None:
    assert plan(0, 2, ready(D0), WorkerView(D1, Phase.DRAINING)) == []


VIEWS = st.builds(
    WorkerView,
    slot=st.builds(Slot, st.sampled_from(Role), st.integers(0, 4)),
    phase=st.sampled_from(Phase),
    phase_s=st.floats(0, 100),
    silent_s=st.floats(0, 10),
    held=st.integers(0, 3),
    leaving=st.booleans(),
)


@given(
    st.lists(VIEWS, unique_by=lambda view: view.slot),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_a_plan_never_starts_a_slot_that_is_taken_nor_more_than_is_wanted(
    workers: list[WorkerView], prefill: int, decode: int
) -> None:
    actions = plan(prefill, decode, *workers)
    started = [action.slot for action in actions if isinstance(action, Start)]
    assert not set(started) & {worker.slot for worker in workers}
    assert len({action.slot for action in actions}) == len(actions)
    for role, wanted in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        kept = [w for w in workers if w.slot.role is role and w.phase is not Phase.STOPPING]
        new = sum(slot.role is role for slot in started)
        assert new == 0 or new + len(kept) <= wanted
