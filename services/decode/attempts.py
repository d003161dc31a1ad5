"""The attempts that a decode worker holds, from Reserve to the last token."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.core import decode_state
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import Token
from pdserve.core.ids import AttemptKey, Ticket
from pdserve.engine.work import Command, Commit, Granted, Group, Prefill, Release, Reserve, StepOutcome, Stop
from pdserve.rpc.v1 import session_pb2
from pdserve.runtime.attempts import Admission, AttemptTable, Held
from pdserve.runtime.sessions import FrontendSession
from pdserve.wire.convert import ticket_from_proto
from services.decode.reception import Reception


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeHeld(Held):
    """One attempt here; `ticket` is the only one with which its cache may be pushed, None if it is computed here."""

    ticket: Ticket | None
    state: decode_state.State[Reception, Granted] = field(default_factory=decode_state.Reserved)


class DecodeAttempts(AttemptTable[DecodeHeld]):
    """Attempts by key.

    Args:
        epoch: of this worker's life.
        colocated: whether a Reserve without a ticket is computed here.
        ticket_wait_s: how long a push waits for the reservation that it overtook.
    """

    opening = "reserve"

    def __init__(
        self,
        admission: Admission,
        post: Callable[[Command], None],
        epoch: int,
        ticket_wait_s: float,
        colocated: bool,
    ) -> None:
        super().__init__(admission, post)
        self._epoch = epoch
        self._ticket_wait_s = ticket_wait_s
        self._colocated = colocated
        self._awaited: dict[AttemptKey, asyncio.Future[None]] = {}

    def begin(
        self, session: FrontendSession, group: Group, remaining_s: float | None, command: session_pb2.Command
    ) -> None:
        reserve = command.reserve
        ticket = ticket_from_proto(reserve.ticket) if reserve.HasField("ticket") else None
        if ticket is None and not self._colocated:
            raise PdserveError(
                ErrorCode.protocol_violation, "this worker reads no prompts: a reservation needs a ticket"
            )
        # Its blocks may still be written to; they are released when its push has stopped.
        if (replaced := self.held.get(AttemptKey(group.key.group, reserve.replaces))) is not None:
            self.cancel(replaced, unless_running=False)
        held = DecodeHeld(session=session, group=group, live=set(group.siblings), ticket=ticket)
        self.enter(held, remaining_s)
        if ticket is None:
            held.state = decode_state.Running()
            self._post(Prefill(group, then_decode=True))
            return
        self._post(Reserve(group))
        if (awaited := self._awaited.pop(group.key, None)) is not None:
            awaited.set_result(None)

    def cancel(self, held: DecodeHeld, unless_running: bool) -> None:
        self.advance(held, decode_state.Cancelled(unless_running))

    def break_off(self, held: DecodeHeld, error: PdserveError) -> None:
        self.advance(held, decode_state.Broke(error))

    def learn(self, outcome: StepOutcome) -> None:
        for granted in outcome.granted:
            held = self.held.get(granted.key)
            if held is not None and isinstance(held.state, decode_state.Reserved):
                self.advance(held, decode_state.BlocksGranted(granted))
        for token in outcome.tokens:
            if token.finish is not None and (held := self.held.get(token.key)) is not None:
                held.live.discard(token.sibling)
                if not held.live:
                    self.advance(held, decode_state.AllEnded())

    def state_name(self, held: DecodeHeld) -> str:
        return type(held.state).__name__

    async def open_push(self, ticket: Ticket) -> tuple[DecodeHeld, Reception]:
        """Let the push with this ticket in; `close_push` follows.

        Raises:
            PdserveError: stale_epoch or unknown_ticket; there is no live reservation for it.
        """
        if ticket.decode_epoch != self._epoch:
            raise PdserveError(ErrorCode.stale_epoch, "the ticket is for an earlier life of this decode worker")
        if ticket.key not in self.held:
            await self._wait_for(ticket.key)
        held = self.held.get(ticket.key)
        if held is None or held.ticket != ticket:
            raise PdserveError(ErrorCode.unknown_ticket, f"no reservation for attempt {ticket.key} with this ticket")
        if not isinstance(held.state, decode_state.Reserved) or held.state.transfer is not None:
            raise PdserveError(ErrorCode.unknown_ticket, f"the ticket for attempt {ticket.key} has been used")
        reception = Reception()
        self.advance(held, decode_state.PushOpened(reception))
        return held, reception

    def commit(self, held: DecodeHeld, first_tokens: tuple[Token, ...]) -> None:
        """The prompt's cache is complete and verified."""
        # A sibling without a token was cancelled at prefill first; its cancellation is on the way here too.
        going_on = tuple(token for token in first_tokens if token.finish is None and token.sibling in held.live)
        ended = held.live - {token.sibling for token in going_on}
        held.live -= ended
        if not held.live:
            self.cancel(held, unless_running=False)
            return
        if ended:
            self._post(Stop(held.key, frozenset(ended)))
        self.advance(held, decode_state.Committed(going_on))

    def close_push(self, held: DecodeHeld, reception: Reception, error: PdserveError | None) -> None:
        """Nothing writes for this push any more. `error` is why it ended, None if it was given up in order."""
        if reception.stopped:
            self.advance(held, decode_state.TransferStopped())
        elif not reception.committed:
            self.advance(held, decode_state.TransferFailed(error))

    def advance(self, held: DecodeHeld, event: decode_state.Event[Reception, Granted]) -> None:
        """Take an event, and carry out what follows from it."""
        if isinstance(held.state, decode_state.Finished):
            return
        held.state, effects = decode_state.advance(held.state, event)
        for effect in effects:
            self._carry_out(held, effect)
        if isinstance(held.state, decode_state.Finished):
            self.leave(held)

    def _carry_out(self, held: DecodeHeld, effect: decode_state.Effect[Reception, Granted]) -> None:
        match effect:
            case decode_state.SendReady(reception, grant):
                reception.grant(grant)
            case decode_state.StartDecoding(first_tokens):
                self._post(Commit(held.key, first_tokens))
            case decode_state.Acknowledge(reception):
                reception.acknowledge()
            case decode_state.StopTransfer(reception, error):
                reception.stop(error)
            case decode_state.ReleaseBlocks():
                self._post(Release(held.key))
            case decode_state.ReportFailure(error):
                held.session.fail(held.key, error)

    async def _wait_for(self, key: AttemptKey) -> None:
        awaited = self._awaited.setdefault(key, asyncio.get_running_loop().create_future())
        try:
            await asyncio.wait({awaited}, timeout=self._ticket_wait_s)
        finally:
            if self._awaited.get(key) is awaited:
                del self._awaited[key]
