"""The table of the prefill machine: every state with every event, and what each way through it leaves behind."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core import prefill_state
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.prefill_state import (
    Aborting,
    Acknowledged,
    Broke,
    Cancelled,
    CommitTransfer,
    Compute,
    Finished,
    FirstTokens,
    HandingOff,
    Queued,
    Ready,
    ReleaseBlocks,
    ReportFailure,
    ReportHandoff,
    Running,
    StopComputing,
    StopTransfer,
    TransferFailed,
    TransferStopped,
    advance,
)
from tests.state_tables import StateTable

PUSH = "push"
ERROR = PdserveError(ErrorCode.engine_failed, "it broke")

EVENTS: dict[str, Any] = {
    "ready": Ready(),
    "first tokens": FirstTokens(all_ended=False),
    "first tokens end all": FirstTokens(all_ended=True),
    "acknowledged": Acknowledged(),
    "cancelled": Cancelled(),
    "broke": Broke(ERROR),
    "transfer failed": TransferFailed(ERROR),
    "transfer stopped": TransferStopped(),
}

ABORTING_PINNED: Any = Aborting(PUSH, holds_blocks=True)
ABORTING_EMPTY: Any = Aborting(PUSH, holds_blocks=False)

# For each state, the next one and the effects of each event. What is not there is illegal.
ROWS: dict[Any, dict[str, Any]] = {
    Queued(PUSH): {
        "ready": (Running(PUSH), [Compute()]),
        "cancelled": (ABORTING_EMPTY, [StopTransfer(PUSH, None)]),
        "broke": (ABORTING_EMPTY, [ReportFailure(ERROR), StopTransfer(PUSH, ERROR)]),
        "transfer failed": (Finished(), [ReportFailure(ERROR)]),
    },
    Running(PUSH): {
        "first tokens": (HandingOff(PUSH), [CommitTransfer(PUSH)]),
        "first tokens end all": (ABORTING_PINNED, [StopTransfer(PUSH, None)]),
        "cancelled": (ABORTING_PINNED, [StopComputing(), StopTransfer(PUSH, None)]),
        "broke": (ABORTING_PINNED, [ReportFailure(ERROR), StopComputing(), StopTransfer(PUSH, ERROR)]),
        "transfer failed": (Finished(), [ReportFailure(ERROR), ReleaseBlocks()]),
    },
    Running(None): {
        "first tokens": (Finished(), [ReleaseBlocks()]),
        "first tokens end all": (Finished(), [ReleaseBlocks()]),
        "cancelled": (Finished(), [ReleaseBlocks()]),
        "broke": (Finished(), [ReportFailure(ERROR), ReleaseBlocks()]),
    },
    HandingOff(PUSH): {
        "acknowledged": (Finished(), [ReportHandoff(PUSH), ReleaseBlocks()]),
        "cancelled": (ABORTING_PINNED, [StopTransfer(PUSH, None)]),
        "broke": (ABORTING_PINNED, [ReportFailure(ERROR), StopTransfer(PUSH, ERROR)]),
        "transfer failed": (Finished(), [ReportFailure(ERROR), ReleaseBlocks()]),
    },
    ABORTING_PINNED: {
        "ready": (ABORTING_PINNED, []),
        "first tokens": (ABORTING_PINNED, []),
        "first tokens end all": (ABORTING_PINNED, []),
        "acknowledged": (ABORTING_PINNED, []),
        "cancelled": (ABORTING_PINNED, []),
        "broke": (ABORTING_PINNED, []),
        "transfer failed": (Finished(), [ReleaseBlocks()]),
        "transfer stopped": (Finished(), [ReleaseBlocks()]),
    },
    ABORTING_EMPTY: {
        "ready": (ABORTING_EMPTY, []),
        "first tokens": (ABORTING_EMPTY, []),
        "first tokens end all": (ABORTING_EMPTY, []),
        "acknowledged": (ABORTING_EMPTY, []),
        "cancelled": (ABORTING_EMPTY, []),
        "broke": (ABORTING_EMPTY, []),
        "transfer failed": (Finished(), []),
        "transfer stopped": (Finished(), []),
    },
    Finished(): {
        "cancelled": (Finished(), []),
        "broke": (Finished(), []),
    },
}
TABLE = StateTable(prefill_state, EVENTS, ROWS)


@pytest.mark.parametrize(("state", "event", "outcome"), TABLE.pairs())
def test_each_event_in_each_state(state: Any, event: Any, outcome: Any) -> None:
    assert TABLE.outcome(state, event) == outcome


def test_the_table_has_every_state_and_every_event() -> None:
    assert TABLE.differences() == set()


class World:
    """What surrounds one attempt: an engine and a push, and the events that they can bring now."""

    def __init__(self, *, pushes: bool) -> None:
        self.state: Any = Queued(PUSH) if pushes else Running(None)
        self.pushing = pushes
        self.blocks = not pushes
        self.computing = not pushes
        self.ready_due = pushes
        self.committed = False
        self.stopping = False
        self.releases = 0
        self.failures = 0

    def possible(self) -> list[Any]:
        events: list[Any] = [Cancelled(), Broke(ERROR)]
        if self.ready_due and self.pushing:
            events.append(Ready())
        if self.computing:
            events += [FirstTokens(all_ended=False), FirstTokens(all_ended=True)]
        if self.committed and self.pushing:
            events.append(Acknowledged())
        if self.pushing:
            events.append(TransferFailed(ERROR))
        if self.pushing and self.stopping:
            events.append(TransferStopped())
        return events

    def happen(self, event: Any) -> None:
        if isinstance(event, Ready):
            self.ready_due = False
        elif isinstance(event, FirstTokens):
            self.computing = False
        elif isinstance(event, TransferFailed | TransferStopped):
            self.pushing = False
        elif isinstance(event, Acknowledged):
            # A push that is being stopped still reports that it has stopped.
            self.committed = False
            self.pushing = self.stopping
        self.state, effects = advance(self.state, event)
        for effect in effects:
            self.carry_out(effect)

    def carry_out(self, effect: Any) -> None:
        match effect:
            case Compute():
                assert not self.blocks
                self.blocks = self.computing = True
            case CommitTransfer():
                assert self.pushing
                self.committed = True
            case StopTransfer():
                assert self.pushing
                assert not self.stopping, "stopped twice"
                self.stopping = True
            case StopComputing():
                assert self.blocks
            case ReleaseBlocks():
                assert self.blocks, "released what it does not hold"
                assert not self.pushing, "released under a push that reads"
                self.blocks = self.computing = False
                self.releases += 1
            case ReportFailure():
                self.failures += 1


@given(data=st.data(), pushes=st.booleans(), steps=st.integers(0, 12))
def test_every_way_releases_what_it_holds_exactly_once(data: st.DataObject, pushes: bool, steps: int) -> None:
    world = World(pushes=pushes)
    held_blocks = world.blocks
    for _ in range(steps):
        if isinstance(world.state, Finished):
            break
        world.happen(data.draw(st.sampled_from(world.possible())))
        held_blocks = held_blocks or world.blocks or world.releases > 0
    world.happen(Cancelled())
    if world.stopping and world.pushing:
        world.happen(TransferStopped())
    assert world.state == Finished()
    assert (world.blocks, world.pushing) == (False, False)
    assert world.releases == held_blocks
    assert world.failures <= 1
