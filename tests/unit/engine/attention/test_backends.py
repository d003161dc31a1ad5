"""One matrix for every backend: block edges, chunks and batches, against attention over plain contiguous tensors."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pdserve.engine.attention.base import AttentionBackend, PagedCache
from pdserve.engine.attention.cpu import CpuBackend
from pdserve.engine.attention.cuda import CudaBackend
from pdserve.engine.attention.reference import ReferenceBackend
from pdserve.engine.work import SequenceSlice

LAYERS, KV_HEADS, HEADS, HEAD_DIM, BLOCKS = 2, 2, 6, 16, 40


class Case(NamedTuple):
    """A backend, how it keeps its cache, and how near it must come."""

    make: Callable[[PagedCache], AttentionBackend]
    device: str
    dtype: torch.dtype
    block_size: int
    head_dim: int
    tolerance: float


CASES = [
    pytest.param(Case(ReferenceBackend, "cpu", torch.float32, 16, 16, 1e-5), id="reference-float32"),
    pytest.param(Case(ReferenceBackend, "cpu", torch.float32, 256, 16, 1e-5), id="reference-block256"),
    pytest.param(Case(CpuBackend, "cpu", torch.float32, 16, 16, 1e-5), id="cpu-float32"),
    pytest.param(Case(CpuBackend, "cpu", torch.float32, 16, 64, 1e-5), id="cpu-float32-head64"),
    pytest.param(Case(CpuBackend, "cpu", torch.bfloat16, 16, 16, 1e-5), id="cpu-bfloat16"),
    pytest.param(
        Case(ReferenceBackend, "cuda", torch.float32, 256, 64, 1e-4), id="reference-cuda", marks=pytest.mark.gpu
    ),
    pytest.param(Case(CudaBackend, "cuda", torch.bfloat16, 256, 64, 3e-2), id="cuda-bfloat16", marks=pytest.mark.gpu),
    pytest.param(Case(CudaBackend, "cuda", torch.float16, 256, 64, 1e-2), id="cuda-float16", marks=pytest.mark.gpu),
]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    chosen: Case = request.param
    return chosen


class Batch:
    """Sequences with all their keys and values at hand, and a paged cache of random order that they are fed into."""

    def __init__(self, case: Case, lengths: list[int], seed: int = 0) -> None:
        self.case = case
        torch.manual_seed(seed)
        self.lengths = lengths
        # Queries in float32 show what the backend itself loses; a GPU's kernel takes none.
        self.query_dtype = torch.float32 if case.device == "cpu" else case.dtype
        self.queries = [self._random(length, HEADS).to(self.query_dtype) for length in lengths]
        # Rounded to the cache's dtype from the start, so that storing them loses nothing.
        self.keys = [self._random(length, KV_HEADS).to(case.dtype) for length in lengths]
        self.values = [self._random(length, KV_HEADS).to(case.dtype) for length in lengths]
        order = iter(np.random.default_rng(seed).permutation(BLOCKS).tolist())
        self.blocks = [[next(order) for _ in range(-(-length // case.block_size))] for length in lengths]
        # Garbage where nobody has written: what does not belong to a sequence must have no part in it.
        garbage = torch.nan if case.device == "cpu" else 1e3
        shape = (LAYERS, BLOCKS, KV_HEADS, case.block_size, case.head_dim)
        stores = (torch.full(shape, garbage, dtype=case.dtype, device=case.device) for _ in range(2))
        if case.device == "cuda":
            stores = (store.transpose(2, 3).contiguous().transpose(2, 3) for store in stores)
        self.backend = case.make(PagedCache(*stores))

    def _random(self, tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, self.case.head_dim).to(self.case.device)

    def step(self, parts: dict[int, range]) -> dict[int, Tensor]:
        """One step over a range of each named sequence; gives the attended rows of layer 1."""
        slices = [
            SequenceSlice(np.zeros(len(part), np.int32), part.start, tuple(self.blocks[index]))
            for index, part in parts.items()
        ]
        query, key, value = (
            torch.cat([source[index][part.start : part.stop] for index, part in parts.items()])
            for source in (self.queries, self.keys, self.values)
        )
        out = self.backend.plan_step(slices).attend(1, query, key.to(query.dtype), value.to(query.dtype), 0.3)
        return dict(zip(parts, torch.split(out, [len(part) for part in parts.values()]), strict=True))

    def expected(self, index: int, part: range) -> Tensor:
        """Plain causal attention over the sequence's own tensors, in float32."""
        query, key, value = (
            source[index].float().transpose(0, 1)[None] for source in (self.queries, self.keys, self.values)
        )
        full = scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)
        return full[0].transpose(0, 1)[part.start : part.stop]

    def check(self, parts: dict[int, range]) -> None:
        for index, rows in self.step(parts).items():
            difference = (rows.float() - self.expected(index, parts[index])).abs().max().item()
            assert difference <= self.case.tolerance, (index, parts[index])


def edge_lengths(block_size: int) -> list[int]:
    return [1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + 3]


def test_whole_prompts_in_one_batch(case: Case) -> None:
    lengths = edge_lengths(case.block_size)
    Batch(case, lengths).check({index: range(length) for index, length in enumerate(lengths)})


def test_prompts_in_chunks_beside_each_other(case: Case) -> None:
    lengths = edge_lengths(case.block_size)
    batch = Batch(case, lengths, seed=1)
    chunk = case.block_size // 2 + 1
    for start in range(0, max(lengths), chunk):
        batch.check({i: range(start, min(n, start + chunk)) for i, n in enumerate(lengths) if start < n})


def test_decode_rows_beside_chunks(case: Case) -> None:
    lengths = [length + 2 for length in edge_lengths(case.block_size)]
    batch = Batch(case, lengths, seed=2)
    batch.check({index: range(length - 2) for index, length in enumerate(lengths[:-1])})
    decode = {index: range(length - 2, length - 1) for index, length in enumerate(lengths[:-1])}
    batch.check({**decode, len(lengths) - 1: range(case.block_size)})
    batch.check({index: range(length - 1, length) for index, length in enumerate(lengths[:-1])})


def test_every_token_alone(case: Case) -> None:
    batch = Batch(case, [case.block_size + 2], seed=3)
    batch.check({0: range(case.block_size - 1)})
    for start, stop in pairwise(range(case.block_size - 1, case.block_size + 3)):
        batch.check({0: range(start, stop)})


def test_a_row_does_not_depend_on_its_neighbours(case: Case) -> None:
    lengths = edge_lengths(case.block_size)
    together, alone = Batch(case, lengths, seed=4), Batch(case, lengths, seed=4)
    for batch in (together, alone):
        batch.step({index: range(length - 1) for index, length in enumerate(lengths) if length > 1})
    rows = together.step({index: range(length - 1, length) for index, length in enumerate(lengths)})
    for index, length in enumerate(lengths):
        assert torch.equal(alone.step({index: range(length - 1, length)})[index], rows[index])


def test_large_scores_stay_finite(case: Case) -> None:
    batch = Batch(case, [case.block_size + 1], seed=5)
    batch.queries[0] *= 100
    batch.step({0: range(case.block_size)})
    (row,) = batch.step({0: range(case.block_size, case.block_size + 1)}).values()
    assert row.isfinite().all()
