"""What `status` shows."""

import json

from rich.console import Console

from pdserve.cli.operations import membership_json, membership_table
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


def test_the_table_fits_a_narrow_terminal() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(membership_table(MEMBERSHIP))
    text = capture.get()
    for part in ("decode-0", "draining", "127.0.0.1:40001", "40002", "40003", "4242", "desired: 1 prefill, 2 decode"):
        assert part in text


def test_a_worker_that_is_starting_has_a_row() -> None:
    starting = Member(worker_id="decode-1", role=ROLE_DECODE, state=MEMBER_STATE_STARTING)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(membership_table(Membership(version=1, members=[starting])))
    assert [line.split() for line in capture.get().splitlines() if "decode-1" in line] == [["decode-1", "starting"]]
