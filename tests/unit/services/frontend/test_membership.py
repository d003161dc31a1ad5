from pdserve.core.events import Role
from pdserve.rpc.v1.cluster_pb2 import Member as MemberMessage
from pdserve.rpc.v1.cluster_pb2 import Membership
from services.frontend.membership import Member, _members


def test_members_that_cannot_be_reached_yet_or_are_of_an_unknown_role_are_left_out() -> None:
    message = Membership(
        members=[
            MemberMessage(role=1, session_address="a:1", epoch=7),
            MemberMessage(role=2),
            MemberMessage(role=9, session_address="c:1"),
        ]
    )
    assert list(_members(message)) == [Member("a:1", Role.PREFILL, 7)]
