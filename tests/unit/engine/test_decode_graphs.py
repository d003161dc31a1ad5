"""Captured decode steps give what uncaptured ones give. A graph here calls its function again; tests/gpu has real ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.core.errors import StartupError
from pdserve.core.geometry import KVGeometry
from pdserve.engine import decode_graphs, devices, model_runner
from pdserve.engine.attention import cuda
from pdserve.engine.attention.base import PagedCache, StepAttention
from pdserve.engine.attention.cuda import CudaBackend
from pdserve.engine.attention.reference import ReferenceBackend
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.cuda_pool import CudaKVPool
from pdserve.engine.decode_graphs import DecodeGraphs, capture_decode_steps, graph_sizes
from pdserve.engine.devices import PagedMemory, blocks_within
from pdserve.engine.engine import Engine
from pdserve.engine.host_pool import HostKVPool
from pdserve.engine.interfaces import Bytes
from pdserve.engine.model_runner import TorchModelRunner
from pdserve.engine.settings import SchedulerSettings
from pdserve.engine.work import SequenceSlice
from tests.batches import serve
from tests.flash_kernel import plain_varlen_attn
from tests.geometries import geometry
from tests.steps import sample_spec
from tests.tiny_models import tiny_model

CPU = torch.device("cpu")
SCRATCH = 99
VOCAB = 7
GEOMETRY = geometry(num_layers=2, num_kv_heads=2, block_size=256)


@dataclass
class FakeGraph:
    """Calls the function that was to be captured."""

    work: Callable[[], None]
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        self.work()


@dataclass
class FakeCapture:
    """See `CudaCapture`."""

    device: torch.device = CPU
    graphs: list[FakeGraph] = field(default_factory=list)

    def __call__(self, work: Callable[[], None]) -> FakeGraph:
        work()
        self.graphs.append(FakeGraph(work))
        return self.graphs[-1]


@dataclass
class SeenStep:
    """A step's attention that only knows its size."""

    rows: int

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        raise AssertionError("no model attends here")


class SeenBuffers:
    """See `DecodeBuffers`: keeps what it was filled with."""

    def __init__(self) -> None:
        self.slices: list[SequenceSlice] = []

    def fill_step(self, slices: Sequence[SequenceSlice]) -> None:
        self.slices = list(slices)

    def first(self, rows: int) -> SeenStep:
        return SeenStep(rows)


def forward(token_ids: Tensor, positions: Tensor, step: StepAttention) -> Tensor:
    """[tokens, VOCAB] logits that say what each row was given."""
    assert isinstance(step, SeenStep)
    assert len(token_ids) == len(positions) == step.rows
    return torch.stack([token_ids, positions, *[torch.full_like(token_ids, step.rows)] * (VOCAB - 2)], dim=1).float()


