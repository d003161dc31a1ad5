import asyncio
from typing import Any

import pytest

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.version import PROTOCOL_MAJOR
from pdserve.engine.scripted import SCRIPTED_GEOMETRY
from pdserve.rpc.v1 import kv_pb2, kv_pb2_grpc
from pdserve.wire.convert import geometry_to_proto
from pdserve.wire.server import GrpcServer
from services.prefill.peers import Peers

pytestmark = pytest.mark.asyncio

EPOCH = 2


class DecodeWorker(kv_pb2_grpc.KVServiceServicer):
    def __init__(self) -> None:
        self.meetings = 0

    async def Meet(self, request: kv_pb2.MeetRequest, context: Any) -> kv_pb2.MeetResponse:  # noqa: N802
        self.meetings += 1
        geometry = geometry_to_proto(SCRIPTED_GEOMETRY)
        return kv_pb2.MeetResponse(protocol_major=PROTOCOL_MAJOR, epoch=EPOCH, worker_id="d", geometry=geometry)


async def serve(worker: DecodeWorker) -> tuple[GrpcServer, str]:
    server = GrpcServer()
    server.add("pdserve.rpc.v1.KVService", kv_pb2_grpc.add_KVServiceServicer_to_server, worker)
    return server, f"127.0.0.1:{await server.start('127.0.0.1', 0)}"


async def meet(peers: Peers, address: str, epoch: int = EPOCH) -> None:
    async with peers.connect(address, epoch):
        assert peers.pushes == 1
    assert peers.pushes == 0


async def test_workers_meet_once_and_again_after_either_was_replaced() -> None:
    peers, worker = Peers("p", 1, SCRIPTED_GEOMETRY, meet_s=5.0), DecodeWorker()
    server, address = await serve(worker)
    await meet(peers, address)
    await meet(peers, address)
    assert worker.meetings == 1
    for _ in range(2):
        with pytest.raises(PdserveError) as refusal:
            await meet(peers, address, EPOCH + 1)
        assert refusal.value.code is ErrorCode.stale_epoch
    await meet(peers, address)
    assert worker.meetings == 4
    await peers.close()
    await server.stop(0)


async def test_a_worker_that_is_gone_is_forgotten_when_the_next_one_is_met() -> None:
    peers = Peers("p", 1, SCRIPTED_GEOMETRY, meet_s=5.0)
    (first, first_address), (second, second_address) = await serve(DecodeWorker()), await serve(DecodeWorker())
    await meet(peers, first_address)
    await first.stop(0)

    async with asyncio.timeout(10):
        while list(peers._peers) != [second_address]:
            await meet(peers, second_address)
    await peers.close()
    await second.stop(0)
