"""What surrounds the GPU's kernel: the arguments that it gets, and when it is not trusted. The kernel is a plain one."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from pdserve.engine.attention import cuda
from pdserve.engine.attention.base import CapturableBackend, PagedCache
from pdserve.engine.attention.cpu import CpuBackend
from pdserve.engine.attention.cuda import CudaBackend, CudaStep, choose_backend, largest_error
from pdserve.engine.attention.reference import ReferenceBackend
from pdserve.engine.work import SequenceSlice
from tests.flash_kernel import plain_varlen_attn

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
Kernel = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "varlen_attn", plain_varlen_attn)


def make_cache(dtype: torch.dtype = torch.bfloat16, block_size: int = 256, blocks: int = 6) -> PagedCache:
    """Token by token within a block, as the GPU's pool keeps it."""
    shape = (2, blocks, block_size, KV_HEADS, HEAD_DIM)
    keys, values = (torch.zeros(shape, dtype=dtype).transpose(2, 3) for _ in range(2))
    return PagedCache(keys, values)


def decode_slices(lengths: list[int]) -> list[SequenceSlice]:
    """One token each, at the end of contexts of these lengths."""
    order = np.random.default_rng(0).permutation(40).tolist()
    slices = []
    for length in lengths:
        count = -(-length // 256)
        slices.append(SequenceSlice(np.zeros(1, np.int32), length - 1, tuple(order[:count])))
        del order[:count]
    return slices


def test_torch_takes_the_arguments_that_the_kernel_is_given() -> None:
    ours = inspect.signature(plain_varlen_attn).parameters
    theirs = inspect.signature(varlen_attn).parameters
    assert [name for name in theirs if name in ours] == list(ours)
    assert {name: ours[name].kind for name in ours} == {name: theirs[name].kind for name in ours}


@pytest.mark.parametrize("heads", [KV_HEADS, HEADS])
def test_the_backend_agrees_with_the_reference(heads: int) -> None:
    # The kernel in float32 shows what the backend itself loses: nothing.
    cache = make_cache(torch.float32)
    assert largest_error(CudaBackend(cache), cache, heads) < 1e-5


def test_a_kernel_that_agrees_is_used() -> None:
    assert isinstance(choose_backend(make_cache(), HEADS), CudaBackend)


def _later_sequences_lost(*args: Any, **kwargs: Any) -> Tensor:
    out = plain_varlen_attn(*args, **kwargs)
    out[1:] = 0
    return out


def _later_sequences_unwritten(*args: Any, **kwargs: Any) -> Tensor:
    out = plain_varlen_attn(*args, **kwargs)
    out[1:] = torch.nan
    return out


def _window_ignored(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Right in decode, wrong within a chunk."""
    out = plain_varlen_attn(query, *args, **kwargs)
    return out if kwargs["window_size"] == (-1, -1) else out.roll(1, 0)


def _lacking(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


@pytest.mark.parametrize("kernel", [_later_sequences_lost, _later_sequences_unwritten, _window_ignored, _lacking])
def test_a_kernel_that_errs_is_not_used(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "varlen_attn", kernel)
    assert isinstance(choose_backend(make_cache(), HEADS), ReferenceBackend)
    assert "using gather and SDPA" in caplog.text


def test_lack_of_memory_is_no_reason_to_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*args: Any, **kwargs: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda, "varlen_attn", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        choose_backend(make_cache(), HEADS)


@pytest.mark.parametrize(("dtype", "block_size"), [(torch.float32, 256), (torch.bfloat16, 16)])
def test_what_the_kernel_cannot_hold_goes_to_the_reference(dtype: torch.dtype, block_size: int) -> None:
    assert isinstance(choose_backend(make_cache(dtype, block_size), HEADS), ReferenceBackend)


def test_the_probe_leaves_the_cache_alone() -> None:
    cache = make_cache()
    cache.keys.fill_(7)
    choose_backend(cache, HEADS)
    assert (cache.keys == 7).all()


def test_only_the_flash_backend_can_be_captured() -> None:
    assert isinstance(CudaBackend(make_cache()), CapturableBackend)
    assert not isinstance(ReferenceBackend(make_cache()), CapturableBackend)
    assert not isinstance(CpuBackend(make_cache(torch.float32, 16)), CapturableBackend)


def tensors(step: CudaStep) -> list[Tensor]:
    return [step.blocks, step.offsets, step.query_starts, step.key_starts, step.lengths]


def test_filled_buffers_hold_what_a_plan_holds() -> None:
    backend = CudaBackend(make_cache(blocks=40))
    buffers = backend.reserve_decode(max_rows=8, max_blocks=5)
    # Longer and shorter batches and contexts in turn, so that what was there before shows.
    for lengths in ([1000, 700, 256, 257, 1, 511, 512, 513], [1], [255, 256, 900], [2, 1280]):
        slices = decode_slices(lengths)
        planned = backend.plan_step(slices)
        buffers.fill_step(slices)
        filled = buffers.first(len(slices))
        for wanted, got in zip(tensors(planned), tensors(filled), strict=True):
            assert wanted.dtype == got.dtype
            assert torch.equal(wanted, got)
        for row, length in enumerate(lengths):
            blocks = -(-length // 256)
            assert torch.equal(planned.tables[row, :blocks], filled.tables[row, :blocks])


def test_a_step_reads_what_was_filled_in_last() -> None:
    backend = CudaBackend(make_cache(torch.float32, blocks=40))
    buffers = backend.reserve_decode(max_rows=4, max_blocks=5)
    step = buffers.first(3)
    generator = torch.Generator().manual_seed(0)
    for lengths in ([1, 256, 700], [257, 3, 1280]):
        slices = decode_slices(lengths)
        query, key, value = (
            torch.randn(3, heads, HEAD_DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        buffers.fill_step(slices)
        filled = step.attend(1, query, key, value, 0.3)
        assert torch.equal(filled, backend.plan_step(slices).attend(1, query, key, value, 0.3))
