"""What a device brings: its pool, the pool's memory as tensors, and its attention backend."""

from dataclasses import dataclass
from typing import Protocol

import torch

from pdserve.core.errors import StartupError
from pdserve.core.geometry import KVGeometry
from pdserve.engine.attention import cpu, cuda
from pdserve.engine.attention.base import AttentionBackend, PagedCache
from pdserve.engine.cuda_pool import SCRATCH_BLOCKS, CudaKVPool
from pdserve.engine.host_pool import HostKVPool
from pdserve.engine.interfaces import KVPool
from pdserve.engine.model_loading import DTYPES
from pdserve.engine.pool_memory import Memory


class DevicePool(KVPool, Protocol):
    """A pool whose blocks can be copied between steps."""

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block over all layers."""
        ...


@dataclass(frozen=True, slots=True)
class PagedMemory:
    """A pool and the backend that computes with it.

    Attributes:
        scratch_block: a block beyond the pool's, for the padding of captured steps; None where there is none.
    """

    pool: DevicePool
    backend: AttentionBackend
    scratch_block: int | None = None


def find_device(name: str) -> torch.device:
    """Raises StartupError if this machine has no such device, or none that is supported."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise StartupError(f"unknown device {name}: choose cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise StartupError(f"device {name} is not supported: choose cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StartupError("no CUDA device is usable here: set engine.device to cpu, or install a CUDA build of torch")
    return device


def default_block_size(device: torch.device) -> int:
    """Tokens a block of the device's attention backend."""
    return cuda.BLOCK_SIZE if device.type == "cuda" else cpu.BLOCK_SIZE


def blocks_within(device: torch.device, geometry: KVGeometry, kv_cache_bytes: int) -> int:
    """Blocks for requests of a pool that takes at most `kv_cache_bytes`."""
    scratch_blocks = SCRATCH_BLOCKS if device.type == "cuda" else 0
    return max(0, kv_cache_bytes // geometry.block_bytes - scratch_blocks)


def open_memory(device: torch.device, geometry: KVGeometry, num_blocks: int, num_heads: int) -> PagedMemory:
    """Allocates the pool. Raises StartupError if the memory is not there."""
    if device.type != "cuda":
        host_pool = HostKVPool(geometry, num_blocks)
        return PagedMemory(host_pool, cpu.CpuBackend(host_cache(host_pool)))
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    memory = Memory("the GPU", total_bytes, free_bytes)
    memory.check(geometry, num_blocks)
    try:
        cuda_pool = CudaKVPool(geometry, num_blocks, device)
        backend = cuda.choose_backend(cuda_pool.cache, num_heads)
    except torch.OutOfMemoryError as error:
        raise memory.refusal(geometry, num_blocks) from error
    return PagedMemory(cuda_pool, backend, cuda_pool.scratch_block)


def finish_step(device: torch.device) -> None:
    """Waits until the device has done what it was given: transfers read the step's blocks on other streams."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def host_cache(pool: HostKVPool) -> PagedCache:
    """The pool's memory as tensors of its dtype."""
    typed = torch.from_numpy(pool.memory).view(DTYPES[pool.geometry.dtype])
    return PagedCache(keys=typed[:, 0], values=typed[:, 1])
