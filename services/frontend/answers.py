"""The owner of one request from admission to its outcome: its answers, their attempts, its deadlines."""

import asyncio
from collections.abc import Sequence
from types import TracebackType

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import Stage, StageReport
from pdserve.rpc.v1 import session_pb2 as pb
from services.frontend.attempts import Attempts, AttemptsContext
from services.frontend.choices import Choice
from services.frontend.groups import Group


class Prompt:
    """One prompt of a request with its answers.

    Attributes:
        text: the prompt itself, where the answer repeats it.
        offsets: where each of its tokens begins in `text`, where its log-probabilities are told.
    """

    def __init__(self, group: Group, choices: Sequence[Choice], text: str = "", offsets: Sequence[int] = ()) -> None:
        self.group = group
        self.choices = choices
        self.text = text
        self.offsets = offsets

    @property
    def num_tokens(self) -> int:
        return len(self.group.prompt_ids)


class Answer:
    """All prompts of one request while they are being answered.

    Entering it starts the attempts; leaving it, however that comes about, cancels whatever a worker still holds of it.
    Readers take pieces from `choices` whenever `wait` returns.

    Attributes:
        error: why the answers cannot be finished.
        stages: seconds that each stage took when it was first passed.
        cached_tokens: how much of the prompts came from prefix caches at first.
        last_token_s: when any of them grew last, on the loop's clock; None before the first token.
    """

    def __init__(self, prompts: Sequence[Prompt], context: AttemptsContext) -> None:
        self.prompts = prompts
        self.choices = [choice for prompt in prompts for choice in prompt.choices]
        self.error: PdserveError | None = None
        self.stages: dict[Stage, float] = {}
        self.cached_tokens = 0
        # The request is let in or refused with its first prompt: it may have more prompts than the line has places.
        self._lines = [
            Attempts(prompt.group, prompt.choices, context, self, is_admitted=place > 0)
            for place, prompt in enumerate(prompts)
        ]
        self._config = context.config
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self.last_token_s: float | None = None
        group = prompts[0].group
        self._arrival_s = group.arrival_s
        self._deadline_s = group.deadline_s
        # Prompts whose cached tokens are known.
        self._measured: set[int] = set()

    def __enter__(self) -> "Answer":
        self._watch_deadlines()
        try:
            for line in list(self._lines):
                if self.error is None:
                    line.start()
        except BaseException:
            # A context that was not entered is not left either.
            self._end(pb.CANCEL_REASON_SUPERSEDED)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(pb.CANCEL_REASON_CLIENT_GONE if error is not None else pb.CANCEL_REASON_FINISHED)

    @property
    def ended(self) -> bool:
        return all(choice.ended for choice in self.choices)

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)

    @property
    def completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def unread_bytes(self) -> int:
        """About what the answers hold for their reader."""
        return sum(choice.unread_bytes for choice in self.choices)

    async def wait(self) -> None:
        """Until something has changed since the last call. For one reader."""
        await self._changed.wait()
        self._changed.clear()

    def wake(self) -> None:
        """Let the reader look around."""
        self._changed.set()

    def fail(self, error: PdserveError, reason: "pb.CancelReason.ValueType" = pb.CANCEL_REASON_SUPERSEDED) -> None:
        """End with an error, once; answers that have ended already stay as they are."""
        if self.error is None and not self.ended:
            self.error = error
            self._end(reason)
        self._changed.set()

    # What attempts tell.

    def on_progress(self) -> None:
        is_first = self.last_token_s is None
        self.last_token_s = self._loop.time()
        if is_first and self._timer is not None:
            # From here on deadlines only move back, and the timer may be late for none of them.
            self._timer.cancel()
            self._watch_deadlines()
        self._changed.set()

    def on_stage(self, report: StageReport) -> None:
        self.stages.setdefault(report.stage, report.seconds)
        group = report.key.group.counter
        if report.stage is Stage.PREFILL and group not in self._measured:
            self._measured.add(group)
            self.cached_tokens += report.cached_tokens

    def on_split(self, lines: Sequence[Attempts]) -> None:
        self._lines.extend(lines)

    def on_failed(self, error: PdserveError) -> None:
        self.fail(error)

    def _end(self, reason: "pb.CancelReason.ValueType") -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, []
        for line in lines:
            line.cancel(reason)

    def _watch_deadlines(self) -> None:
        """One timer for three deadlines; tokens only note their time, and the timer looks again when it fires."""
        now_s = self._loop.time()
        due_s, code, limit_s = self._next_deadline()
        if now_s >= due_s:
            waited_for = {
                ErrorCode.ttft_timeout: "no token came within",
                ErrorCode.idle_timeout: "no further token came within",
                ErrorCode.total_timeout: "the answer was not finished within",
            }[code]
            self.fail(PdserveError(code, f"{waited_for} {limit_s:g} s"), pb.CANCEL_REASON_DEADLINE)
        else:
            self._timer = self._loop.call_at(due_s, self._watch_deadlines)

    def _next_deadline(self) -> tuple[float, ErrorCode, float]:
        config = self._config
        if self.last_token_s is None:
            first = (self._arrival_s + config.ttft_timeout_s, ErrorCode.ttft_timeout, config.ttft_timeout_s)
        else:
            first = (self.last_token_s + config.idle_timeout_s, ErrorCode.idle_timeout, config.idle_timeout_s)
        return min(first, (self._deadline_s, ErrorCode.total_timeout, config.total_timeout_s))
