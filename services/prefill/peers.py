"""The decode workers that this one pushes to: a channel each, and geometries compared when two workers first meet."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.geometry import KVGeometry
from pdserve.core.version import PROTOCOL_MAJOR
from pdserve.rpc.v1 import kv_pb2, kv_pb2_grpc
from pdserve.wire.convert import geometry_from_proto, geometry_to_proto
from pdserve.wire.errors import error_from_rpc
from pdserve.wire.server import dial


@dataclass(slots=True, eq=False)
class _Peer:
    """One life of one decode worker; `pushes` of them are under way."""

    address: str
    epoch: int
    channel: grpc.aio.Channel
    meeting: asyncio.Task[None]
    pushes: int = 0
    forgotten: bool = False


class Peers:
    """Channels by address. A worker that was replaced at its address, or whose connection broke, is met anew.

    With each push, those that are not connected and take none are forgotten: decode workers come and go.

    Args:
        worker_id, epoch, geometry: of this worker.
        meet_s: how long a peer may take to answer.
    """

    def __init__(self, worker_id: str, epoch: int, geometry: KVGeometry, meet_s: float) -> None:
        self._worker_id = worker_id
        self._epoch = epoch
        self._geometry = geometry
        self._meet_s = meet_s
        self._peers: dict[str, _Peer] = {}
        self._pushes = 0

    @property
    def pushes(self) -> int:
        """Pushes under way."""
        return self._pushes

    @asynccontextmanager
    async def connect(self, address: str, epoch: int) -> "AsyncIterator[kv_pb2_grpc.KVServiceAsyncStub]":
        """What to push to the decode worker at `address` in its life `epoch` with.

        Raises:
            PdserveError: it cannot be reached, is in another life, or its cache has another shape.
        """
        await self._close_unused()
        peer = self._peer(address, epoch)
        peer.pushes += 1
        self._pushes += 1
        try:
            await asyncio.shield(peer.meeting)
            yield kv_pb2_grpc.KVServiceStub(peer.channel)
        except grpc.RpcError:
            self._forget(peer)
            raise
        finally:
            peer.pushes -= 1
            self._pushes -= 1
            if peer.meeting.done() and (peer.meeting.cancelled() or peer.meeting.exception() is not None):
                self._forget(peer)
            if peer.forgotten and not peer.pushes:
                await _close(peer)

    async def close(self) -> None:
        """Close every channel; pushes have ended."""
        peers = list(self._peers.values())
        self._peers.clear()
        for peer in peers:
            await _close(peer)

    def _peer(self, address: str, epoch: int) -> _Peer:
        known = self._peers.get(address)
        if known is not None and known.epoch == epoch:
            return known
        if known is not None:
            self._forget(known)
        channel = dial(address)
        meeting = asyncio.create_task(self._meet(channel, address, epoch))
        # Pushes hear of its failure; there may be none left to hear it.
        meeting.add_done_callback(lambda done: done.cancelled() or done.exception())
        peer = self._peers[address] = _Peer(address, epoch, channel, meeting)
        return peer

    async def _meet(self, channel: grpc.aio.Channel, address: str, epoch: int) -> None:
        mine = kv_pb2.MeetRequest(
            protocol_major=PROTOCOL_MAJOR,
            epoch=self._epoch,
            worker_id=self._worker_id,
            geometry=geometry_to_proto(self._geometry),
        )
        try:
            theirs = await kv_pb2_grpc.KVServiceStub(channel).Meet(mine, timeout=self._meet_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        if theirs.epoch != epoch:
            raise PdserveError(ErrorCode.stale_epoch, f"the decode worker at {address} is not the one of the ticket")
        compare_geometry(self._worker_id, self._geometry, theirs.worker_id, geometry_from_proto(theirs.geometry))

    async def _close_unused(self) -> None:
        for peer in list(self._peers.values()):
            connected = peer.channel.get_state() is grpc.ChannelConnectivity.READY
            if not peer.pushes and peer.meeting.done() and not connected:
                self._forget(peer)
                await _close(peer)

    def _forget(self, peer: _Peer) -> None:
        peer.forgotten = True
        if self._peers.get(peer.address) is peer:
            del self._peers[peer.address]


async def _close(peer: _Peer) -> None:
    peer.meeting.cancel()
    await peer.channel.close()


def compare_geometry(my_id: str, mine: KVGeometry, their_id: str, theirs: KVGeometry) -> None:
    """Refuse a peer whose cache cannot become ours.

    Raises:
        PdserveError: geometry_mismatch, with both sides named.
    """
    differences = mine.differences(theirs)
    if differences:
        raise PdserveError(
            ErrorCode.geometry_mismatch, f"{my_id} and {their_id} cannot exchange caches: {', '.join(differences)}"
        )
