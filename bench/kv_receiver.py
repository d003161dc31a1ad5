"""A decode worker with everything real but the model: its pool has the shape of the default model's, its tokens are zeros.

`python -m bench.kv_receiver` takes the settings of `python -m services.decode`.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from bench.cluster import free_ports, stop
from pdserve.config import ModelConfig
from pdserve.core.geometry import KVGeometry
from pdserve.engine.engine import Engine
from pdserve.engine.host_pool import HostKVPool
from pdserve.engine.work import BlockCopy, Sampled, SequenceSlice
from pdserve.runtime.process import run_process
from pdserve.runtime.worker import run_worker
from services.decode.worker import DecodeWorker

MODEL = ModelConfig().name
GEOMETRY = KVGeometry(
    model_fingerprint="bench",
    adapter="",
    dtype="bfloat16",
    codec="raw",
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    block_size=16,
)
PUSH_TOKENS = 1500
POOL_PUSHES = 4


class IdleRunner:
    """A pool that is written to, and steps that compute nothing."""

    def __init__(self) -> None:
        self.geometry = GEOMETRY
        self.pool = HostKVPool(GEOMETRY, POOL_PUSHES * GEOMETRY.blocks_for(PUSH_TOKENS + 2))
        self.pool.memory.fill(0)  # the system hands pages out now, not while a push is timed
        self.vocab_size = 1 << 15
        self.max_context_tokens = 2 * PUSH_TOKENS

    def run(
        self,
        slices: Sequence[SequenceSlice],
        copies: Sequence[BlockCopy],
        on_layers: Callable[[int], None] | None = None,
    ) -> list[list[Sampled]]:
        """See `ModelRunner.run`."""
        return [[Sampled(0) for _ in part.samples] for part in slices]


def idle_engine() -> Engine:
    return Engine(IdleRunner())


@contextmanager
def receiver() -> Iterator[str]:
    """A receiver in a process of its own; gives the address of its sessions, where it may not listen yet."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "bench.kv_receiver", "--set", f"worker.session_port={port}"]
    process = subprocess.Popen(
        [*command, "--set", "log.level=WARNING"], stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        stop(process)


if __name__ == "__main__":
    sys.exit(
        run_process("decode", lambda settings, stopping: run_worker(DecodeWorker(settings, idle_engine), stopping))
    )
