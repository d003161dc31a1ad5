"""The table of the frontend's machine: every state with every event, and what each way through it leaves behind."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core import attempt_state
from pdserve.core.attempt_state import (
    AllEnded,
    CancelAt,
    Cancelled,
    DecodeFailed,
    DecodeRunning,
    Decoding,
    Dispatch,
    Dispatched,
    DispatchFailed,
    Dispatching,
    Fail,
    Finished,
    HandoffDone,
    PrefillFailed,
    Prefilling,
    Recovering,
    RetryDue,
    ScheduleRetry,
    advance,
)
from pdserve.core.errors import ErrorCode, PdserveError
from tests.state_tables import StateTable

PREFILL = "prefill-0"
DECODE = "decode-0"
ERROR = PdserveError(ErrorCode.worker_lost, "it is gone")

EVENTS: dict[str, Any] = {
    "dispatched": Dispatched(PREFILL, DECODE),
    "dispatched for one token": Dispatched(PREFILL, None),
    "dispatch failed": DispatchFailed(ERROR, may_retry=True),
    "dispatch failed for good": DispatchFailed(ERROR, may_retry=False),
    "decode running": DecodeRunning(),
    "handoff done": HandoffDone(),
    "all ended": AllEnded(),
    "prefill failed": PrefillFailed(ERROR, may_retry=True),
    "prefill failed for good": PrefillFailed(ERROR, may_retry=False),
    "decode failed": DecodeFailed(ERROR, may_retry=True),
    "decode failed for good": DecodeFailed(ERROR, may_retry=False),
    "cancelled": Cancelled(),
    "retry due": RetryDue(),
}

RETRY: Any = ScheduleRetry(ERROR)
FAIL: Any = Fail(ERROR)
DECODE_ALONE: Any = Prefilling(None, DECODE)
AT_PREFILL: Any = CancelAt(PREFILL)
AT_DECODE: Any = CancelAt(DECODE)
ASK_DECODE: Any = CancelAt(DECODE, unless_running=True)

# For each state, the next one and the effects of each event. What is not there is illegal.
ROWS: dict[Any, dict[str, Any]] = {
    Dispatching(): {
        "dispatched": (Prefilling(PREFILL, DECODE), []),
        "dispatched for one token": (Prefilling(PREFILL, None), []),
        "dispatch failed": (Recovering(), [RETRY]),
        "dispatch failed for good": (Finished(), [FAIL]),
        "cancelled": (Finished(), []),
    },
    Prefilling(PREFILL, DECODE): {
        "decode running": (Decoding(PREFILL, DECODE), []),
        "handoff done": (DECODE_ALONE, []),
        "all ended": (Finished(), [AT_DECODE]),
        "prefill failed": (DECODE_ALONE, [ASK_DECODE]),
        "prefill failed for good": (DECODE_ALONE, [ASK_DECODE]),
        "decode failed": (Recovering(), [AT_PREFILL, RETRY]),
        "decode failed for good": (Finished(), [AT_PREFILL, FAIL]),
        "cancelled": (Finished(), [AT_PREFILL, AT_DECODE]),
    },
    DECODE_ALONE: {
        "decode running": (Decoding(None, DECODE), []),
        "handoff done": (DECODE_ALONE, []),
        "all ended": (Finished(), [AT_DECODE]),
        "prefill failed": (DECODE_ALONE, []),
        "prefill failed for good": (DECODE_ALONE, []),
        "decode failed": (Recovering(), [RETRY]),
        "decode failed for good": (Finished(), [FAIL]),
        "cancelled": (Finished(), [AT_DECODE]),
    },
    Prefilling(PREFILL, None): {
        "all ended": (Finished(), []),
        "prefill failed": (Recovering(), [RETRY]),
        "prefill failed for good": (Finished(), [FAIL]),
        "decode failed": (Recovering(), [AT_PREFILL, RETRY]),
        "decode failed for good": (Finished(), [AT_PREFILL, FAIL]),
        "cancelled": (Finished(), [AT_PREFILL]),
    },
    Decoding(PREFILL, DECODE): {
        "decode running": (Decoding(PREFILL, DECODE), []),
        "handoff done": (Decoding(None, DECODE), []),
        "all ended": (Finished(), []),
        "prefill failed": (Decoding(None, DECODE), []),
        "prefill failed for good": (Decoding(None, DECODE), []),
        "decode failed": (Recovering(), [AT_PREFILL, RETRY]),
        "decode failed for good": (Finished(), [AT_PREFILL, FAIL]),
        "cancelled": (Finished(), [AT_PREFILL, AT_DECODE]),
    },
    Decoding(None, DECODE): {
        "decode running": (Decoding(None, DECODE), []),
        "handoff done": (Decoding(None, DECODE), []),
        "all ended": (Finished(), []),
        "prefill failed": (Decoding(None, DECODE), []),
        "prefill failed for good": (Decoding(None, DECODE), []),
        "decode failed": (Recovering(), [RETRY]),
        "decode failed for good": (Finished(), [FAIL]),
        "cancelled": (Finished(), [AT_DECODE]),
    },
    Recovering(): {
        "cancelled": (Finished(), []),
        "retry due": (Dispatching(), [Dispatch()]),
    },
    Finished(): {
        "cancelled": (Finished(), []),
    },
}
TABLE = StateTable(attempt_state, EVENTS, ROWS)


@pytest.mark.parametrize(("state", "event", "outcome"), TABLE.pairs())
def test_each_event_in_each_state(state: Any, event: Any, outcome: Any) -> None:
    assert TABLE.outcome(state, event) == outcome


def test_the_table_has_every_state_and_every_event() -> None:
    assert TABLE.differences() == set()


class World:
    """The workers that hold something of the current attempt, and what they can say now.

    A worker that has failed, was cancelled or has finished by itself says nothing more of the attempt.
    """

    def __init__(self) -> None:
        self.state: Any = Dispatching()
        self.prefill = False
        self.decode = False
        self.decode_runs = False
        self.asked = False
        self.failed = 0
        self.dispatches = 0

    def possible(self) -> list[Any]:
        events: list[Any] = [Cancelled()]
        match self.state:
            case Dispatching():
                events += [EVENTS[n] for n in ("dispatched", "dispatched for one token")]
                events += [EVENTS[n] for n in ("dispatch failed", "dispatch failed for good")]
            case Recovering():
                events.append(RetryDue())
        if self.prefill:
            events += [EVENTS[n] for n in ("prefill failed", "prefill failed for good", "all ended")]
            if self.decode:
                events.append(HandoffDone())
        if self.decode:
            events += [EVENTS[n] for n in ("decode failed", "decode failed for good", "decode running")]
            if self.decode_runs:
                events.append(AllEnded())
        return events

    def happen(self, event: Any) -> None:
        match event:
            case Dispatched(_, decode):
                self.prefill, self.decode, self.decode_runs, self.asked = True, decode is not None, False, False
                self.dispatches += 1
            case PrefillFailed() | HandoffDone():
                self.prefill = False
            case DecodeFailed():
                self.decode = False
            case DecodeRunning():
                self.decode_runs = True
            case AllEnded():
                # By a token of the worker that ran: prefill gives its push up, or is about to be acknowledged.
                self.prefill = False
                self.decode = self.decode and not self.decode_runs
        self.state, effects = advance(self.state, event)
        for effect in effects:
            self.carry_out(effect)

    def carry_out(self, effect: Any) -> None:
        match effect:
            case CancelAt(worker, unless_running=False) if worker == PREFILL:
                assert self.prefill, "cancelled where nothing is held"
                self.prefill = False
            case CancelAt(worker, unless_running=False):
                assert self.decode, "cancelled where nothing is held"
                self.decode = False
            case CancelAt(worker, unless_running=True):
                assert (worker, self.decode) == (DECODE, True)
                assert not self.asked, "asked twice"
                self.asked = True
            case Fail():
                self.failed += 1


@given(data=st.data(), steps=st.integers(0, 20))
def test_every_way_releases_what_it_holds_exactly_once(data: st.DataObject, steps: int) -> None:
    world = World()
    for _ in range(steps):
        world.happen(data.draw(st.sampled_from(world.possible())))
        if isinstance(world.state, Dispatching | Recovering | Finished):
            assert not world.prefill
            assert not world.decode
        if isinstance(world.state, Finished):
            break
    world.happen(Cancelled())
    assert world.state == Finished()
    assert not world.prefill
    assert not world.decode
    assert world.failed <= 1


@given(data=st.data())
def test_running_decode_overrules_whatever_prefill_says(data: st.DataObject) -> None:
    world = World()
    world.happen(Dispatched(PREFILL, DECODE))
    order = data.draw(st.permutations([DecodeRunning(), EVENTS["prefill failed for good"]]))
    for event in order:
        world.happen(event)
    assert world.state == Decoding(None, DECODE)
