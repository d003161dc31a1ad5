"""The table of the prefill machine: every state with every event, and what each way through it leaves behind."""

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core import prefill_state
from pdserve.core.errors import ErrorCode, IllegalTransition, PdserveError
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

PUSH = "push"
ERROR = PdserveError(ErrorCode.engine_failed, "it broke")
ILLEGAL = None

EVENTS: dict[str, Any] = {
    "ready": Ready(32),
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

# State, then for each event the next state and the effects.
TABLE: list[tuple[Any, dict[str, Any]]] = [
    (
        Queued(PUSH),
        {
            "ready": (Running(PUSH), [Compute(32)]),
            "first tokens": ILLEGAL,
            "first tokens end all": ILLEGAL,
            "acknowledged": ILLEGAL,
            "cancelled": (ABORTING_EMPTY, [StopTransfer(PUSH, None)]),
            "broke": (ABORTING_EMPTY, [ReportFailure(ERROR), StopTransfer(PUSH, ERROR)]),
            "transfer failed": (Finished(), [ReportFailure(ERROR)]),
            "transfer stopped": ILLEGAL,
        },
    ),
    (
        Running(PUSH),
        {
            "ready": ILLEGAL,
            "first tokens": (HandingOff(PUSH), [CommitTransfer(PUSH)]),
            "first tokens end all": (ABORTING_PINNED, [StopTransfer(PUSH, None)]),
            "acknowledged": ILLEGAL,
            "cancelled": (ABORTING_PINNED, [StopComputing(), StopTransfer(PUSH, None)]),
            "broke": (ABORTING_PINNED, [ReportFailure(ERROR), StopComputing(), StopTransfer(PUSH, ERROR)]),
            "transfer failed": (Finished(), [ReportFailure(ERROR), ReleaseBlocks()]),
            "transfer stopped": ILLEGAL,
        },
    ),
    (
        Running(None),
        {
            "ready": ILLEGAL,
            "first tokens": (Finished(), [ReleaseBlocks()]),
            "first tokens end all": (Finished(), [ReleaseBlocks()]),
            "acknowledged": ILLEGAL,
            "cancelled": (Finished(), [ReleaseBlocks()]),
            "broke": (Finished(), [ReportFailure(ERROR), ReleaseBlocks()]),
            "transfer failed": ILLEGAL,
            "transfer stopped": ILLEGAL,
        },
    ),
    (
        HandingOff(PUSH),
        {
            "ready": ILLEGAL,
            "first tokens": ILLEGAL,
            "first tokens end all": ILLEGAL,
            "acknowledged": (Finished(), [ReportHandoff(PUSH), ReleaseBlocks()]),
            "cancelled": (ABORTING_PINNED, [StopTransfer(PUSH, None)]),
            "broke": (ABORTING_PINNED, [ReportFailure(ERROR), StopTransfer(PUSH, ERROR)]),
            "transfer failed": (Finished(), [ReportFailure(ERROR), ReleaseBlocks()]),
            "transfer stopped": ILLEGAL,
        },
    ),
    *(
        (
            aborting,
            {
                "ready": (aborting, []),
                "first tokens": (aborting, []),
                "first tokens end all": (aborting, []),
                "acknowledged": (aborting, []),
                "cancelled": (aborting, []),
                "broke": (aborting, []),
                "transfer failed": (Finished(), release),
                "transfer stopped": (Finished(), release),
            },
        )
        for aborting, release in ((ABORTING_PINNED, [ReleaseBlocks()]), (ABORTING_EMPTY, []))
    ),
    (
        Finished(),
        {
            "ready": ILLEGAL,
            "first tokens": ILLEGAL,
            "first tokens end all": ILLEGAL,
            "acknowledged": ILLEGAL,
            "cancelled": (Finished(), []),
            "broke": (Finished(), []),
            "transfer failed": ILLEGAL,
            "transfer stopped": ILLEGAL,
        },
    ),
]


@pytest.mark.parametrize(
    ("state", "name", "outcome"),
    [pytest.param(s, n, o, id=f"{s}-{n}") for s, row in TABLE for n, o in row.items()],
)
def test_each_event_in_each_state(state: Any, name: str, outcome: Any) -> None:
    event = EVENTS[name]
    if outcome is ILLEGAL:
        with pytest.raises(IllegalTransition, match=f"^{type(event).__name__} in state {type(state).__name__}$"):
            advance(state, event)
    else:
        assert advance(state, event) == outcome


def test_the_table_has_every_state_and_every_event() -> None:
    assert {type(state) for state, _ in TABLE} == {getattr(t, "__origin__", t) for t in get_args(prefill_state.State)}
    assert {type(event) for event in EVENTS.values()} == set(get_args(prefill_state.Event))
    assert [set(row) for _, row in TABLE] == [set(EVENTS)] * len(TABLE)


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
            events.append(Ready(0))
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
