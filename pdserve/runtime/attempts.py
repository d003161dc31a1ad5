"""The table of attempts that a worker holds: who may enter, whose they are, and how each one leaves.

A role's table says what an attempt's states and effects are; everything else about entering and leaving stands here once.
All of it runs on the loop.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from pdserve.core.attempt import Attempt
from pdserve.core.errors import ErrorCode, InvalidRequest, PdserveError
from pdserve.core.events import Token
from pdserve.core.ids import AttemptKey, GroupId
from pdserve.engine.work import Command, Group, Progress, StepOutcome, Stop, TokenIds
from pdserve.rpc.v1 import session_pb2
from pdserve.runtime.sessions import FrontendSession
from pdserve.wire.attempts import attempt_from_proto


@dataclass(slots=True, kw_only=True)
class Held:
    """One attempt on this worker.

    Attributes:
        live: siblings that have neither ended nor been cancelled.
        deadline: ends the attempt when the time that its frontend gave it is over.
    """

    session: FrontendSession
    group: Group
    live: set[int]
    deadline: asyncio.TimerHandle | None = None

    @property
    def key(self) -> AttemptKey:
        return self.group.key


H = TypeVar("H", bound=Held)


@dataclass(frozen=True, slots=True)
class Admission:
    """What a worker takes: its model, ids of its vocabulary, `max_held` attempts at a time.

    What must fit into its engine, the engine refuses itself.
    """

    model: str
    vocab_size: int
    max_held: int


class AttemptTable(ABC, Generic[H]):
    """Attempts by key. A role adds what happens to them.

    Args:
        post: gives the engine a command.
    """

    def __init__(self, admission: Admission, post: Callable[[Command], None]) -> None:
        self.held: dict[AttemptKey, H] = {}
        self.draining = False
        self._admission = admission
        self._post = post
        self._emptied = asyncio.Event()
        self._emptied.set()

    # What a role adds.

    opening: ClassVar[str]
    """The command that begins an attempt in this role: run or reserve."""

    @abstractmethod
    def begin(
        self, session: FrontendSession, group: Group, remaining_s: float | None, command: session_pb2.Command
    ) -> None:
        """Hold the group of a Run or Reserve.

        Raises:
            PdserveError: it cannot be held; the frontend is told.
        """

    @abstractmethod
    def cancel(self, held: H, unless_running: bool) -> None:
        """Every sibling is cancelled."""

    @abstractmethod
    def break_off(self, held: H, error: PdserveError) -> None:
        """The attempt cannot go on here; the frontend is told."""

    @abstractmethod
    def learn(self, outcome: StepOutcome) -> None:
        """Take in what an engine step brought; its tokens have been sent."""

    def learn_progress(self, progress: Sequence[Progress]) -> None:
        """More of these prompts has been computed; only who hands them over has a use for it."""

    @abstractmethod
    def state_name(self, held: H) -> str:
        """Name of the attempt's state, for operators."""

    # What is the same for both.

    def handle(self, session: FrontendSession, command: session_pb2.Command) -> None:
        """Carry out a command of a session.

        Raises:
            PdserveError: it breaks the protocol.
        """
        match command.WhichOneof("kind"):
            case "prompt_part":
                session.prompts.add(command.prompt_part)
            case "cancel":
                self._cancel(session, command.cancel)
            case self.opening:
                self._open(session, command)
            case kind:
                raise PdserveError(ErrorCode.protocol_violation, f"a worker has no use for {kind}")

    def abort_session(self, session: FrontendSession) -> None:
        """Cancel whatever the session carried."""
        for key in session.held:
            self.cancel(self.held[key], unless_running=False)

    def take_outcome(self, outcome: StepOutcome) -> None:
        """Send a step's tokens and reports to the frontends whose they are, and let the role learn from it."""
        for logprobs in outcome.prompt_logprobs:
            if (held := self.held.get(logprobs.key)) is not None:
                held.session.outbox.put_step((), (), (logprobs,))
        for session, tokens in self._by_session(outcome.tokens).items():
            session.outbox.put_step(tokens)
        for stage in outcome.stages:
            if (held := self.held.get(stage.key)) is not None:
                held.session.outbox.put_step((), (stage,))
        self.learn(outcome)
        for failed in outcome.failed:
            if (held := self.held.get(failed.key)) is not None:
                self.break_off(held, failed.error)

    def break_all(self, error: PdserveError) -> None:
        """Nothing can go on here."""
        for held in list(self.held.values()):
            self.break_off(held, error)

    async def wait_empty(self) -> None:
        await self._emptied.wait()

    def _open(self, session: FrontendSession, command: session_pb2.Command) -> None:
        message = (command.run if self.opening == "run" else command.reserve).attempt
        key = AttemptKey(GroupId(session.instance, message.group), message.attempt)
        if key in self.held:
            # AttemptFailed would say that it is not held.
            raise PdserveError(ErrorCode.protocol_violation, f"attempt {key} is here already")
        try:
            group, remaining_s = self._group(session, message)
            self.begin(session, group, remaining_s, command)
        except PdserveError as error:
            session.prompts.drop(message.group, message.attempt)
            session.fail(key, error)

    def _group(self, session: FrontendSession, message: session_pb2.Attempt) -> tuple[Group, float | None]:
        attempt = attempt_from_proto(message, session.instance)
        token_ids = session.prompts.take(message.group, message.attempt, attempt.total_tokens)
        self._check(attempt, token_ids)
        group = Group(
            key=attempt.key,
            siblings=attempt.siblings,
            token_ids=token_ids,
            prompt_tokens=attempt.prompt_tokens,
            params=attempt.params,
            seed=attempt.seed,
            cache_scope=attempt.cache_scope,
            arrival_s=time.monotonic() - attempt.age_s,
            priority=attempt.priority,
        )
        return group, attempt.remaining_s

    def enter(self, held: H, remaining_s: float | None) -> None:
        """Hold an attempt from now on."""
        if remaining_s is not None:
            expired = PdserveError(ErrorCode.total_timeout, "the request's time is over")
            held.deadline = asyncio.get_running_loop().call_later(remaining_s, self.break_off, held, expired)
        self.held[held.key] = held
        held.session.hold(held.key)
        self._emptied.clear()

    def leave(self, held: H) -> None:
        """Forget an attempt that holds nothing any more."""
        if held.deadline is not None:
            held.deadline.cancel()
        del self.held[held.key]
        held.session.let_go(held.key)
        if not self.held:
            self._emptied.set()

    def _check(self, attempt: Attempt, token_ids: TokenIds) -> None:
        admission = self._admission
        if attempt.model != admission.model or attempt.adapter:
            wanted = attempt.model + (f" with adapter {attempt.adapter}" if attempt.adapter else "")
            raise PdserveError(ErrorCode.model_not_found, f"this worker serves {admission.model}, not {wanted}")
        if token_ids.max() >= admission.vocab_size:
            raise InvalidRequest("prompt", f"a prompt's token ids are below {admission.vocab_size}")
        if self.draining:
            raise PdserveError(ErrorCode.draining, "this worker drains")
        if len(self.held) >= admission.max_held:
            raise PdserveError(ErrorCode.queue_full, f"this worker holds {admission.max_held} requests already")

    def _cancel(self, session: FrontendSession, cancel: session_pb2.Cancel) -> None:
        key = AttemptKey(GroupId(session.instance, cancel.group), cancel.attempt)
        session.prompts.drop(cancel.group, cancel.attempt)
        held = self.held.get(key)
        if held is None:
            if cancel.unless_running:
                session.fail(key, PdserveError(ErrorCode.cancelled, "not held here"))
            return
        cancelled = held.live.intersection(cancel.siblings) if cancel.siblings else set(held.live)
        if cancelled == held.live:
            self.cancel(held, cancel.unless_running)
        elif cancelled:
            held.live -= cancelled
            self._post(Stop(key, frozenset(cancelled)))

    def _by_session(self, tokens: Iterable[Token]) -> dict[FrontendSession, list[Token]]:
        by_session: dict[FrontendSession, list[Token]] = {}
        for token in tokens:
            held = self.held.get(token.key)
            # A sibling that was cancelled while the step ran.
            if held is not None and token.sibling in held.live:
                by_session.setdefault(held.session, []).append(token)
        return by_session
