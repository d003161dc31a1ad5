"""Takes pushes: verifies every frame, writes it into the reservation's blocks, and acknowledges the whole."""

import asyncio

import grpc.aio
import numpy as np

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.ids import Ticket
from pdserve.core.version import PROTOCOL_MAJOR
from pdserve.engine.interfaces import KVPool
from pdserve.engine.work import Granted
from pdserve.rpc.v1 import kv_pb2, kv_pb2_grpc
from pdserve.runtime.worker import still_loading
from pdserve.wire.convert import error_from_proto, error_to_proto, geometry_to_proto, ticket_from_proto
from pdserve.wire.errors import abort
from pdserve.wire.frames import Coverage, verify_frame
from pdserve.wire.streams import ReplyWriter, read_first
from pdserve.wire.tokens import tokens_from_columns
from services.decode.attempts import DecodeAttempts, DecodeHeld
from services.decode.reception import Reception

PushContext = grpc.aio.ServicerContext[kv_pb2.PushMessage, kv_pb2.PushReply]


class KVService(kv_pb2_grpc.KVServiceServicer):
    """The decode worker's side of the handoff.

    Args:
        dead_after_s: how long a push may take to show its ticket.
    Attributes:
        pushes: those under way, from their ticket on.
    """

    def __init__(self, worker_id: str, epoch: int, dead_after_s: float) -> None:
        self.pushes = 0
        self._worker_id = worker_id
        self._epoch = epoch
        self._dead_after_s = dead_after_s
        self._attempts: DecodeAttempts
        self._pool: KVPool
        self._is_open = False

    def open(self, attempts: DecodeAttempts, pool: KVPool) -> None:
        """The model is loaded: take pushes from now on."""
        self._attempts = attempts
        self._pool = pool
        self._is_open = True

    async def Meet(  # noqa: N802
        self, request: kv_pb2.MeetRequest, context: "grpc.aio.ServicerContext[kv_pb2.MeetRequest, kv_pb2.MeetResponse]"
    ) -> kv_pb2.MeetResponse:
        """Who this worker is, and the shape of its cache; the pusher compares."""
        if not self._is_open:
            await abort(context, still_loading())
        return kv_pb2.MeetResponse(
            protocol_major=PROTOCOL_MAJOR,
            epoch=self._epoch,
            worker_id=self._worker_id,
            geometry=geometry_to_proto(self._pool.geometry),
        )

    # grpc.aio takes a coroutine that uses its context as well as the generator of the stub.
    async def Push(self, request_iterator: object, context: PushContext) -> None:  # type: ignore[override]  # noqa: N802
        """One push, from its ticket to the acknowledgement."""
        first = await read_first(context, self._dead_after_s)
        replies = ReplyWriter(context)
        self.pushes += 1
        try:
            reply = await self._take(first, context, replies)
        except PdserveError as error:
            reply = kv_pb2.PushReply(failed=error_to_proto(error))
        finally:
            self.pushes -= 1
        await replies.write(reply)

    async def _take(self, first: object, context: PushContext, replies: ReplyWriter) -> kv_pb2.PushReply:
        if not self._is_open:
            raise still_loading()
        if not isinstance(first, kv_pb2.PushMessage) or not first.HasField("open"):
            raise PdserveError(ErrorCode.protocol_violation, "the first message of a push must be its ticket")
        ticket = ticket_from_proto(first.open.ticket)
        held, reception = await self._attempts.open_push(ticket)
        receiver = asyncio.create_task(self._receive(ticket, held, reception, context, replies))
        # Ends by itself only with a failure of the push, or having waited for `ended` to be resolved by its commit.
        error: PdserveError | None = PdserveError(ErrorCode.transfer_failed, "the prefill worker's push broke")
        try:
            await asyncio.wait({receiver, reception.ended}, return_when=asyncio.FIRST_COMPLETED)
            if receiver.done():
                error = receiver.result()
        except PdserveError as caught:
            error = caught
        finally:
            # Also on cancellation, which is how grpc.aio tells a handler that its peer is gone. The receiver writes to
            # blocks only between two awaits: once it is cancelled it never writes again.
            receiver.cancel()
            self._attempts.close_push(held, reception, error)
        if reception.committed:
            return kv_pb2.PushReply(committed=kv_pb2.PushCommitted())
        if reception.stopped:
            error = reception.ended.result()
        raise error if error is not None else PdserveError(ErrorCode.cancelled, "the push was given up")

    async def _receive(
        self, ticket: Ticket, held: DecodeHeld, reception: Reception, context: PushContext, replies: ReplyWriter
    ) -> PdserveError | None:
        """Take frames until the commit, or until prefill gives up; returns why, None if in order.

        Raises:
            PdserveError: the push cannot be trusted.
        """
        granted = await reception.granted
        await replies.write(kv_pb2.PushReply(ready=kv_pb2.PushReady(held_tokens=granted.held_tokens)))
        coverage = Coverage(self._pool.geometry, granted.held_tokens, len(held.group.token_ids))
        while True:
            message: object = await context.read()
            if not isinstance(message, kv_pb2.PushMessage):
                raise PdserveError(ErrorCode.transfer_failed, "prefill ended the push without a commit")
            match message.WhichOneof("kind"):
                case "frame":
                    self._write(message.frame, ticket.nonce, granted, coverage)
                case "commit":
                    self._commit(message.commit, held, coverage)
                    return None
                case "abort":
                    return error_from_proto(message.abort.error) if message.abort.HasField("error") else None
                case kind:
                    raise PdserveError(ErrorCode.protocol_violation, f"{kind} in the middle of a push")

    def _write(self, frame: kv_pb2.Frame, nonce: int, granted: Granted, coverage: Coverage) -> None:
        span = verify_frame(frame, self._pool.geometry, nonce)
        coverage.add(span)
        self._pool.write(granted.block_ids, span.tokens, span.layers, np.frombuffer(frame.data, dtype=np.uint8))

    def _commit(self, commit: kv_pb2.PushCommit, held: DecodeHeld, coverage: Coverage) -> None:
        if not coverage.complete:
            raise PdserveError(ErrorCode.bad_frame, f"commit of an incomplete cache: {coverage}")
        first_tokens = tuple(tokens_from_columns(commit.first_tokens, held.key.group.instance))
        position = len(held.group.token_ids)
        if any(
            t.key != held.key or t.position != position or t.sibling not in held.group.siblings for t in first_tokens
        ):
            raise PdserveError(ErrorCode.protocol_violation, "the commit's first tokens are not those of the attempt")
        self._attempts.commit(held, first_tokens)
