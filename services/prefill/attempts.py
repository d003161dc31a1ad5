"""The attempts that a prefill worker holds, from Run to decode's acknowledgement."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.core import prefill_state
from pdserve.core.errors import PdserveError
from pdserve.core.events import Stage, StageReport, Token
from pdserve.core.ids import AttemptKey, Ticket
from pdserve.engine.work import Command, Group, Prefill, Progress, Release, StepOutcome, Stop
from pdserve.rpc.v1 import session_pb2
from pdserve.runtime.attempts import Admission, AttemptTable, Held
from pdserve.runtime.sessions import FrontendSession
from pdserve.wire.convert import ticket_from_proto
from services.prefill.push import Push, PushListener

OpenPush = Callable[[str, Ticket, int, PushListener], Push]


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillHeld(Held):
    """One attempt here, and its push's listener.

    Attributes:
        first_tokens: one for each sibling, once sampled.
        committed_s: when the commit was due, to measure the handoff.
    """

    table: "PrefillAttempts"
    state: prefill_state.State[Push] = field(default_factory=lambda: prefill_state.Running(None))
    first_tokens: tuple[Token, ...] = ()
    committed_s: float = 0.0

    def on_ready(self, held_tokens: int) -> None:
        self.table.advance(self, prefill_state.Ready())

    def on_acknowledged(self) -> None:
        self.table.advance(self, prefill_state.Acknowledged())

    def on_failed(self, error: PdserveError) -> None:
        self.table.advance(self, prefill_state.TransferFailed(error))

    def on_stopped(self) -> None:
        self.table.advance(self, prefill_state.TransferStopped())


class PrefillAttempts(AttemptTable[PrefillHeld]):
    """Attempts by key.

    Args:
        open_push: starts a push to (address, ticket, number of prompt tokens, listener).
    """

    opening = "run"

    def __init__(self, admission: Admission, post: Callable[[Command], None], open_push: OpenPush) -> None:
        super().__init__(admission, post)
        self._open_push = open_push

    def begin(
        self, session: FrontendSession, group: Group, remaining_s: float | None, command: session_pb2.Command
    ) -> None:
        run = command.run
        ticket = ticket_from_proto(run.ticket) if run.HasField("ticket") else None
        held = PrefillHeld(session=session, group=group, live=set(group.siblings), table=self)
        self.enter(held, remaining_s)
        if ticket is None:
            self._post(Prefill(group))
        else:
            push = self._open_push(run.decode_address, ticket, len(group.token_ids), held)
            held.state = prefill_state.Queued(push)

    def cancel(self, held: PrefillHeld, unless_running: bool) -> None:
        self.advance(held, prefill_state.Cancelled())

    def break_off(self, held: PrefillHeld, error: PdserveError) -> None:
        self.advance(held, prefill_state.Broke(error))

    def learn_progress(self, progress: Sequence[Progress]) -> None:
        for each in progress:
            held = self.held.get(each.key)
            if held is not None and isinstance(held.state, prefill_state.Running) and held.state.transfer is not None:
                held.state.transfer.extend(each)

    def learn(self, outcome: StepOutcome) -> None:
        self.learn_progress(outcome.progress)
        first_tokens: dict[AttemptKey, list[Token]] = {}
        for token in outcome.tokens:
            first_tokens.setdefault(token.key, []).append(token)
        for key, tokens in first_tokens.items():
            if (held := self.held.get(key)) is not None:
                held.first_tokens = tuple(token for token in tokens if token.sibling in held.live)
                all_ended = all(token.finish is not None for token in held.first_tokens)
                self.advance(held, prefill_state.FirstTokens(all_ended))

    def state_name(self, held: PrefillHeld) -> str:
        return type(held.state).__name__

    def advance(self, held: PrefillHeld, event: prefill_state.Event) -> None:
        """Take an event, and carry out what follows from it."""
        held.state, effects = prefill_state.advance(held.state, event)
        for effect in effects:
            self._carry_out(held, effect)
        if isinstance(held.state, prefill_state.Finished):
            self.leave(held)

    def _carry_out(self, held: PrefillHeld, effect: prefill_state.Effect[Push]) -> None:
        match effect:
            case prefill_state.Compute():
                self._post(Prefill(held.group))
            case prefill_state.CommitTransfer(push):
                held.committed_s = time.monotonic()
                push.commit(held.first_tokens)
            case prefill_state.StopTransfer(push, error):
                push.stop(error)
            case prefill_state.StopComputing():
                self._post(Stop(held.key))
            case prefill_state.ReleaseBlocks():
                self._post(Release(held.key))
            case prefill_state.ReportHandoff(push):
                seconds = time.monotonic() - held.committed_s
                report = StageReport(held.key, Stage.HANDOFF, seconds, handoff_bytes=push.sent_bytes)
                held.session.outbox.put_step((), (report,))
            case prefill_state.ReportFailure(error):
                held.session.fail(held.key, error)
