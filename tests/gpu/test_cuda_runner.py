"""The runner on a GPU: exact in float32 by the reference backend, near in half precision by flash attention."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pdserve.engine.attention.base import PagedCache
from pdserve.engine.attention.cuda import CudaBackend, choose_backend, largest_error
from pdserve.engine.model_runner import TorchModelRunner
from tests.steps import Oracle, generate
from tests.tiny_models import KINDS, tiny_model

pytestmark = pytest.mark.gpu
LENGTHS = (1, 16, 255, 256, 257, 300)


def _prompts() -> list[list[int]]:
    random = np.random.default_rng(2)
    return [random.integers(2, 320, length).tolist() for length in LENGTHS]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_equals_generate_in_float32(kind: str, models_dir: Path) -> None:
    folder = tiny_model(kind, models_dir)
    torch.backends.cuda.matmul.allow_tf32 = False
    oracle = Oracle(folder)
    runner = TorchModelRunner(folder, "float32", "cuda", num_blocks=32)
    outputs = generate(runner, _prompts(), 8, chunk_tokens=100)
    assert all(oracle.continuation(p, 8).accepts(o) for p, o in zip(_prompts(), outputs, strict=True))


def test_half_precision_runs(models_dir: Path) -> None:
    runner = TorchModelRunner(tiny_model("llama", models_dir), "bfloat16", "cuda", num_blocks=32)
    assert all(len(output) == 8 for output in generate(runner, _prompts(), 8, chunk_tokens=100))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("num_heads", [2, 8])
def test_flash_attention_agrees_with_the_reference(dtype: torch.dtype, head_dim: int, num_heads: int) -> None:
    stores = [torch.zeros(1, 6, 256, 2, head_dim, dtype=dtype, device="cuda").transpose(2, 3) for _ in range(2)]
    cache = PagedCache(*stores)
    assert largest_error(CudaBackend(cache), cache, num_heads) < 3e-2
    assert isinstance(choose_backend(cache, num_heads), CudaBackend)