def decode_slice(token_id: int, position: int) -> SequenceSlice:
    return SequenceSlice(np.array([token_id], np.int32), position, tuple(range(position // 256 + 1)))


def make_graphs(max_rows: int) -> tuple[DecodeGraphs, SeenBuffers]:
    buffers = SeenBuffers()
    return DecodeGraphs(forward, buffers, max_rows, SCRATCH, CPU, FakeCapture()), buffers


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_sizes_that_are_captured(max_rows: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_rows) == sizes


@pytest.mark.parametrize(
    ("rows", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (17, 20), (20, 20)]
)
def test_a_batch_runs_on_the_smallest_graph_with_room(rows: int, size: int) -> None:
    graphs, _ = make_graphs(20)
    slices = [decode_slice(100 + row, 300 + row) for row in range(rows)]
    wanted = [[100.0 + row, 300.0 + row, *[float(size)] * (VOCAB - 2)] for row in range(rows)]
    assert graphs.run(slices).tolist() == wanted


def test_rows_left_over_compute_in_the_scratch_block() -> None:
    graphs, buffers = make_graphs(8)
    # A full batch first: nothing of it may stay behind.
    graphs.run([decode_slice(100 + row, 300 + row) for row in range(8)])
    slices = [decode_slice(5, 600), decode_slice(6, 700), decode_slice(7, 800)]
    graphs.run(slices)
    assert buffers.slices[:3] == slices
    assert [(part.token_ids.tolist(), part.start, part.block_ids) for part in buffers.slices[3:]] == [
        ([0], 0, (SCRATCH,))
    ]


def test_only_steps_of_decode_alone_are_covered() -> None:
    graphs, _ = make_graphs(4)
    row, chunk = decode_slice(5, 600), SequenceSlice(np.zeros(2, np.int32), 0, (0,))
    assert graphs.covers([row])
    assert graphs.covers([row] * 4)
    assert not graphs.covers([row] * 5)
    assert not graphs.covers([row, chunk])
    assert not graphs.covers([chunk])
    assert not graphs.covers([])


def test_all_sizes_are_captured_at_the_start_the_largest_first() -> None:
    sizes = []

    def capture(work: Callable[[], None]) -> FakeGraph:
        sizes.append(len(seen))
        return FakeCapture()(work)

    seen: list[int] = []

    def noting(token_ids: Tensor, positions: Tensor, step: StepAttention) -> Tensor:
        seen.append(len(token_ids))
        return forward(token_ids, positions, step)

    graphs = DecodeGraphs(noting, SeenBuffers(), 20, SCRATCH, CPU, capture)
    # Once to learn the logits' shape.
    assert seen == [20, 20, 16, 8, 4, 2, 1]
    assert len(sizes) == 6
    graphs.run([decode_slice(1, 1)])
    assert len(sizes) == 6


def flash_backend(dtype: torch.dtype = torch.float32) -> CudaBackend:
    stores = [torch.zeros(2, 4, 256, 2, 8, dtype=dtype).transpose(2, 3) for _ in range(2)]
    return CudaBackend(PagedCache(*stores))


def constant_logits(token_ids: Tensor, positions: Tensor, step: StepAttention) -> Tensor:
    return torch.zeros(len(token_ids), VOCAB)


def test_steps_run_operator_by_operator_where_nothing_can_be_captured() -> None:
    backend = flash_backend()
    capture = FakeCapture()
    assert capture_decode_steps(constant_logits, backend, 0, 2, 3, CPU, capture) is None
    assert capture_decode_steps(constant_logits, backend, 4, 2, None, CPU, capture) is None
    reference = ReferenceBackend(backend._cache)
    assert capture_decode_steps(constant_logits, reference, 4, 2, 3, CPU, capture) is None
    assert capture.graphs == []
    assert capture_decode_steps(constant_logits, backend, 4, 2, 3, CPU, capture) is not None


def test_a_model_that_cannot_be_captured_still_runs(caplog: pytest.LogCaptureFixture) -> None:
    def capture(work: Callable[[], None]) -> FakeGraph:
        raise RuntimeError("operation not permitted when stream is capturing")

    assert capture_decode_steps(constant_logits, flash_backend(), 4, 2, 3, CPU, capture) is None
    assert "operation not permitted when stream is capturing" in caplog.text


def test_lack_of_memory_stops_the_start_and_says_what_to_change() -> None:
    def capture(work: Callable[[], None]) -> FakeGraph:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(StartupError, match="up to 4 sequences: configure a smaller batch or KV cache"):
        capture_decode_steps(constant_logits, flash_backend(), 4, 2, 3, CPU, capture)


class NoStream:
    """Stands for a CUDA stream where there is none."""

    def synchronize(self) -> None:
        """Nothing is under way."""


def test_no_request_is_ever_given_the_scratch_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: NoStream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: NoStream())
    pool = CudaKVPool(GEOMETRY, 5, CPU)
    blocks = BlockManager(pool.num_blocks)
    assert sorted(blocks.allocate(5)) == [0, 1, 2, 3, 4]
    assert not blocks.can_allocate(1)
    assert pool.scratch_block == 5
    assert pool.cache.keys.shape == pool.cache.values.shape == (2, 6, 2, 256, 8)


def test_the_scratch_block_counts_as_memory_of_the_cache() -> None:
    size = GEOMETRY.block_bytes
    assert blocks_within(torch.device("cuda"), GEOMETRY, 10 * size) == 9
    assert blocks_within(torch.device("cuda"), GEOMETRY, size - 1) == 0
    assert blocks_within(CPU, GEOMETRY, 10 * size) == 10


class PoolBesideScratch:
    """A host pool that keeps its last block to itself, as the GPU's pool does."""

    def __init__(self, geometry: KVGeometry, num_blocks: int) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.host = HostKVPool(geometry, num_blocks + 1)

    def read(self, block_ids: Sequence[int], tokens: range, layers: range) -> Bytes:
        return self.host.read(block_ids, tokens, layers)

    def write(self, block_ids: Sequence[int], tokens: range, layers: range, data: Bytes) -> None:
        self.host.write(block_ids, tokens, layers, data)

    def copy_block(self, source: int, target: int) -> None:
        self.host.copy_block(source, target)


Runners = Callable[[int], TorchModelRunner]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[FakeCapture]:
    """Every capture object that a runner has made."""
    made: list[FakeCapture] = []

    def make(device: torch.device) -> FakeCapture:
        made.append(FakeCapture(device))
        return made[-1]

    monkeypatch.setattr(decode_graphs, "CudaCapture", make)
    return made


@pytest.fixture
def make_runner(models_dir: Path, monkeypatch: pytest.MonkeyPatch, captures: list[FakeCapture]) -> Runners:
    """A runner of the GPU's backend over a plain kernel, with graphs of up to so many rows."""

    def open_memory(device: torch.device, geometry: KVGeometry, num_blocks: int, num_heads: int) -> PagedMemory:
        pool = PoolBesideScratch(geometry, num_blocks)
        return PagedMemory(pool, CudaBackend(devices.host_cache(pool.host)), scratch_block=num_blocks)

    monkeypatch.setattr(cuda, "varlen_attn", plain_varlen_attn)
    monkeypatch.setattr(model_runner, "open_memory", open_memory)
    folder = tiny_model("llama", models_dir)
    return lambda max_rows: TorchModelRunner(folder, "float32", "cpu", 40, 256, max_graph_rows=max_rows)


def make_engine(runner: TorchModelRunner) -> Engine:
    return Engine(runner, SchedulerSettings(step_tokens=64, max_sequences=16))


# The largest batch is larger than the largest graph, fits it exactly, or leaves rows over.
@pytest.mark.parametrize("max_rows", [4, 11, 16])
def test_graphs_change_no_token(max_rows: int, make_runner: Runners, captures: list[FakeCapture]) -> None:
    without, with_graphs = make_engine(make_runner(0)), make_engine(make_runner(max_rows))
    assert serve(with_graphs).token_ids == serve(without).token_ids
    (capture,) = captures
    assert [graph.replays > 0 for graph in capture.graphs].count(True) >= 2


def test_padding_writes_to_no_block_but_the_scratch_block(make_runner: Runners) -> None:
    runner = make_runner(8)
    pool = runner.pool
    assert isinstance(pool, PoolBesideScratch)
    pool.host.memory[:] = 0
    step = SequenceSlice(np.array([5], np.int32), 0, (3,), (sample_spec([5], 1),))
    runner.run([replace(step, block_ids=(block,)) for block in (3, 7, 11, 12, 30)], ())
    written = pool.host.memory.any(axis=(0, 1, 3, 4, 5))
    assert np.flatnonzero(written).tolist() == [3, 7, 11, 12, 30, pool.num_blocks]


def test_rows_that_sample_nothing_or_several_times(make_runner: Runners) -> None:
    runner = make_runner(4)
    spec = sample_spec([5], 1)
    quiet = SequenceSlice(np.array([5], np.int32), 0, (3,))
    assert runner.run([quiet], ()) == [[]]
    first, second, third = runner.run([quiet, replace(quiet, block_ids=(4,), samples=(spec, spec)), quiet], ())
    assert (len(first), len(second), len(third)) == (0, 2, 0)
    assert second[0] == second[1]
