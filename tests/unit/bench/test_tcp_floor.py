"""The floor moves every byte, in two processes, or fails."""

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.tcp_floor import MESSAGE_BYTES, receive, send


@pytest.mark.parametrize("bytes_total", [1, MESSAGE_BYTES, 3 * MESSAGE_BYTES + 7])
def test_every_byte_arrives(bytes_total: int) -> None:
    one, other = socket.socketpair()
    with one, other, ThreadPoolExecutor() as pool:
        receiving = pool.submit(receive, other, bytes_total)
        assert send(one, bytes_total) > 0
        receiving.result()


def test_a_sender_that_ends_early_is_noticed() -> None:
    one, other = socket.socketpair()
    with other:
        with one:
            one.sendall(b"abc")
        with pytest.raises(ConnectionError, match="97 bytes too early"):
            receive(other, 100)


def test_two_processes_print_bytes_a_second() -> None:
    command = [sys.executable, "-m", "bench.tcp_floor", str(2 * MESSAGE_BYTES)]
    assert float(subprocess.run(command, capture_output=True, check=True).stdout) > 0
