"""Decode steps as CUDA graphs: one launch a step in place of one for each operator.

A graph holds addresses and sizes, so a step's inputs go into buffers that stay, and a batch runs on the smallest graph
that has room for it. The rows that are left over compute one token of a sequence that nobody has, in a block that no
request is ever given.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pdserve.core.errors import StartupError
from pdserve.engine.attention.base import (
    AttentionBackend,
    CapturableBackend,
    DecodeBuffers,
    StepAttention,
    token_positions,
)
from pdserve.engine.work import SequenceSlice

_SMALL_SIZES = (1, 2, 4)
_SIZE_STEP = 8
_WARM_UPS = 2
_log = logging.getLogger(__name__)

# (token ids [tokens] int64, positions [tokens] int64, attention of the step) to logits [tokens, vocab].
Forward = Callable[[Tensor, Tensor, StepAttention], Tensor]


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None]], Graph]


class DecodeGraphs:
    """A model's decode steps, captured for every size when this is made.

    Args:
        buffers: of the attention backend, with `max_rows` rows.
        max_rows: sequences of the largest batch.
        scratch_block: of the pool; no request is given it.
        capture: makes a graph of a function; may call it any number of times.
    """

    def __init__(
        self,
        forward: Forward,
        buffers: DecodeBuffers,
        max_rows: int,
        scratch_block: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        self._sizes = graph_sizes(max_rows)
        self._buffers = buffers
        self._padding = SequenceSlice(np.zeros(1, np.int32), 0, (scratch_block,))
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._fill([self._padding] * max_rows)
        # One buffer for all sizes: graphs that each kept their own logits would take gigabytes of a large vocabulary.
        self._logits = torch.empty_like(forward(self._token_ids, self._positions, buffers.first(max_rows)))
        # The largest first: the smaller ones then live in its memory.
        self._graphs = {rows: capture(self._work(forward, rows)) for rows in reversed(self._sizes)}

    def covers(self, slices: Sequence[SequenceSlice]) -> bool:
        """Whether a step is decode alone, and no larger than the largest graph."""
        return 0 < len(slices) <= self._sizes[-1] and all(len(part.token_ids) == 1 for part in slices)

    def run(self, slices: Sequence[SequenceSlice]) -> Tensor:
        """[slices, vocab] logits of a step that is covered. They last until the next one."""
        rows = self._sizes[bisect_left(self._sizes, len(slices))]
        self._fill([*slices, *[self._padding] * (rows - len(slices))])
        self._graphs[rows].replay()
        return self._logits[: len(slices)]

    def _fill(self, slices: Sequence[SequenceSlice]) -> None:
        token_ids = np.concatenate([part.token_ids for part in slices]).astype(np.int64)
        self._token_ids[: len(slices)].copy_(torch.from_numpy(token_ids), non_blocking=True)
        self._positions[: len(slices)].copy_(torch.from_numpy(token_positions(slices)), non_blocking=True)
        self._buffers.fill_step(slices)

    def _work(self, forward: Forward, rows: int) -> Callable[[], None]:
        token_ids, positions, step = self._token_ids[:rows], self._positions[:rows], self._buffers.first(rows)
        logits = self._logits[:rows]

        def work() -> None:
            logits.copy_(forward(token_ids, positions, step))

        return work


class CudaCapture:
    """Captures on a stream of its own, all graphs in one pool of memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Graph:
        # Libraries allocate and choose their kernels when they first meet a size, which cannot be captured.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                work()
        graph = torch.cuda.CUDAGraph()
        # Other threads go on allocating: what they do is no part of the graph.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """The batch sizes that are captured, rising: 1, 2, 4, then every eighth, and `max_rows` itself."""
    sizes = (*_SMALL_SIZES, *range(_SIZE_STEP, max_rows, _SIZE_STEP))
    return (*(size for size in sizes if size < max_rows), max_rows)


@torch.inference_mode()
def capture_decode_steps(
    forward: Forward,
    backend: AttentionBackend,
    max_rows: int,
    max_blocks: int,
    scratch_block: int | None,
    device: torch.device,
    capture: Capture | None = None,
) -> DecodeGraphs | None:
    """Graphs of decode steps of up to `max_rows` sequences of up to `max_blocks` blocks each.

    Args:
        max_rows: 0 asks for none.
        scratch_block: None where the pool has none.
        capture: None captures on the device.
    Returns: None where steps must run operator by operator: nothing is asked for, the backend or the pool is not made
        for it, or the model cannot be captured.
    Raises:
        StartupError: no memory for them.
    """
    if max_rows == 0 or scratch_block is None or not isinstance(backend, CapturableBackend):
        return None
    try:
        buffers = backend.reserve_decode(max_rows, max_blocks)
        return DecodeGraphs(forward, buffers, max_rows, scratch_block, device, capture or CudaCapture(device))
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"no memory for the CUDA graphs of decode steps of up to {max_rows} sequences:"
            " configure a smaller batch or KV cache"
        ) from error
    except RuntimeError as error:
        _log.warning("decode steps cannot be captured here (%s): running them operator by operator", error)
        return None
