"""What `status` shows."""

import json

import pytest
from rich.console import Console

from pdserve.cli.operations import configured_controller, membership_json, membership_table
from pdserve.rpc.v1.cluster_pb2 import MEMBER_STATE_DRAINING, MEMBER_STATE_STARTING, Member, Membership
from pdserve.rpc.v1.common_pb2 import ROLE_DECODE

MEMBERSHIP = Membership(
    version=7,
    desired_prefill=1,
    desired_decode=2,
    members=[
        Member(
            worker_id="decode-0",
            role=ROLE_DECODE,
            state=MEMBER_STATE_DRAINING,
            session_address="127.0.0.1:40001",
            kv_address="127.0.0.1:40002",
            admin_address="127.0.0.1:40003",
            epoch=2**62 + 1,
            pid=4242,
            node="abcdef0123456789",
        )
    ],
)


def test_json_has_words_for_states_and_loses_no_digit_of_an_epoch() -> None:
    status = json.loads(json.dumps(membership_json(MEMBERSHIP)))
    assert status["version"] == 7
    assert status["desired"] == {"prefill": 1, "decode": 2}
    assert status["workers"] == [
        {
            "worker_id": "decode-0",
            "role": "decode",
            "state": "draining",
            "session_address": "127.0.0.1:40001",
            "kv_address": "127.0.0.1:40002",
            "admin_address": "127.0.0.1:40003",
            "epoch": str(2**62 + 1),
            "pid": 4242,
            "node": "abcdef0123456789",
        }
    ]


def shown(membership: Membership, width: int) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(membership_table(membership, console))
    return capture.get()


def test_the_table_fits_a_narrow_terminal() -> None:
    text = shown(MEMBERSHIP, width=80)
    for part in ("decode-0", "draining", "127.0.0.1:40001", "40002", "40003", "4242", "desired: 1 prefill, 2 decode"):
        assert part in text


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (100, ["worker", "state", "pid", "session", "kv", "admin", "node"]),
        (60, ["worker", "state", "pid", "session", "kv"]),
        (40, ["worker", "state", "pid"]),
    ],
)
def test_a_narrower_one_shows_fewer_columns_and_cuts_none(width: int, columns: list[str]) -> None:
    header, row = (line.split() for line in shown(MEMBERSHIP, width).splitlines() if "pid" in line or "4242" in line)
    assert header == columns
    assert row == ["decode-0", "draining", "4242", "127.0.0.1:40001", "40002", "40003", "abcdef01"][: len(columns)]


def test_workers_come_in_the_order_of_their_numbers() -> None:
    ids = ["prefill-0", "decode-10", "decode-2", "decode-2b"]
    members = [Member(worker_id=worker_id, role=ROLE_DECODE, state=MEMBER_STATE_STARTING) for worker_id in ids]
    rows = [line.split()[0] for line in shown(Membership(members=members), width=80).splitlines() if "starting" in line]
    assert rows == ["decode-2", "decode-2b", "decode-10", "prefill-0"]


def test_a_worker_that_is_starting_has_a_row() -> None:
    starting = Member(worker_id="decode-1", role=ROLE_DECODE, state=MEMBER_STATE_STARTING)
    text = shown(Membership(version=1, members=[starting]), width=80)
    assert [line.split() for line in text.splitlines() if "decode-1" in line] == [["decode-1", "starting"]]


def test_the_controller_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOST", "PORT"):
        monkeypatch.delenv(f"PDSERVE_CLUSTER__{name}", raising=False)
    assert configured_controller() == "127.0.0.1:8100"
    monkeypatch.setenv("PDSERVE_CLUSTER__PORT", "8200")
    assert configured_controller() == "127.0.0.1:8200"
    monkeypatch.setenv("PDSERVE_CLUSTER__HOST", "::1")
    assert configured_controller() == "[::1]:8200"
