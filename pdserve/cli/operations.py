"""Commands that speak with the controller: status, drain, undrain, scale."""

import argparse
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from google.protobuf.json_format import MessageToDict
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.core.errors import InvalidRequest
from pdserve.core.events import Role
from pdserve.rpc.v1.cluster_pb2 import Membership, MemberState
from pdserve.wire.cluster_client import ClusterClient
from pdserve.wire.convert import MAX_UINT32, role_from_proto


async def run_status(arguments: argparse.Namespace) -> int:
    async with _connect(arguments.controller) as controller:
        membership = await controller.list_workers()
    if arguments.json:
        print(json.dumps(membership_json(membership), indent=2))
    else:
        Console().print(membership_table(membership))
    return 0


async def run_drain(arguments: argparse.Namespace) -> int:
    if arguments.deadline is not None and arguments.deadline <= 0:
        raise InvalidRequest("deadline", "--deadline must be more than 0 seconds")
    async with _connect(arguments.controller) as controller:
        await controller.drain_worker(arguments.worker, arguments.deadline)
    print(f"{arguments.worker} drains: it takes no new work")
    return 0


async def run_undrain(arguments: argparse.Namespace) -> int:
    async with _connect(arguments.controller) as controller:
        await controller.undrain_worker(arguments.worker)
    print(f"{arguments.worker} takes work again")
    return 0


async def run_scale(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.count <= MAX_UINT32:
        raise InvalidRequest("count", f"N must be from 0 to {MAX_UINT32}, not {arguments.count}")
    async with _connect(arguments.controller) as controller:
        await controller.scale(Role[arguments.role.upper()], arguments.count)
    workers = "1 worker is" if arguments.count == 1 else f"{arguments.count} workers are"
    print(f"{arguments.role}: {workers} to run; `pdserve status` shows them come and go")
    return 0


def membership_json(membership: Membership) -> dict[str, object]:
    """For scripts: states and roles as lower-case words, epochs as strings, since JSON's readers round large numbers."""
    return {
        "version": membership.version,
        "desired": {"prefill": membership.desired_prefill, "decode": membership.desired_decode},
        "workers": [
            {
                **MessageToDict(member, preserving_proto_field_name=True, always_print_fields_with_no_presence=True),
                "role": str(role_from_proto(member.role)),
                "state": state_name(member.state),
            }
            for member in membership.members
        ],
    }


def membership_table(membership: Membership) -> Table:
    desired = f"desired: {membership.desired_prefill} prefill, {membership.desired_decode} decode"
    table = Table("worker", "state", "session", "kv", "admin", "pid", "node", box=SIMPLE, caption=desired)
    for column in table.columns:
        column.no_wrap = True
    for member in membership.members:
        # One host, three ports: only the first is written out.
        kv_port, admin_port = (a.rpartition(":")[2] for a in (member.kv_address, member.admin_address))
        pid = str(member.pid) if member.pid else ""
        cells = (member.session_address, kv_port, admin_port, pid, member.node[:8])
        table.add_row(member.worker_id, state_name(member.state), *cells)
    return table


def state_name(state: MemberState.ValueType) -> str:
    return MemberState.Name(state).removeprefix("MEMBER_STATE_").lower()


@asynccontextmanager
async def _connect(address: str) -> AsyncIterator[ClusterClient]:
    controller = ClusterClient(address)
    try:
        yield controller
    finally:
        await controller.close()
