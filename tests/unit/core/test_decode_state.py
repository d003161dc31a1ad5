"""The table of the decode machine: every state with every event, and what each way through it leaves behind."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core import decode_state
from pdserve.core.decode_state import (
    NOT_RUNNING,
    Aborting,
    Acknowledge,
    AllEnded,
    BlocksGranted,
    Broke,
    Cancelled,
    Committed,
    Finished,
    PushOpened,
    Receiving,
    ReleaseBlocks,
    ReportFailure,
    Reserved,
    Running,
    SendReady,
    StartDecoding,
    StopTransfer,
    TransferFailed,
    TransferStopped,
    advance,
)
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import Token
from pdserve.core.ids import AttemptKey, GroupId
from tests.state_tables import StateTable

PUSH = "push"
GRANT = "grant"
ERROR = PdserveError(ErrorCode.transfer_failed, "it broke")
TOKENS = (Token(AttemptKey(GroupId(1, 2), 3), sibling=0, position=5, token_id=7),)

EVENTS: dict[str, Any] = {
    "blocks granted": BlocksGranted(GRANT),
    "push opened": PushOpened(PUSH),
    "committed": Committed(TOKENS),
    "all ended": AllEnded(),
    "cancelled": Cancelled(),
    "cancelled unless running": Cancelled(unless_running=True),
    "broke": Broke(ERROR),
    "transfer failed": TransferFailed(ERROR),
    "transfer given up": TransferFailed(None),
    "transfer stopped": TransferStopped(),
}

RECEIVING: Any = Receiving(PUSH, GRANT)
RESERVED: Any = Reserved()

# For each state, the next one and the effects of each event. What is not there is illegal.
ROWS: dict[Any, dict[str, Any]] = {
    RESERVED: {
        "blocks granted": (Reserved(None, GRANT), []),
        "push opened": (Reserved(PUSH, None), []),
        "cancelled": (Finished(), [ReleaseBlocks()]),
        "cancelled unless running": (Finished(), [ReportFailure(NOT_RUNNING), ReleaseBlocks()]),
        "broke": (Finished(), [ReportFailure(ERROR), ReleaseBlocks()]),
    },
    Reserved(PUSH, None): {
        "blocks granted": (RECEIVING, [SendReady(PUSH, GRANT)]),
        "cancelled": (Finished(), [StopTransfer(PUSH, None), ReleaseBlocks()]),
        "cancelled unless running": (
            Finished(),
            [ReportFailure(NOT_RUNNING), StopTransfer(PUSH, None), ReleaseBlocks()],
        ),
        "broke": (Finished(), [ReportFailure(ERROR), StopTransfer(PUSH, ERROR), ReleaseBlocks()]),
        "transfer failed": (Finished(), [ReportFailure(ERROR), ReleaseBlocks()]),
        "transfer given up": (Finished(), [ReleaseBlocks()]),
    },
    Reserved(None, GRANT): {
        "push opened": (RECEIVING, [SendReady(PUSH, GRANT)]),
        "cancelled": (Finished(), [ReleaseBlocks()]),
        "cancelled unless running": (Finished(), [ReportFailure(NOT_RUNNING), ReleaseBlocks()]),
        "broke": (Finished(), [ReportFailure(ERROR), ReleaseBlocks()]),
    },
    RECEIVING: {
        "committed": (Running(), [StartDecoding(TOKENS), Acknowledge(PUSH)]),
        "cancelled": (Aborting(PUSH), [StopTransfer(PUSH, None)]),
        "cancelled unless running": (Aborting(PUSH), [ReportFailure(NOT_RUNNING), StopTransfer(PUSH, None)]),
        "broke": (Aborting(PUSH), [ReportFailure(ERROR), StopTransfer(PUSH, ERROR)]),
        "transfer failed": (Finished(), [ReportFailure(ERROR), ReleaseBlocks()]),
        "transfer given up": (Finished(), [ReleaseBlocks()]),
    },
    Running(): {
        "all ended": (Finished(), [ReleaseBlocks()]),
        "cancelled": (Finished(), [ReleaseBlocks()]),
        "cancelled unless running": (Running(), []),
        "broke": (Finished(), [ReportFailure(ERROR), ReleaseBlocks()]),
        "transfer failed": (Running(), []),
        "transfer given up": (Running(), []),
    },
    Aborting(PUSH): {
        "committed": (Aborting(PUSH), []),
        "cancelled": (Aborting(PUSH), []),
        "cancelled unless running": (Aborting(PUSH), []),
        "broke": (Aborting(PUSH), []),
        "transfer failed": (Finished(), [ReleaseBlocks()]),
        "transfer given up": (Finished(), [ReleaseBlocks()]),
        "transfer stopped": (Finished(), [ReleaseBlocks()]),
    },
    Finished(): {
        "cancelled": (Finished(), []),
        "cancelled unless running": (Finished(), []),
        "broke": (Finished(), []),
        "transfer failed": (Finished(), []),
        "transfer given up": (Finished(), []),
        "transfer stopped": (Finished(), []),
    },
}
TABLE = StateTable(decode_state, EVENTS, ROWS)


@pytest.mark.parametrize(("state", "event", "outcome"), TABLE.pairs())
def test_each_event_in_each_state(state: Any, event: Any, outcome: Any) -> None:
    assert TABLE.outcome(state, event) == outcome


def test_the_table_has_every_state_and_every_event() -> None:
    assert TABLE.differences() == set()


class World:
    """What surrounds one attempt: an engine and a push, and the events that they can bring now.

    The reservation is held from the start, with its blocks or in the queue for them.
    """

    def __init__(self) -> None:
        self.state: Any = Reserved()
        self.reserved = True
        self.granted = False
        self.opened = False
        self.pushing = False
        self.writing = False
        self.running = False
        self.stopping = False
        self.releases = 0
        self.failures = 0

    def possible(self) -> list[Any]:
        events: list[Any] = [Cancelled(), Cancelled(unless_running=True), Broke(ERROR)]
        if not self.granted:
            events.append(BlocksGranted(GRANT))
        if not self.opened:
            events.append(PushOpened(PUSH))
        if self.writing:
            events.append(Committed(TOKENS))
        if self.pushing:
            events += [TransferFailed(ERROR), TransferFailed(None)]
        if self.pushing and self.stopping:
            events.append(TransferStopped())
        if self.running:
            events.append(AllEnded())
        return events

    def happen(self, event: Any) -> None:
        match event:
            case BlocksGranted():
                self.granted = True
            case PushOpened():
                self.opened = self.pushing = True
            case Committed():
                self.writing = False
            case TransferFailed() | TransferStopped():
                self.pushing = self.writing = False
            case AllEnded():
                self.running = False
        self.state, effects = advance(self.state, event)
        for effect in effects:
            self.carry_out(effect)

    def carry_out(self, effect: Any) -> None:
        match effect:
            case SendReady():
                assert self.pushing
                assert self.granted
                self.writing = True
            case StartDecoding():
                assert not self.writing
                self.running = True
            case Acknowledge():
                assert self.running
                assert self.pushing
            case StopTransfer():
                assert self.pushing
                assert not self.stopping, "stopped twice"
                self.stopping = True
            case ReleaseBlocks():
                assert self.reserved, "released what it does not hold"
                assert not self.writing, "released under a push that writes"
                self.reserved = self.running = False
                self.releases += 1
            case ReportFailure():
                self.failures += 1


@given(data=st.data(), steps=st.integers(0, 12))
def test_every_way_releases_what_it_holds_exactly_once(data: st.DataObject, steps: int) -> None:
    world = World()
    for _ in range(steps):
        if isinstance(world.state, Finished):
            break
        world.happen(data.draw(st.sampled_from(world.possible())))
    world.happen(Cancelled())
    if isinstance(world.state, Aborting):
        world.happen(TransferStopped())
    assert world.state == Finished()
    assert not world.reserved
    assert not world.running
    assert not world.writing
    assert world.releases == 1
    assert world.failures <= 1
    # A push that is still open ends by itself, and changes nothing any more.
    if world.pushing:
        world.happen(TransferFailed(None))
        assert world.releases == 1


@given(data=st.data(), steps=st.integers(0, 8))
def test_a_cancel_unless_running_is_answered_exactly_once(data: st.DataObject, steps: int) -> None:
    world = World()
    for _ in range(steps):
        events = [e for e in world.possible() if not isinstance(e, Cancelled)]
        world.happen(data.draw(st.sampled_from(events)))
        if isinstance(world.state, Finished | Aborting):
            return
    ran = world.running
    world.happen(Cancelled(unless_running=True))
    assert world.running == ran
    assert world.failures == (not ran)
