"""One attempt on a decode worker, as a pure state machine.

    Reserved ──blocks and push──▶ Receiving ──Committed──▶ Running ──AllEnded──▶ Finished
        └── cancel, failure ─────▶ Finished ◀──TransferStopped── Aborting ◀── cancel, failure (Receiving)

Reserved waits for two things in any order: the engine's blocks and prefill's push. Receiving has both, and the push writes
into the blocks; Aborting keeps them until it has really stopped. In Running the blocks belong to the engine's sequences,
which free them as they end. Every way to Finished releases what is left, so a key that is gone is gone in the engine too.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from pdserve.core.errors import ErrorCode, IllegalTransition, PdserveError
from pdserve.core.events import Token

T = TypeVar("T")  # The push: whatever the worker can answer and stop.
B = TypeVar("B")  # The grant: the blocks that it writes to.


# States.


@dataclass(frozen=True, slots=True)
class Reserved(Generic[T, B]):
    """At most one of the two is there; with both it is Receiving."""

    transfer: T | None = None
    grant: B | None = None


@dataclass(frozen=True, slots=True)
class Receiving(Generic[T, B]):
    transfer: T
    grant: B


@dataclass(frozen=True, slots=True)
class Running:
    pass


@dataclass(frozen=True, slots=True)
class Aborting(Generic[T]):
    transfer: T


@dataclass(frozen=True, slots=True)
class Finished:
    pass


State = Reserved[T, B] | Receiving[T, B] | Running | Aborting[T] | Finished


# Events.


@dataclass(frozen=True, slots=True)
class BlocksGranted(Generic[B]):
    grant: B


@dataclass(frozen=True, slots=True)
class PushOpened(Generic[T]):
    transfer: T


@dataclass(frozen=True, slots=True)
class Committed:
    """The cache is complete and verified; these are the first tokens of the sequences that go on."""

    first_tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class AllEnded:
    """The last sequence that was wanted has ended. One that was stopped just before may hold blocks in the engine still."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The frontend wants no more of it. Legal in every state.

    With `unless_running` a running attempt goes on, and the frontend waits for an answer if it does not run.
    """

    unless_running: bool = False


@dataclass(frozen=True, slots=True)
class Broke:
    """The engine, the deadline or a draining worker ended it. Legal in every state."""

    error: PdserveError


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The push ended by itself, without a commit, and no longer writes to any block.

    `error` None: prefill gave it up in order, so there is nothing to report.
    """

    error: PdserveError | None


@dataclass(frozen=True, slots=True)
class TransferStopped:
    """The push that was told to stop no longer writes to any block."""


Event = PushOpened[T] | BlocksGranted[B] | Committed | AllEnded | Cancelled | Broke | TransferFailed | TransferStopped


# Effects, carried out in order.


@dataclass(frozen=True, slots=True)
class SendReady(Generic[T, B]):
    transfer: T
    grant: B


@dataclass(frozen=True, slots=True)
class StartDecoding:
    first_tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Acknowledge(Generic[T]):
    transfer: T


@dataclass(frozen=True, slots=True)
class StopTransfer(Generic[T]):
    """Tell prefill why, and report TransferStopped when nothing writes to blocks any more."""

    transfer: T
    error: PdserveError | None


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """Also takes the reservation out of the engine's queue, or its sequences out of the batch."""


@dataclass(frozen=True, slots=True)
class ReportFailure:
    error: PdserveError


Effect = SendReady[T, B] | StartDecoding | Acknowledge[T] | StopTransfer[T] | ReleaseBlocks | ReportFailure


NOT_RUNNING = PdserveError(ErrorCode.cancelled, "cancelled before it ran")


def advance(state: State[T, B], event: Event[T, B]) -> tuple[State[T, B], list[Effect[T, B]]]:
    """The next state, and what is to be done on the way.

    Raises:
        IllegalTransition: the state has no handler for this event.
    """
    match state, event:
        case Reserved(None, None), BlocksGranted(grant):
            return Reserved(None, grant), []
        case Reserved(None, None), PushOpened(transfer):
            return Reserved(transfer, None), []
        case Reserved(transfer, None), BlocksGranted(grant) if transfer is not None:
            return Receiving(transfer, grant), [SendReady(transfer, grant)]
        case Reserved(None, grant), PushOpened(transfer) if grant is not None:
            return Receiving(transfer, grant), [SendReady(transfer, grant)]
        # Nothing is written before `ready`: the blocks are free at once.
        case Reserved(transfer, _), Cancelled() | Broke(_):
            return Finished(), [*_report(event), *_stop(transfer, event), ReleaseBlocks()]
        case Reserved(transfer, _), TransferFailed(_) if transfer is not None:
            return Finished(), [*_report(event), ReleaseBlocks()]

        case Receiving(transfer, _), Committed(first_tokens):
            return Running(), [StartDecoding(first_tokens), Acknowledge(transfer)]
        case Receiving(transfer, _), Cancelled() | Broke(_):
            return Aborting(transfer), [*_report(event), *_stop(transfer, event)]
        case Receiving(_, _), TransferFailed(_):
            return Finished(), [*_report(event), ReleaseBlocks()]

        case Running(), AllEnded():
            return Finished(), [ReleaseBlocks()]
        case Running(), Cancelled(unless_running):
            return (state, []) if unless_running else (Finished(), [ReleaseBlocks()])
        case Running(), Broke(_):
            return Finished(), [*_report(event), ReleaseBlocks()]
        # The acknowledgement may be lost, or its stream broken: what runs, runs.
        case Running(), TransferFailed(_):
            return state, []

        # The transfer was told to stop; however it ends, and whatever it still says, the blocks are free only then.
        case Aborting(_), TransferStopped() | TransferFailed(_):
            return Finished(), [ReleaseBlocks()]
        case Aborting(_), Committed(_) | Cancelled() | Broke(_):
            return state, []

        case Finished(), Cancelled() | Broke(_) | TransferFailed(_) | TransferStopped():
            return state, []
    raise IllegalTransition(state, event)


def _stop(transfer: T | None, event: Event[T, B]) -> list[Effect[T, B]]:
    if transfer is None:
        return []
    return [StopTransfer(transfer, event.error if isinstance(event, Broke) else None)]


def _report(event: Event[T, B]) -> list[Effect[T, B]]:
    match event:
        case Broke(error):
            return [ReportFailure(error)]
        case TransferFailed(error) if error is not None:
            return [ReportFailure(error)]
        case Cancelled(unless_running=True):
            return [ReportFailure(NOT_RUNNING)]
    return []
