"""When a client's machine counts as vanished, on a clock that the test moves."""

import socket
import time

import pytest

from services.frontend.peer_watch import PeerNews, PeerWatch, ask_kernel

TIMEOUT_S = 8.0


def vanished(*news: tuple[float, PeerNews | None]) -> list[bool]:
    """What a watch says to news at these times."""
    watch = PeerWatch(TIMEOUT_S)
    return [watch.has_vanished(each, now_s) for now_s, each in news]


def silent(heard_ago_s: float) -> PeerNews:
    return PeerNews(is_awaited=True, heard_ago_s=heard_ago_s)


def test_a_peer_that_answers_nothing_has_the_timeout() -> None:
    assert vanished((100, silent(1)), (107.9, silent(8.9)), (108, silent(9))) == [False, False, True]


def test_the_time_before_anything_was_sent_does_not_count() -> None:
    assert vanished((100, PeerNews(False, 500)), (101, silent(501)), (108, silent(508))) == [False, False, False]


def test_one_that_always_answers_at_last_is_there() -> None:
    """Something is on its way at every look, and each time something newer."""
    assert not any(vanished(*((100.0 + 2 * look, silent(1)) for look in range(50))))


def test_a_slow_reader_that_answers_probes_is_there_however_seldom_they_come() -> None:
    answered = PeerNews(is_awaited=False, heard_ago_s=50)
    assert not any(vanished((100, answered), (151, silent(51)), (152, answered), (203, silent(51))))


def test_an_answer_begins_the_time_anew() -> None:
    assert vanished((100, silent(0)), (107, silent(2)), (112, silent(7)), (113, silent(8))) == [
        False,
        False,
        False,
        True,
    ]


def test_a_kernel_that_says_nothing_is_no_reason() -> None:
    assert vanished((100, silent(1)), (101, None), (109, None)) == [False, False, False]


def test_it_is_asked_several_times_within_the_timeout_and_not_always() -> None:
    watch = PeerWatch(TIMEOUT_S)
    assert watch.is_due(100)
    watch.has_vanished(None, 100)
    assert not watch.is_due(100.9)
    assert watch.is_due(101)


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="this kernel does not say")
def test_the_kernel_says_when_it_was_acknowledged() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"x")
            assert client.recv(1) == b"x"
            until_s = time.monotonic() + 10
            while (news := ask_kernel(connection)) is None or news.is_awaited:
                assert time.monotonic() < until_s
            assert news.heard_ago_s < 10
        assert ask_kernel(connection) is None
