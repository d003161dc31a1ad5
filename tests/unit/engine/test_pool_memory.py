"""A pool that cannot be is refused in one line, with what is too large and what fits."""

from pathlib import Path

import numpy as np
import psutil
import pytest

from pdserve.config import EngineConfig, ModelConfig
from pdserve.core.errors import StartupError
from pdserve.core.events import Role
from pdserve.engine.host_pool import HostKVPool
from pdserve.engine.pool_memory import Memory
from pdserve.engine.scripted import SCRIPTED_GEOMETRY
from pdserve.runtime.engines import engine_factory


def test_it_says_what_is_too_large_and_what_fits() -> None:
    block_bytes = SCRIPTED_GEOMETRY.block_bytes
    memory = Memory("this machine", total_bytes=100 * block_bytes, free_bytes=40 * block_bytes)
    memory.check(SCRIPTED_GEOMETRY, 100)
    with pytest.raises(StartupError) as refused:
        memory.check(SCRIPTED_GEOMETRY, 10**12)
    assert str(refused.value) == (
        f"no memory for a KV cache of 1000000000000 blocks, {10**12 * block_bytes / 2**30:,.1f} GiB: this machine has "
        "0.0 GiB, and 40 blocks fit into the 0.0 GiB that are free; lower engine.num_blocks or engine.kv_memory_bytes"
    )


def cgroup(folder: Path, limit: str) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{300 << 20}\n")
    (folder / "memory.stat").write_text(f"anon {200 << 20}\ninactive_file {100 << 20}\n")
    return folder


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    assert Memory.of_host(cgroup(tmp_path, str(500 << 20))) == Memory("this container", 500 << 20, 300 << 20)


@pytest.mark.parametrize("limit", ["max", str(1 << 60)])
def test_without_a_limit_it_is_the_machines(tmp_path: Path, limit: str) -> None:
    memory = Memory.of_host(cgroup(tmp_path, limit))
    assert memory.owner == "this machine"
    assert memory.total_bytes == Memory.of_host(tmp_path / "none").total_bytes == psutil.virtual_memory().total


@pytest.mark.parametrize(
    "num_blocks", [10**12, 10**21, psutil.virtual_memory().total // SCRIPTED_GEOMETRY.block_bytes + 1]
)
def test_an_engine_with_more_blocks_than_memory_is_refused(num_blocks: int) -> None:
    make_engine = engine_factory(ModelConfig(), EngineConfig(kind="scripted", num_blocks=num_blocks), Role.DECODE)
    with pytest.raises(StartupError, match=f"a KV cache of {num_blocks} blocks"):
        make_engine()


def test_one_that_the_system_refuses_is_told_like_one_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "zeros", refuse)
    with pytest.raises(StartupError, match="a KV cache of 3 blocks"):
        HostKVPool(SCRIPTED_GEOMETRY, 3)
