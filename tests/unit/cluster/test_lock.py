"""One controller at a time, and what outlasts it."""

import pytest

from pdserve.cluster import lock
from pdserve.cluster.lock import Counts, Lease


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [0.0]
    monkeypatch.setattr(lock.time, "monotonic", lambda: now_s[0])
    return now_s


def test_the_owner_renews_and_another_waits_until_the_lease_ends(now_s: list[float]) -> None:
    lease = Lease()
    assert lease.acquire("a", 2.0) == "a"
    now_s[0] = 1.9
    assert lease.acquire("b", 2.0) == "a"
    assert lease.acquire("a", 2.0) == "a"
    now_s[0] = 3.8
    assert lease.acquire("b", 2.0) == "a"
    now_s[0] = 3.9
    assert lease.acquire("b", 2.0) == "b"
    assert lease.acquire("a", 2.0) == "b"


def test_release_frees_it_at_once_and_only_by_its_owner(now_s: list[float]) -> None:
    lease = Lease()
    lease.acquire("a", 2.0)
    lease.release("b")
    assert lease.acquire("b", 2.0) == "a"
    lease.release("a")
    assert lease.acquire("b", 2.0) == "b"


def test_what_an_operator_asked_for_stays_until_the_settings_change() -> None:
    lease = Lease()
    assert lease.configure(Counts(1, 1)) == Counts(1, 1)
    lease.scale(Counts(1, 3))
    assert lease.configure(Counts(1, 1)) == Counts(1, 3)
    assert lease.configure(Counts(2, 2)) == Counts(2, 2)
