"""Commands that speak with the controller: status, drain, undrain, scale."""

import argparse
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from google.protobuf.json_format import MessageToDict
from rich.box import SIMPLE
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from pdserve.config import load_settings
from pdserve.core.errors import InvalidRequest
from pdserve.core.events import Role
from pdserve.rpc.v1.cluster_pb2 import Member, Membership, MemberState
from pdserve.wire.cluster_client import ClusterClient
from pdserve.wire.convert import MAX_UINT32, role_from_proto
from pdserve.wire.server import format_address

# What other commands, and a person, need of each worker comes first.
_COLUMNS = ("worker", "state", "pid", "session", "kv", "admin", "node")
_ALWAYS_SHOWN = 3
_ANY_WIDTH = 10_000


async def run_status(arguments: argparse.Namespace) -> int:
    async with _connect(arguments.controller) as controller:
        membership = await controller.list_workers()
    if arguments.json:
        print(json.dumps(membership_json(membership), indent=2))
    else:
        console = Console()
        console.print(membership_table(membership, console))
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


def membership_table(membership: Membership, console: Console) -> Table:
    """With the last columns left out where the console is too narrow for them: nothing that is shown is cut."""
    table = _table(membership, _COLUMNS)
    room = console.options.update(max_width=_ANY_WIDTH)
    for shown in range(len(_COLUMNS) - 1, _ALWAYS_SHOWN - 1, -1):
        if Measurement.get(console, room, table).maximum <= console.width:
            break
        table = _table(membership, _COLUMNS[:shown])
    return table


def _table(membership: Membership, columns: Sequence[str]) -> Table:
    desired = f"desired: {membership.desired_prefill} prefill, {membership.desired_decode} decode"
    table = Table(*columns, box=SIMPLE, caption=desired)
    for column in table.columns:
        column.overflow = "fold"
    for member in sorted(membership.members, key=_natural_order):
        # One host, three ports: only the first is written out.
        kv_port, admin_port = (a.rpartition(":")[2] for a in (member.kv_address, member.admin_address))
        pid = str(member.pid) if member.pid else ""
        names = [member.worker_id, state_name(member.state), pid]
        places = [member.session_address, kv_port, admin_port, member.node[:8]]
        table.add_row(*[*names, *places][: len(columns)])
    return table


def state_name(state: MemberState.ValueType) -> str:
    return MemberState.Name(state).removeprefix("MEMBER_STATE_").lower()


def configured_controller() -> str:
    """Where the environment's settings, or the defaults, have the controller. Raises StartupError for a bad setting."""
    cluster = load_settings().cluster
    return format_address(cluster.host, cluster.port)


def _natural_order(member: Member) -> list[str | int]:
    """decode-10 comes after decode-2. Words and numbers take turns, words first."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", member.worker_id)]


@asynccontextmanager
async def _connect(address: str | None) -> AsyncIterator[ClusterClient]:
    controller = ClusterClient(address or configured_controller())
    try:
        yield controller
    finally:
        await controller.close()
