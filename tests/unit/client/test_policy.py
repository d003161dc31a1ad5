"""When a request is tried again, and after how long."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from pdserve.client.errors import parse_retry_after
from pdserve.client.policy import Retries

RETRIES = Retries(count=3, base_s=1.0, max_wait_s=10.0)


def test_waits_double_and_are_never_twice_the_same() -> None:
    first, second = ({RETRIES.wait_s(tries) for _ in range(50)} for tries in (1, 2))
    assert len(first) > 1
    assert all(wait_s is not None and 0.5 <= wait_s <= 1.5 for wait_s in first)
    assert all(wait_s is not None and 1.0 <= wait_s <= 3.0 for wait_s in second)


def test_never_sooner_than_the_server_asks() -> None:
    waits = [RETRIES.wait_s(1, {"retry-after": "4"}, 503) for _ in range(50)]
    assert all(wait_s is not None and 4.5 <= wait_s <= 5.5 for wait_s in waits)


@pytest.mark.parametrize("status", [400, 401, 404, 408, 500, 502, 504])
def test_only_a_busy_server_is_tried_again(status: int) -> None:
    assert RETRIES.wait_s(1, {"retry-after": "1"}, status) is None


def test_it_ends() -> None:
    assert RETRIES.wait_s(3) is not None
    assert RETRIES.wait_s(4) is None
    assert RETRIES.wait_s(1, {"retry-after": "11"}, 429) is None
    assert RETRIES.wait_s(1, {"x-should-retry": "False"}, 429) is None


@pytest.mark.parametrize(("value", "seconds"), [("7", 7.0), ("0", 0.0), ("", None), ("soon", None), ("-1", None)])
def test_retry_after_in_seconds(value: str, seconds: float | None) -> None:
    assert parse_retry_after(value) == seconds


def test_retry_after_as_a_date() -> None:
    soon = parse_retry_after(format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True))
    assert soon is not None
    assert 20.0 < soon <= 30.0
    assert parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
