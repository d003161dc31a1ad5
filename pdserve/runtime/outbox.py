"""What waits to be written to one frontend: steps join the last message while an earlier one is being written."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.events import PromptLogprobs, StageReport, Token
from pdserve.rpc.v1 import session_pb2
from pdserve.wire.convert import stage_to_proto
from pdserve.wire.prompt_logprobs import prompt_logprobs_to_proto
from pdserve.wire.tokens import tokens_to_columns

# Upper estimates: packed columns of small numbers, and a float and an id for each of the best tokens.
_TOKEN_BYTES = 32
_LOGPROB_BYTES = 10


@dataclass(slots=True)
class _Pending:
    event: session_pb2.Event
    since_s: float
    size_bytes: int
    is_step: bool


class Outbox:
    """A queue of events, in order, for one writer.

    Args:
        message_bytes: a step joins the last message only while that stays smaller.
    """

    def __init__(self, message_bytes: int) -> None:
        self._message_bytes = message_bytes
        self._queue: deque[_Pending] = deque()
        self._writing: _Pending | None = None
        self._wake = asyncio.Event()
        self.pending_bytes = 0

    def put(self, event: session_pb2.Event) -> None:
        """Append an event that is a message of its own."""
        self._append(_Pending(event, time.monotonic(), event.ByteSize(), is_step=False))

    def put_step(
        self,
        tokens: Sequence[Token],
        stages: Sequence[StageReport] = (),
        prompt_logprobs: Sequence[PromptLogprobs] = (),
    ) -> None:
        """Append a step's tokens and reports, to the last message if that is a step with room."""
        size_bytes = sum(
            _TOKEN_BYTES + (_LOGPROB_BYTES * len(token.logprobs.top_ids) if token.logprobs else 0) for token in tokens
        ) + _TOKEN_BYTES * len(stages)
        size_bytes += sum(
            _TOKEN_BYTES + _LOGPROB_BYTES * (1 + len(entry.top_ids))
            for part in prompt_logprobs
            for entry in part.entries
        )
        last = self._queue[-1] if self._queue else None
        if last is None or not last.is_step or last.size_bytes + size_bytes > self._message_bytes:
            last = _Pending(session_pb2.Event(step=session_pb2.Step()), time.monotonic(), 0, is_step=True)
            self._append(last)
        tokens_to_columns(tokens, last.event.step.tokens)
        last.event.step.stages.extend(map(stage_to_proto, stages))
        last.event.step.prompt_logprobs.extend(map(prompt_logprobs_to_proto, prompt_logprobs))
        last.size_bytes += size_bytes
        self.pending_bytes += size_bytes

    def oldest_age_s(self) -> float:
        """How long the oldest event that has not been written has waited."""
        oldest = self._writing or (self._queue[0] if self._queue else None)
        return time.monotonic() - oldest.since_s if oldest else 0.0

    async def take(self) -> session_pb2.Event:
        """The next event, for the one writer; it has written the one it took before."""
        if self._writing is not None:
            self.pending_bytes -= self._writing.size_bytes
            self._writing = None
        while not self._queue:
            self._wake.clear()
            await self._wake.wait()
        self._writing = self._queue.popleft()
        return self._writing.event

    def _append(self, pending: _Pending) -> None:
        self._queue.append(pending)
        self.pending_bytes += pending.size_bytes
        self._wake.set()
