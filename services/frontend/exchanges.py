"""Every open HTTP request that waits for tokens: its outcome, its client's presence, its heartbeat."""

import asyncio
import logging
from collections.abc import Iterator
from types import TracebackType

from aiohttp import web

from pdserve.config import FrontendConfig
from pdserve.core.errors import ErrorCode, Fault, PdserveError
from pdserve.telemetry.metrics import FrontendMetrics
from services.frontend.answers import Answer
from services.frontend.connections import send_whole
from services.frontend.peer_watch import PeerWatch, ask_kernel

# How often clients are looked after: a client that leaves is to be noticed within a second.
_LOOK_S = 0.25
_OUTCOME_COMPLETED = "completed"
_INTERRUPTION_CAUSES = {Fault.CLIENT: "client", Fault.TIMEOUT: "timeout"}

_logger = logging.getLogger(__name__)


class Exchange:
    """One HTTP request from its first byte to its outcome, which is counted exactly once.

    Attributes:
        arrival_s: on the loop's clock.
        model: what was asked for; "" until that is known.
        answer: what is being written; None before admission.
        error: what ended a response that had begun.
        heartbeats: whether silence is to be broken by comments.
        heartbeat_due: set when a stream has been silent for too long; the reader is woken and clears it by writing.
        streaming: whether the status line of a stream has been sent.
    """

    def __init__(self, request: web.Request, exchanges: "Exchanges") -> None:
        self.request = request
        self.arrival_s = asyncio.get_running_loop().time()
        self.model = ""
        self.answer: Answer | None = None
        self.heartbeats = False
        self.heartbeat_due = False
        self.streaming = False
        self.last_write_s = self.arrival_s
        self.error: PdserveError | None = None
        self._exchanges = exchanges
        self._task = asyncio.current_task()
        self._taken_bytes = 0
        self._progress_s = self.arrival_s
        self._client_gone = False
        self._started = False
        self._peer = PeerWatch(exchanges.vanished_timeout_s)

    def __enter__(self) -> "Exchange":
        self._exchanges.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._started:
            self.started("")
        self._exchanges.remove(self, self.error or self._error_of(error))

    def _error_of(self, error: BaseException | None) -> PdserveError | None:
        match error:
            case None:
                return None
            case PdserveError():
                return error
            # Nothing but a client that left, or the end of the process, cancels a handler or breaks its connection.
            case asyncio.CancelledError() | ConnectionError():
                return PdserveError(ErrorCode.client_gone, "the client left")
        return PdserveError(ErrorCode.internal, f"{type(error).__name__} in the frontend")

    def started(self, model: str) -> None:
        """The model that is asked for is known."""
        self.model = model
        self._started = True
        self._exchanges.metrics.request_started(model)

    async def write(self, response: web.Response) -> None:
        """Send a whole response; its reader is looked after meanwhile."""
        await send_whole(self.request, response)

    def wrote(self) -> None:
        self.last_write_s = asyncio.get_running_loop().time()
        self.heartbeat_due = False

    def look(self, now_s: float, config: FrontendConfig) -> None:
        """Notice a client that has gone or takes nothing, and a heartbeat that is due."""
        transport = self.request.transport
        if transport is None or transport.is_closing():
            self._leave()
            return
        unsent_bytes = transport.get_write_buffer_size()
        lag = self._lag(unsent_bytes, now_s, config) or self._silence(transport, now_s)
        if lag is not None:
            _logger.info("a client is given up: it %s", lag)
            transport.abort()
            self._leave()
            return
        if self.heartbeats and unsent_bytes == 0 and now_s - self.last_write_s >= config.heartbeat_s:
            self.heartbeat_due = True
            if self.answer is not None:
                self.answer.wake()

    def _lag(self, unsent_bytes: int, now_s: float, config: FrontendConfig) -> str | None:
        """In what way the client is too slow to be waited for; None if it is not."""
        # What the kernel took, not what is left: more text may have been written meanwhile.
        taken_bytes = self.request.writer.output_size - unsent_bytes
        if unsent_bytes == 0 or taken_bytes != self._taken_bytes:
            self._taken_bytes, self._progress_s = taken_bytes, now_s
            longest_s = config.total_timeout_s + config.stall_timeout_s
            too_long = self.request.writer.output_size > 0 and now_s - self.arrival_s >= longest_s
            return f"has read for {longest_s:g} s" if too_long else None
        if now_s - self._progress_s >= config.stall_timeout_s:
            return f"took nothing for {config.stall_timeout_s:g} s"
        if self.answer is not None and self.answer.unread_bytes > config.max_unread_bytes:
            return f"left more than {config.max_unread_bytes} bytes unread"
        return None

    def _silence(self, transport: asyncio.Transport, now_s: float) -> str | None:
        """Whether the client's machine has vanished."""
        connection = transport.get_extra_info("socket")
        if connection is None or not self._peer.is_due(now_s):
            return None
        return "has vanished" if self._peer.has_vanished(ask_kernel(connection), now_s) else None

    def _leave(self) -> None:
        if self._task is not None and not self._client_gone:
            self._client_gone = True
            self._task.cancel()


class Exchanges:
    """The table of open exchanges. One timer looks after all of them, and stands still when there are none."""

    def __init__(self, config: FrontendConfig, metrics: FrontendMetrics) -> None:
        self._config = config
        self.metrics = metrics
        self.vanished_timeout_s = config.vanished_timeout_s
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, Exchange] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self._look_s = min(_LOOK_S, config.heartbeat_s / 4, config.stall_timeout_s / 4)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Exchange]:
        return iter(list(self._open.values()))

    def add(self, exchange: Exchange) -> None:
        self._open[id(exchange)] = exchange
        self._empty.clear()
        if self._timer is None:
            self._timer = self._loop.call_later(self._look_s, self._look)

    def remove(self, exchange: Exchange, error: PdserveError | None) -> None:
        """The exchange is over, with this error if it failed."""
        del self._open[id(exchange)]
        if not self._open:
            self._empty.set()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        duration_s = self._loop.time() - exchange.arrival_s
        self.metrics.request_ended(exchange.model, error.code.value if error else _OUTCOME_COMPLETED, duration_s)
        if error is not None and exchange.streaming:
            cause = _INTERRUPTION_CAUSES.get(error.spec.fault, "provider")
            self.metrics.stream_interrupted(cause, error.code.value)

    async def wait_empty(self) -> None:
        await self._empty.wait()

    def fail_all(self, error: PdserveError) -> None:
        """End every answer that is still being written."""
        for exchange in self:
            if exchange.answer is not None:
                exchange.answer.fail(error)

    def _look(self) -> None:
        now_s = self._loop.time()
        self._timer = self._loop.call_later(self._look_s, self._look)
        for exchange in self:
            exchange.look(now_s, self._config)
