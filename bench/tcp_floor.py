"""What loopback TCP can carry between two processes: `python -m bench.tcp_floor BYTES` prints bytes a second.

This process sends messages of 1 MiB; a second one receives each into the same buffer. The time is the sender's alone,
from its first byte to the receiver's word that the last has come.
"""

import socket
import subprocess
import sys
from time import perf_counter

MESSAGE_BYTES = 1 << 20
DONE = b"."


def send(connection: socket.socket, bytes_total: int) -> float:
    """Send `bytes_total` bytes and wait for the receiver's word: seconds."""
    message = memoryview(bytes(MESSAGE_BYTES))
    start_s = perf_counter()
    left_bytes = bytes_total
    while left_bytes:
        size_bytes = min(left_bytes, MESSAGE_BYTES)
        connection.sendall(message[:size_bytes])
        left_bytes -= size_bytes
    if connection.recv(1) != DONE:
        raise ConnectionError("the receiver ended before the last byte")
    return perf_counter() - start_s


def receive(connection: socket.socket, bytes_total: int) -> None:
    """Receive `bytes_total` bytes, a message at a time, then say so.

    Raises:
        ConnectionError: the sender ended before the last byte.
    """
    buffer = memoryview(bytearray(MESSAGE_BYTES))
    left_bytes = bytes_total
    while left_bytes:
        got_bytes = 0
        size_bytes = min(left_bytes, MESSAGE_BYTES)
        while got_bytes < size_bytes:
            count = connection.recv_into(buffer[got_bytes:size_bytes])
            if count == 0:
                raise ConnectionError(f"the sender ended {left_bytes - got_bytes} bytes too early")
            got_bytes += count
        left_bytes -= size_bytes
    connection.sendall(DONE)


def main(arguments: list[str]) -> int:
    """With BYTES: start a receiver and send to it. With BYTES and a port: be that receiver."""
    bytes_total = int(arguments[0])
    if len(arguments) > 1:
        with socket.create_connection(("127.0.0.1", int(arguments[1]))) as connection:
            receive(connection, bytes_total)
        return 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "bench.tcp_floor", str(bytes_total), str(port)]
        with subprocess.Popen(command) as receiver:
            connection, _ = listener.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                seconds = send(connection, bytes_total)
    print(bytes_total / seconds)
    return receiver.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
