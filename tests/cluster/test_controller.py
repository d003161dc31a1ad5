"""Real Ray, real workers with the scripted engine: what the controller keeps running, and what it tells."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.events import Role
from pdserve.rpc.v1.cluster_pb2 import MEMBER_STATE_DRAINING, MEMBER_STATE_READY, Member, Membership
from pdserve.wire.cluster_client import ClusterClient
from tests.cluster.conftest import DEADLINE_S, Controller, is_alive, wait_until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(150)]

Starter = Callable[..., Controller]


@asynccontextmanager
async def connected(controller: Controller) -> AsyncIterator[ClusterClient]:
    client = ClusterClient(controller.address)
    try:
        yield client
    finally:
        await client.close()


async def seen(client: ClusterClient, condition: Callable[[dict[str, Member]], bool]) -> dict[str, Member]:
    """The first membership, as it is pushed, that meets the condition; members by worker id."""
    async with asyncio.timeout(DEADLINE_S):
        async for membership in client.watch():
            members = by_id(membership)
            if condition(members):
                return members
    raise AssertionError("the watch has ended")


def by_id(membership: Membership) -> dict[str, Member]:
    return {member.worker_id: member for member in membership.members}


def all_ready(*worker_ids: str) -> Callable[[dict[str, Member]], bool]:
    def condition(members: dict[str, Member]) -> bool:
        return set(members) == set(worker_ids) and all(m.state == MEMBER_STATE_READY for m in members.values())

    return condition


def is_reachable(members: dict[str, Member], worker_id: str) -> bool:
    """Whether it is a member that is not just being started, too."""
    return worker_id in members and bool(members[worker_id].session_address)


async def test_it_starts_what_should_run_and_publishes_each_change_with_a_higher_version(
    start_controller: Starter,
) -> None:
    controller = start_controller("cluster.decode=2")
    versions = []
    async with connected(controller) as client, asyncio.timeout(DEADLINE_S):
        async for membership in client.watch():
            versions.append(membership.version)
            if all_ready("prefill-0", "decode-0", "decode-1")(by_id(membership)):
                break
        members = by_id(await client.list_workers())
    assert versions == sorted(set(versions))
    assert (membership.desired_prefill, membership.desired_decode) == (1, 2)
    assert {m.worker_id: m.role for m in members.values()} == {"prefill-0": 1, "decode-0": 2, "decode-1": 2}
    assert len({m.epoch for m in members.values()}) == 3
    assert all(m.session_address and m.admin_address and is_alive(m.pid) for m in members.values())
    assert controller.terminate() == 0
    for member in members.values():
        wait_until(lambda pid=member.pid: not is_alive(pid), f"{member.worker_id} has ended")


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_worker_leaves_the_membership_and_is_replaced_under_a_new_epoch(
    start_controller: Starter, fault: signal.Signals
) -> None:
    async with connected(start_controller()) as client:
        before = await seen(client, all_ready("prefill-0", "decode-0"))
        os.kill(before["decode-0"].pid, fault)
        await seen(client, lambda members: not is_reachable(members, "decode-0"))
        after = await seen(client, all_ready("prefill-0", "decode-0"))
    assert after["decode-0"].epoch != before["decode-0"].epoch
    assert after["prefill-0"] == before["prefill-0"]
    wait_until(lambda: not is_alive(before["decode-0"].pid), "the paused process has ended")


async def test_drain_and_scale_take_a_worker_out_of_service_in_order(start_controller: Starter) -> None:
    async with connected(start_controller()) as client:
        first = await seen(client, all_ready("prefill-0", "decode-0"))
        await client.scale(Role.DECODE, 2)
        both = await seen(client, all_ready("prefill-0", "decode-0", "decode-1"))
        assert both["decode-0"] == first["decode-0"]

        await client.drain_worker("decode-0")
        drained = await seen(client, lambda members: members["decode-0"].state == MEMBER_STATE_DRAINING)
        assert drained["decode-1"].state == MEMBER_STATE_READY
        await client.undrain_worker("decode-0")
        await seen(client, all_ready("prefill-0", "decode-0", "decode-1"))

        await client.scale(Role.DECODE, 1)
        last = await seen(client, lambda members: "decode-1" not in members)
        assert last["decode-0"].state == MEMBER_STATE_READY
        wait_until(lambda: not is_alive(both["decode-1"].pid), "the worker that was one too many has ended")

        with pytest.raises(PdserveError) as unknown:
            await client.drain_worker("decode-7")
        assert unknown.value.code is ErrorCode.not_found
        assert "decode-0" in unknown.value.message


async def test_a_new_controller_adopts_the_workers_of_one_that_was_killed_and_what_operators_asked_for(
    start_controller: Starter,
) -> None:
    first = start_controller()
    async with connected(first) as client:
        await seen(client, all_ready("prefill-0", "decode-0"))
        await client.scale(Role.DECODE, 2)
        before = await seen(client, all_ready("prefill-0", "decode-0", "decode-1"))
        first.kill()
        assert all(is_alive(member.pid) for member in before.values())
        start_controller()
        after = await seen(client, all_ready("prefill-0", "decode-0", "decode-1"))
        assert after == before
        assert (await client.list_workers()).desired_decode == 2


async def test_a_second_controller_stands_by_until_the_first_is_gone(start_controller: Starter) -> None:
    first = start_controller()
    async with connected(first) as client:
        before = await seen(client, all_ready("prefill-0", "decode-0"))
    second = start_controller()
    wait_until(lambda: "standing by" in second.log, "the second controller stands by")
    assert first.popen.poll() is None
    first.kill()
    async with connected(second) as client:
        assert await seen(client, all_ready("prefill-0", "decode-0")) == before


async def test_a_worker_that_cannot_start_is_reported_with_its_reason_and_the_others_run(
    start_controller: Starter, unused_tcp_port: int
) -> None:
    controller = start_controller("cluster.prefill=0", "cluster.decode=2", f"worker.session_port={unused_tcp_port}")
    async with connected(controller) as client:
        members = await seen(client, lambda members: any(m.state == MEMBER_STATE_READY for m in members.values()))
    assert [m.state for m in members.values()].count(MEMBER_STATE_READY) == 1
    wait_until(lambda: f"port {unused_tcp_port} on 127.0.0.1 is taken" in controller.log, "the reason is logged")


async def test_no_ray_is_one_line_that_says_what_to_do(start_controller: Starter) -> None:
    controller = start_controller("cluster.address=nowhere")
    assert controller.popen.wait(DEADLINE_S) == 1
    assert controller.log.splitlines() == [
        "controller: cluster.address is 'nowhere': give host:port of a Ray head",
    ]
