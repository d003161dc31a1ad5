"""The attempts at some of a request's answers: dispatch, tokens, failures and recovery.

The state machine of pdserve.core.attempt_state decides; this carries its effects out. One line of attempts has one state
machine, and lives until its answers have ended: a new attempt replays prompt + accepted tokens under a new number.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.config import FrontendConfig
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
    Effect,
    Event,
    Fail,
    HandoffDone,
    PrefillFailed,
    Prefilling,
    Recovering,
    RetryDue,
    ScheduleRetry,
    State,
    advance,
)
from pdserve.core.errors import ErrorCode, PdserveError, internal_error
from pdserve.core.events import PromptLogprobs, Stage, StageReport, Token
from pdserve.core.ids import AttemptKey
from pdserve.rpc.v1 import session_pb2 as pb
from pdserve.telemetry.metrics import FrontendMetrics
from services.frontend.choices import Choice
from services.frontend.dispatcher import Dispatchable, Dispatcher
from services.frontend.groups import Group
from services.frontend.orders import write_orders
from services.frontend.retry_budget import RetryBudget
from services.frontend.waiting import Place
from services.frontend.workers import Worker

_logger = logging.getLogger(__name__)


class AttemptsOwner(Protocol):
    """Who hears what became of the attempts."""

    @property
    def last_token_s(self) -> float | None:
        """When any of the request's answers grew last, on the loop's clock."""

    def on_progress(self) -> None:
        """An answer has grown or ended."""

    def on_stage(self, report: StageReport) -> None: ...

    def on_split(self, lines: "Sequence[Attempts]") -> None:
        """These go on in place of one."""

    def on_failed(self, error: PdserveError) -> None:
        """No more attempts: the answers cannot be finished."""


@dataclass(frozen=True, slots=True)
class AttemptsContext:
    """What all attempts of a frontend share."""

    config: FrontendConfig
    message_bytes: int
    dispatcher: Dispatcher
    metrics: FrontendMetrics


class Attempts:
    """One line of attempts at answers of one group.

    Args:
        choices: the answers, none of them ended.
        is_admitted: the request has been let in already, with another of its prompts or an attempt before.
        failures: attempts that have failed before.
        avoided: names of workers that failed.
        cause: what made the attempt before fail; None if there was none.
    """

    def __init__(
        self,
        group: Group,
        choices: Sequence[Choice],
        context: AttemptsContext,
        owner: AttemptsOwner,
        *,
        is_admitted: bool,
        failures: int = 0,
        avoided: frozenset[str] = frozenset(),
        cause: PdserveError | None = None,
    ) -> None:
        self.priority = group.priority
        self.arrival_s = group.arrival_s
        self.cache_scope = group.cache_scope
        self.avoided: set[str] = set(avoided)
        self.is_admitted = is_admitted
        self._group = group
        self._choices = {choice.sibling: choice for choice in choices}
        self._context = context
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._state: State[Worker] = Dispatching()
        self._key = AttemptKey(group.group, 0)
        self._budget = RetryBudget(context.config, failures)
        self._place: Place[Dispatchable] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._prefill_error: PdserveError | None = None
        self._cancel_reason: pb.CancelReason.ValueType = pb.CANCEL_REASON_SUPERSEDED
        self._stopped_by_string = False
        self._cause = cause
        # Tokens from decode that came before prefill's last word on the prompt.
        self._early: list[tuple[Worker, Token]] = []
        self._awaits_scores = not group.scores.complete

    @property
    def live(self) -> list[Choice]:
        return [choice for choice in self._choices.values() if not choice.ended]

    # What the dispatcher asks.

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and the output that is replayed; several answers have none yet."""
        live = self.live
        return [*self._group.prompt_ids, *live[0].output_ids] if len(live) == 1 else self._group.prompt_ids

    @property
    def reserved_tokens(self) -> int | None:
        live = self.live
        if self._group.params.max_tokens - len(live[0].output_ids) == 1:
            return None
        prompt_tokens = len(self._group.prompt_ids)
        return prompt_tokens + len(live) * self._group.params.max_tokens

    def start(self) -> None:
        """Dispatch the first attempt."""
        self._dispatch()

    def cancel(self, reason: "pb.CancelReason.ValueType") -> None:
        """No more is wanted of any answer. Legal at any time."""
        self._cancel_reason = reason
        self._apply(Cancelled())

    def send_to(self, prefill: Worker, decode: Worker | None) -> None:
        """Send the attempt to its workers, to both at the same moment. A defect ends this request, and nothing else."""
        group = self._group
        token_ids = self.token_ids
        key = self._key = AttemptKey(group.group, next(group.attempt_numbers))
        self._leave_line()
        self._prefill_error = None
        self._early = []
        try:
            attempt = group.describe(key, [choice.sibling for choice in self.live], len(token_ids), self._loop.time())
            orders = write_orders(key, attempt, token_ids, prefill, decode, self._context.message_bytes)
            blocks = -(-(self.reserved_tokens or len(token_ids) + 1) // prefill.block_size)
        except Exception:
            # This may run in the session of a worker that has just become free; the others there go on.
            _logger.exception("attempt %s cannot be sent", key)
            self._apply(DispatchFailed(internal_error(), may_retry=False))
            return
        self._context.metrics.attempt_started("first" if self._cause is None else self._cause.code.value)
        self._apply(Dispatched(prefill, decode))
        if decode is not None:
            decode.carry(key, self, tokens=len(token_ids), blocks=blocks)
            decode.send(orders.decode)
        prefill.carry(key, self, tokens=len(token_ids), blocks=blocks)
        prefill.send(orders.prefill)

    # What workers say of the current attempt.

    def take_token(self, worker: Worker, token: Token) -> None:
        if self._awaits_scores and not self._may_accept(worker):
            self._early.append((worker, token))
            return
        choice = self._choices.get(token.sibling)
        if choice is None or (choice.ended and token.position >= choice.next_position):
            self._context.metrics.tokens_overshoot()
            return
        state = self._state
        if isinstance(state, Prefilling) and worker is state.decode:
            worker.succeeded()
            self._apply(DecodeRunning())
        if token.position != choice.next_position:
            if token.position > choice.next_position:
                self._give_up(worker, token, choice)
            return
        if isinstance(state, Prefilling) and worker is state.prefill:
            worker.succeeded()
        self._budget.progressed()
        now_s = self._loop.time()
        metrics = self._context.metrics
        metrics.tokens_accepted()
        if choice.last_token_s is not None:
            metrics.next_token(self._group.model, now_s - choice.last_token_s)
        choice.last_token_s = now_s
        if choice.accept(token):
            self._end(choice, by_rule=token.finish is not None)
        self._owner.on_progress()

    def take_prompt_logprobs(self, worker: Worker, part: PromptLogprobs) -> None:
        """A stretch of the prompt's log-probabilities; the answers wait for the last one."""
        self._group.scores.take(part)
        if self._group.scores.complete:
            early, self._early = self._early, []
            for sender, token in early:
                self.take_token(sender, token)

    def take_stage(self, worker: Worker, report: StageReport) -> None:
        self._owner.on_stage(report)
        state = self._state
        if report.stage is not Stage.HANDOFF or not isinstance(state, Prefilling | Decoding):
            return
        if worker is state.prefill and state.decode is not None:
            self._apply(HandoffDone())

    def take_failure(self, worker: Worker, error: PdserveError) -> None:
        """The worker holds nothing of the attempt any more."""
        state = self._state
        if not isinstance(state, Prefilling | Decoding):
            return
        worker.drop(self._key)
        if error.code is ErrorCode.cancelled and self._prefill_error is not None:
            # Decode was only told to give up what prefill had lost: that is the cause, and not a fault of decode's.
            error = self._prefill_error
        else:
            self.avoided.add(worker.name)
        if worker is state.prefill:
            self._prefill_error = error
            if state.decode is not None and not self._group.scores.complete:
                # Decode may run, but cannot say what is missing of the prompt.
                state.decode.cancel(self._key, self._cancel_reason)
                self._apply(DecodeFailed(error, self._may_retry(error)))
                return
            self._apply(PrefillFailed(error, self._may_retry(error)))
            return
        self._apply(DecodeFailed(error, self._may_retry(error)))

    # Own decisions.

    def _may_accept(self, worker: Worker) -> bool:
        """Prefill's tokens follow its word on the prompt; decode's may overtake it."""
        self._awaits_scores = not self._group.scores.complete or bool(self._early)
        state = self._state
        return not self._awaits_scores or (isinstance(state, Prefilling) and worker is state.prefill)

    def _end(self, choice: Choice, *, by_rule: bool) -> None:
        if not by_rule:
            self._stopped_by_string = True
        if self.live:
            state = self._state
            if by_rule or not isinstance(state, Prefilling | Decoding):
                return
            writer = state.decode or state.prefill
            if writer is not None:
                writer.cancel(self._key, pb.CANCEL_REASON_STOP_STRING, siblings=[choice.sibling])
        elif self._stopped_by_string:
            self.cancel(pb.CANCEL_REASON_STOP_STRING)
        else:
            self._cancel_reason = pb.CANCEL_REASON_FINISHED
            self._apply(AllEnded())

    def _give_up(self, worker: Worker, token: Token, choice: Choice) -> None:
        """A position is missing: what follows cannot be right."""
        worker.cancel(self._key, pb.CANCEL_REASON_SUPERSEDED)
        missing = f"position {token.position} came before {choice.next_position}"
        error = PdserveError(ErrorCode.protocol_violation, f"worker {worker.name} skipped tokens: {missing}")
        worker.on_failed(self._key, error)

    def _may_retry(self, error: PdserveError) -> bool:
        return self._budget.allows(error, self._loop.time(), self._owner.last_token_s)

    def _apply(self, event: Event[Worker]) -> None:
        before = self._state
        self._state, effects = advance(before, event)
        # Whatever was waited for, this is what came.
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held = list(_holders(self._state))
        for worker in _holders(before):
            if worker not in held:
                worker.drop(self._key)
        for effect in effects:
            self._carry_out(effect)
        if not isinstance(self._state, Dispatching):
            self._leave_line()

    def _carry_out(self, effect: Effect[Worker]) -> None:
        match effect:
            case CancelAt(worker, unless_running):
                worker.cancel(self._key, self._cancel_reason, unless_running=unless_running)
            case ScheduleRetry(error):
                self._schedule_retry(error)
            case Dispatch():
                self._dispatch()
            case Fail(error):
                self._owner.on_failed(error)

    def _schedule_retry(self, error: PdserveError) -> None:
        self._cause = error
        self.is_admitted = True
        backoff_s = self._budget.spend(error)
        live = self.live
        if len(live) > 1 and any(choice.output_ids for choice in live):
            self._split(live, backoff_s)
            return
        self._timer = self._loop.call_later(backoff_s, self._apply, RetryDue())

    def _split(self, live: Sequence[Choice], backoff_s: float) -> None:
        """Answers that have begun differ: each is replayed by itself."""
        lines = [
            Attempts(
                self._group,
                [choice],
                self._context,
                self._owner,
                is_admitted=True,
                failures=self._budget.failures,
                avoided=frozenset(self.avoided),
                cause=self._cause,
            )
            for choice in live
        ]
        for line in lines:
            line._state = Recovering()
            line._timer = self._loop.call_later(backoff_s, line._apply, RetryDue())
        self._apply(Cancelled())
        self._owner.on_split(lines)

    def _dispatch(self) -> None:
        try:
            place = self._context.dispatcher.submit(self)
        except PdserveError as error:
            self._apply(DispatchFailed(error, may_retry=False))
            return
        if place is None:
            return
        self._place = place
        self._timer = self._loop.call_later(self._room_wait_s(), self._refuse)

    def _room_wait_s(self) -> float:
        return self._budget.room_wait_s(self._loop.time(), self._owner.last_token_s)

    def _refuse(self) -> None:
        """Waited for a worker in vain, unless the request's other answers have grown meanwhile."""
        if (wait_s := self._room_wait_s()) > 0:
            self._timer = self._loop.call_later(wait_s, self._refuse)
            return
        before = f"; before that: {self._cause.message}" if self._cause is not None else ""
        error = PdserveError(
            ErrorCode.no_capacity,
            f"no worker could take the request within {self._context.config.wait_s:g} s{before}",
            retry_after_s=self._context.dispatcher.line.retry_after_s,
        )
        self._apply(DispatchFailed(error, may_retry=False))

    def _leave_line(self) -> None:
        if self._place is not None:
            self._context.dispatcher.line.leave(self._place)
            self._place = None


def _holders(state: State[Worker]) -> Iterator[Worker]:
    if isinstance(state, Prefilling | Decoding):
        for worker in (state.prefill, state.decode):
            if worker is not None:
                yield worker
