"""Another machine, as far as TCP can tell: a network namespace on a cable that can be pulled."""

import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.programs import require_program

_CLONE_NEWNET = 0x40000000
_NAMESPACES = Path("/run/netns")


@dataclass(frozen=True)
class FarMachine:
    """A machine at the other end of a cable.

    Attributes:
        here: this machine's address on the cable.
    """

    name: str
    here: str

    def make_socket(self) -> socket.socket:
        """A TCP socket of that machine, for this process to use."""

        def make() -> socket.socket:
            descriptor = os.open(_NAMESPACES / self.name, os.O_RDONLY)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            finally:
                os.close(descriptor)
            return socket.socket()

        # The namespace is a thread's: this one ends with it.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(make).result()

    def pull_cable(self) -> None:
        """Nothing passes any more, and nobody is told."""
        _ip("-n", self.name, "link", "set", "cable", "down")

    def plug_cable(self) -> None:
        _ip("-n", self.name, "link", "set", "cable", "up")


@contextmanager
def far_machine() -> Iterator[FarMachine]:
    """The test that asks for one is reported as not run where there cannot be one."""
    require_program("ip", package="iproute2")
    name = f"far-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        # A right, and not a package, is missing.
        pytest.skip(f"not run: network namespaces need root and CAP_SYS_ADMIN: {made.stderr.strip()}")
    near_end = f"near-{os.getpid()}"
    network = f"198.18.{os.getpid() % 256}"
    try:
        _ip("link", "add", near_end, "type", "veth", "peer", "name", "cable", "netns", name)
        _ip("addr", "add", f"{network}.1/30", "dev", near_end)
        _ip("link", "set", near_end, "up")
        _ip("-n", name, "addr", "add", f"{network}.2/30", "dev", "cable")
        _ip("-n", name, "link", "set", "cable", "up")
        yield FarMachine(name, f"{network}.1")
    finally:
        # Its end of the cable goes with it, and so does this one; sockets that are still open keep neither.
        _ip("link", "del", near_end)
        _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
