import ctypes
import subprocess
import sys

import pytest

# Page faults of a hundred allocations of a frame's size, each freed at once, after one.
PROBE = """
import resource
from pdserve.runtime.allocator import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed_memory()
bytearray(b"x" * (8 << 20))
before = faults()
for _ in range(100):
    bytearray(b"x" * (8 << 20))
print(faults() - before)
"""


def page_faults() -> int:
    done = subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_memory_that_was_freed_is_used_again_without_a_page_fault() -> None:
    assert page_faults() < 100
