"""One attempt on a prefill worker, as a pure state machine.

    Queued ──Ready──▶ Running ──FirstTokens──▶ HandingOff ──Acknowledged──▶ Finished
       └───────────────┴── cancel, failure ──────┴──▶ Aborting ──TransferStopped──▶ Finished

Queued holds a push that waits for decode's `ready`, and no blocks. Running and HandingOff hold blocks too. Aborting keeps
the blocks pinned until the transfer has really stopped reading them. An attempt that pushes nothing (its first token is
all that is wanted) starts in Running with no transfer.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from pdserve.core.errors import IllegalTransition, PdserveError

T = TypeVar("T")  # The push: whatever the worker can commit and stop.


# States.


@dataclass(frozen=True, slots=True)
class Queued(Generic[T]):
    transfer: T


@dataclass(frozen=True, slots=True)
class Running(Generic[T]):
    transfer: T | None


@dataclass(frozen=True, slots=True)
class HandingOff(Generic[T]):
    transfer: T


@dataclass(frozen=True, slots=True)
class Aborting(Generic[T]):
    """`holds_blocks` is whether the engine must release them at the end."""

    transfer: T
    holds_blocks: bool


@dataclass(frozen=True, slots=True)
class Finished:
    pass


State = Queued[T] | Running[T] | HandingOff[T] | Aborting[T] | Finished


# Events.


@dataclass(frozen=True, slots=True)
class Ready:
    """Decode has its blocks."""


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The engine sampled every sibling's first token; `all_ended` if none of them goes on."""

    all_ended: bool


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Decode has verified the cache and runs."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The frontend wants no more of it. Legal in every state."""


@dataclass(frozen=True, slots=True)
class Broke:
    """The engine, the deadline or a draining worker ended it. Legal in every state."""

    error: PdserveError


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The push ended by itself, and no longer reads any block. Legal in every state that has one."""

    error: PdserveError


@dataclass(frozen=True, slots=True)
class TransferStopped:
    """The push that was told to stop no longer reads any block."""


Event = Ready | FirstTokens | Acknowledged | Cancelled | Broke | TransferFailed | TransferStopped


# Effects, carried out in order.


@dataclass(frozen=True, slots=True)
class Compute:
    """Give the prompt to the engine; what it computes goes to the push until the first tokens come."""


@dataclass(frozen=True, slots=True)
class CommitTransfer(Generic[T]):
    transfer: T


@dataclass(frozen=True, slots=True)
class StopTransfer(Generic[T]):
    """Tell decode why, None if in order, and report TransferStopped when nothing reads blocks any more."""

    transfer: T
    error: PdserveError | None


@dataclass(frozen=True, slots=True)
class StopComputing:
    """Out of the engine's queue or batch; blocks stay pinned."""


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    pass


@dataclass(frozen=True, slots=True)
class ReportHandoff(Generic[T]):
    """Tell the frontend how long the handoff took, and how much was pushed."""

    transfer: T


@dataclass(frozen=True, slots=True)
class ReportFailure:
    error: PdserveError


Effect = (
    Compute | CommitTransfer[T] | StopTransfer[T] | StopComputing | ReleaseBlocks | ReportHandoff[T] | ReportFailure
)


def advance(state: State[T], event: Event) -> tuple[State[T], list[Effect[T]]]:
    """The next state, and what is to be done on the way.

    Raises:
        IllegalTransition: the state has no handler for this event.
    """
    match state, event:
        case Queued(transfer), Ready():
            return Running(transfer), [Compute()]
        case Queued(transfer), Cancelled():
            return Aborting(transfer, holds_blocks=False), [StopTransfer(transfer, None)]
        case Queued(transfer), Broke(error):
            return Aborting(transfer, holds_blocks=False), [ReportFailure(error), StopTransfer(transfer, error)]
        case Queued(_), TransferFailed(error):
            return Finished(), [ReportFailure(error)]

        case Running(None), FirstTokens(_):
            return Finished(), [ReleaseBlocks()]
        case Running(None), Cancelled():
            return Finished(), [ReleaseBlocks()]
        case Running(None), Broke(error):
            return Finished(), [ReportFailure(error), ReleaseBlocks()]
        case Running(transfer), FirstTokens(all_ended) if transfer is not None:
            # Given up in order: an error would make decode report a failure, which may overtake the tokens.
            if all_ended:
                return Aborting(transfer, holds_blocks=True), [StopTransfer(transfer, None)]
            return HandingOff(transfer), [CommitTransfer(transfer)]
        case Running(transfer), Cancelled() if transfer is not None:
            return Aborting(transfer, holds_blocks=True), [StopComputing(), StopTransfer(transfer, None)]
        case Running(transfer), Broke(error) if transfer is not None:
            return Aborting(transfer, holds_blocks=True), [
                ReportFailure(error),
                StopComputing(),
                StopTransfer(transfer, error),
            ]
        case Running(transfer), TransferFailed(error) if transfer is not None:
            return Finished(), [ReportFailure(error), ReleaseBlocks()]

        case HandingOff(transfer), Acknowledged():
            return Finished(), [ReportHandoff(transfer), ReleaseBlocks()]
        case HandingOff(transfer), Cancelled():
            return Aborting(transfer, holds_blocks=True), [StopTransfer(transfer, None)]
        case HandingOff(transfer), Broke(error):
            return Aborting(transfer, holds_blocks=True), [ReportFailure(error), StopTransfer(transfer, error)]
        case HandingOff(_), TransferFailed(error):
            return Finished(), [ReportFailure(error), ReleaseBlocks()]

        # The transfer was told to stop; however it ends, and whatever it still says, the blocks are free only then.
        case Aborting(_, holds_blocks), TransferStopped() | TransferFailed(_):
            return Finished(), [ReleaseBlocks()] if holds_blocks else []
        case Aborting(_, _), Ready() | Acknowledged() | FirstTokens(_) | Cancelled() | Broke(_):
            return state, []

        case Finished(), Cancelled() | Broke(_):
            return state, []
    raise IllegalTransition(state, event)
