"""The attempts at a group's sequences, as their frontend sees them: a pure state machine.

    Dispatching ──Dispatched──▶ Prefilling ──DecodeRunning──▶ Decoding ──AllEnded──▶ Finished
         ▲                          └─────────── failure ─────────┴──▶ Recovering
         └────────────────────────────────RetryDue────────────────────────┘

A state names the workers that hold something of the current attempt, and leaving it cancels there whatever is still held.
There is one way to recover: cancel the attempt everywhere, then dispatch prompt + accepted tokens as a new one.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from pdserve.core.errors import IllegalTransition, PdserveError

W = TypeVar("W")  # A worker, as the frontend addresses it.


# States.


@dataclass(frozen=True, slots=True)
class Dispatching:
    """Waits for workers that take it."""


@dataclass(frozen=True, slots=True)
class Prefilling(Generic[W]):
    """`decode` is None when the first token is all that is wanted. `prefill` is None when it failed after decode may have
    taken over: decode was asked, and its answer decides."""

    prefill: W | None
    decode: W | None


@dataclass(frozen=True, slots=True)
class Decoding(Generic[W]):
    """`prefill` holds its blocks until it has decode's acknowledgement."""

    prefill: W | None
    decode: W


@dataclass(frozen=True, slots=True)
class Recovering:
    """Nothing is held anywhere; waits for its next try."""


@dataclass(frozen=True, slots=True)
class Finished:
    pass


State = Dispatching | Prefilling[W] | Decoding[W] | Recovering | Finished


# Events. `may_retry` is the caller's judgement: attempts, time and the error's kind allow another try.


@dataclass(frozen=True, slots=True)
class Dispatched(Generic[W]):
    prefill: W
    decode: W | None


@dataclass(frozen=True, slots=True)
class DispatchFailed:
    error: PdserveError
    may_retry: bool


@dataclass(frozen=True, slots=True)
class DecodeRunning:
    """The first token of this attempt that came from decode."""


@dataclass(frozen=True, slots=True)
class HandoffDone:
    """Prefill has decode's acknowledgement, and holds nothing any more."""


@dataclass(frozen=True, slots=True)
class AllEnded:
    """The last sequence ended by a token rule."""


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """Prefill no longer holds the attempt: it said so, or its session broke."""

    error: PdserveError
    may_retry: bool


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """Decode no longer holds the attempt: it said so, or its session broke."""

    error: PdserveError
    may_retry: bool


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client left, a stop string matched, time ran out, the frontend stops. Legal in every state."""


@dataclass(frozen=True, slots=True)
class RetryDue:
    pass


Event = (
    Dispatched[W]
    | DispatchFailed
    | DecodeRunning
    | HandoffDone
    | AllEnded
    | PrefillFailed
    | DecodeFailed
    | Cancelled
    | RetryDue
)


# Effects, carried out in order.


@dataclass(frozen=True, slots=True)
class CancelAt(Generic[W]):
    """With `unless_running`, decode answers: AttemptFailed, or the tokens of what runs."""

    worker: W
    unless_running: bool = False


@dataclass(frozen=True, slots=True)
class ScheduleRetry:
    """Back off, then RetryDue."""

    error: PdserveError


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Choose workers for a new attempt."""


@dataclass(frozen=True, slots=True)
class Fail:
    """No further try: the sequences end with this error."""

    error: PdserveError


Effect = CancelAt[W] | ScheduleRetry | Dispatch | Fail


def advance(state: State[W], event: Event[W]) -> tuple[State[W], list[Effect[W]]]:
    """The next state, and what is to be done on the way.

    Raises:
        IllegalTransition: the state has no handler for this event.
    """
    match state, event:
        case Dispatching(), Dispatched(prefill, decode):
            return Prefilling(prefill, decode), []
        case Dispatching(), DispatchFailed(error, may_retry):
            return _recover(error, may_retry)
        case Dispatching(), Cancelled():
            return Finished(), []

        case Prefilling(prefill, decode), DecodeRunning() if decode is not None:
            return Decoding(prefill, decode), []
        # Prefill's report may overtake decode's first token.
        case Prefilling(_, decode), HandoffDone() if decode is not None:
            return Prefilling(None, decode), []
        case Prefilling(_, decode), AllEnded():
            return Finished(), _cancel_at(decode)
        case Prefilling(_, None), PrefillFailed(error, may_retry):
            return _recover(error, may_retry)
        case Prefilling(prefill, decode), PrefillFailed(_, _) if decode is not None:
            if prefill is None:
                return state, []
            return Prefilling(None, decode), [CancelAt(decode, unless_running=True)]
        case Prefilling(prefill, _), DecodeFailed(error, may_retry):
            return _recover(error, may_retry, prefill)
        case Prefilling(prefill, decode), Cancelled():
            return Finished(), _cancel_at(prefill, decode)

        case Decoding(_, _), DecodeRunning():
            return state, []
        # What runs overrules whatever prefill says: a lost acknowledgement is not a failure.
        case Decoding(_, decode), HandoffDone() | PrefillFailed(_, _):
            return Decoding(None, decode), []
        # Prefill is about to hear of the acknowledgement by itself.
        case Decoding(_, _), AllEnded():
            return Finished(), []
        case Decoding(prefill, _), DecodeFailed(error, may_retry):
            return _recover(error, may_retry, prefill)
        case Decoding(prefill, decode), Cancelled():
            return Finished(), _cancel_at(prefill, decode)

        case Recovering(), RetryDue():
            return Dispatching(), [Dispatch()]
        case Recovering(), Cancelled():
            return Finished(), []

        case Finished(), Cancelled():
            return state, []
    raise IllegalTransition(state, event)


def _recover(error: PdserveError, may_retry: bool, *holders: W | None) -> tuple[State[W], list[Effect[W]]]:
    cancels = _cancel_at(*holders)
    if may_retry:
        return Recovering(), [*cancels, ScheduleRetry(error)]
    return Finished(), [*cancels, Fail(error)]


def _cancel_at(*holders: W | None) -> list[Effect[W]]:
    return [CancelAt(worker) for worker in holders if worker is not None]
