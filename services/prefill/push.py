"""Sends one prompt's cache to decode: opened when the request is queued, frames as layers and chunks finish, then the commit."""

import asyncio
import logging
from typing import Protocol

import grpc.aio

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import Token
from pdserve.core.ids import Ticket
from pdserve.engine.interfaces import KVPool
from pdserve.engine.work import Progress
from pdserve.rpc.v1 import kv_pb2
from pdserve.wire.convert import error_from_proto, error_to_proto, ticket_to_proto
from pdserve.wire.errors import error_from_rpc
from pdserve.wire.frames import encode_frame, frame_spans
from pdserve.wire.tokens import tokens_to_columns
from services.prefill.cursor import PushCursor
from services.prefill.peers import Peers

log = logging.getLogger(__name__)

PushCall = grpc.aio.StreamStreamCall[kv_pb2.PushMessage, kv_pb2.PushReply]


class PushListener(Protocol):
    """Who asked for the push. Exactly one of the last three comes, and nothing reads blocks after it."""

    def on_ready(self, held_tokens: int) -> None: ...

    def on_acknowledged(self) -> None: ...

    def on_failed(self, error: PdserveError) -> None: ...

    def on_stopped(self) -> None: ...


class _Stopped(Exception):
    """The push was told to stop."""


class Push:
    """One push, as one task.

    Args:
        num_tokens: of the whole prompt.
        stop_s: how long a peer may keep the last message from leaving when the push is stopped.

    Attributes:
        sent_bytes: of the cache, so far.
    """

    def __init__(
        self,
        peers: Peers,
        address: str,
        ticket: Ticket,
        pool: KVPool,
        num_tokens: int,
        listener: PushListener,
        stop_s: float,
    ) -> None:
        self._peers = peers
        self._address = address
        self._ticket = ticket
        self._pool = pool
        self._num_tokens = num_tokens
        self._listener = listener
        self._stop_s = stop_s
        self._block_ids: tuple[int, ...] = ()
        self._first_tokens: tuple[Token, ...] | None = None
        # From `ready` on; nothing is computed before.
        self._cursor: PushCursor | None = None
        self._acknowledged = False
        self._error: PdserveError | None = None
        self._stopping = False
        self._stop_reason: PdserveError | None = None
        self._call: PushCall | None = None
        self._changed = asyncio.Event()
        self.sent_bytes = 0
        self._task = asyncio.create_task(self._outcome())
        # Unlike the task's own code this also runs for one that is cancelled before its first step.
        self._task.add_done_callback(self._tell)

    def extend(self, progress: Progress) -> None:
        """More of the prompt's cache may be read. Comes after `on_ready` only."""
        if self._cursor is None:
            raise AssertionError(f"progress of {progress.key} before decode was ready for it")
        self._block_ids = progress.block_ids
        self._cursor.extend(progress)
        self._changed.set()

    def commit(self, first_tokens: tuple[Token, ...]) -> None:
        """The prompt is computed; these are its siblings' first tokens."""
        self._first_tokens = first_tokens
        self._changed.set()

    def stop(self, reason: PdserveError | None) -> None:
        """Give up, and tell decode why if it still listens."""
        self._stopping = True
        self._stop_reason = reason
        self._changed.set()
        if self._call is None:
            self._task.cancel()
        else:
            # A peer that takes nothing any more must not keep the blocks.
            asyncio.get_running_loop().call_later(self._stop_s, self._call.cancel)

    def _tell(self, task: "asyncio.Task[PdserveError | None]") -> None:
        if self._stopping:
            self._listener.on_stopped()
        elif (error := task.result()) is not None:
            self._listener.on_failed(error)
        else:
            self._listener.on_acknowledged()

    async def _outcome(self) -> PdserveError | None:
        """The whole push; returns what it failed with. Never raises: whoever waits for its end holds blocks."""
        try:
            async with self._peers.connect(self._address, self._ticket.decode_epoch) as stub:
                self._call = stub.Push()
                try:
                    await self._converse(self._call)
                finally:
                    self._call.cancel()
        except PdserveError as error:
            return error
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error)
        except (asyncio.CancelledError, asyncio.InvalidStateError):
            # By `stop`, or because the call was over; this task is nobody else's to cancel.
            return PdserveError(ErrorCode.transfer_failed, "the push was cut off")
        except Exception:
            log.exception("push failed", extra={"attempt": str(self._ticket.key)})
            return PdserveError(ErrorCode.internal, "the push failed for a reason that the prefill worker has logged")
        return None

    async def _converse(self, call: PushCall) -> None:
        await call.write(kv_pb2.PushMessage(open=kv_pb2.PushOpen(ticket=ticket_to_proto(self._ticket))))
        reader = asyncio.create_task(self._read(call))
        try:
            try:
                await self._write(call)
                await call.done_writing()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                # The call is over; its reader has decode's reason, if decode gave one.
                await reader
                self._check()
                raise PdserveError(ErrorCode.transfer_failed, f"the push broke: {error}") from error
            await reader
            self._check()
        except _Stopped:
            abort = kv_pb2.PushAbort(error=error_to_proto(self._stop_reason) if self._stop_reason else None)
            await call.write(kv_pb2.PushMessage(abort=abort))
            await call.done_writing()
            await reader
        finally:
            reader.cancel()

    async def _read(self, call: PushCall) -> None:
        """Take decode's replies until its last one."""
        while self._error is None and not self._acknowledged:
            try:
                reply = await call.read()
            except grpc.aio.AioRpcError as error:
                self._error = error_from_rpc(error)
            else:
                self._take(reply)
            self._changed.set()

    def _take(self, reply: object) -> None:
        if not isinstance(reply, kv_pb2.PushReply):
            self._error = PdserveError(ErrorCode.transfer_failed, "decode ended the push without a word")
            return
        match reply.WhichOneof("kind"):
            case "ready" if self._cursor is None:
                self._cursor = PushCursor(reply.ready.held_tokens, self._pool.geometry)
            case "committed":
                self._acknowledged = True
            case "failed":
                self._error = error_from_proto(reply.failed)
            case kind:
                self._error = PdserveError(ErrorCode.protocol_violation, f"decode answered a push by {kind}")

    async def _write(self, call: PushCall) -> None:
        while self._cursor is None:
            await self._wait()
        self._listener.on_ready(self._cursor.sent_tokens)
        while self._first_tokens is None or self._cursor.sent_tokens < self._num_tokens:
            if (part := self._cursor.take()) is not None:
                await self._write_frames(call, *part)
            else:
                await self._wait()
        commit = kv_pb2.PushCommit(first_tokens=tokens_to_columns(self._first_tokens))
        await call.write(kv_pb2.PushMessage(commit=commit))

    async def _write_frames(self, call: PushCall, tokens: range, layers: range) -> None:
        geometry = self._pool.geometry
        for span in frame_spans(geometry, tokens, layers):
            self._check()
            data = self._pool.read(self._block_ids, span.tokens, span.layers)
            message = kv_pb2.PushMessage()
            encode_frame(span, geometry, self._ticket.nonce, data, message.frame)
            await call.write(message)
            self.sent_bytes += len(message.frame.data)

    async def _wait(self) -> None:
        """Until something has changed.

        Raises:
            _Stopped: the push was told to stop.
            PdserveError: decode has failed it.
        """
        await self._changed.wait()
        self._changed.clear()
        self._check()

    def _check(self) -> None:
        if self._stopping:
            raise _Stopped
        if self._error is not None:
            raise self._error
