"""Names for requests, attempts and sequences.

A frontend mints every id: its random instance number and a counter. A client's own request id is a label and never a
key. All tables of the cluster are keyed by these types, so two attempts of one request can never be confused.
"""

import secrets
from itertools import count
from typing import NamedTuple


class GroupId(NamedTuple):
    """One request: n ≥ 1 sibling sequences with one prompt."""

    instance: int
    counter: int

    def __str__(self) -> str:
        return f"{self.instance:016x}-{self.counter}"


class AttemptKey(NamedTuple):
    """One try at a group. Attempt numbers grow with each try and are never used twice within a group."""

    group: GroupId
    attempt: int

    def __str__(self) -> str:
        return f"{self.group}/{self.attempt}"


def random_id() -> int:
    """A random non-zero 63-bit number: an instance, an epoch or a nonce."""
    return secrets.randbits(62) + 1


class GroupIdMint:
    """The one source of group ids of a frontend process."""

    def __init__(self, instance: int) -> None:
        self.instance = instance
        self._counter = count(1)

    def mint(self) -> GroupId:
        return GroupId(self.instance, next(self._counter))


class Ticket(NamedTuple):
    """The right to push one attempt's KV cache from one prefill worker's life into one decode worker's.

    Epochs change whenever a process starts, so a ticket never reaches a worker that replaced the one it was meant for.
    """

    prefill_epoch: int
    decode_epoch: int
    key: AttemptKey
    nonce: int
