"""Packed layers compute what plain ones compute."""

import pytest
import torch
from torch import nn

from pdserve.engine.packed_linear import PackedLinear, pack_linears


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 8, 100])
@torch.inference_mode()
def test_equals_the_plain_layer(rows: int, bias: bool) -> None:
    plain = nn.Linear(48, 80, bias=bias)
    inputs = torch.randn(1, rows, 48)
    assert torch.allclose(PackedLinear(plain)(inputs), plain(inputs), atol=1e-5)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 16)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_in_float32_only_the_output_layer_is_replaced() -> None:
    model = _Model()
    pack_linears(model)
    assert isinstance(model.head, PackedLinear)
    assert isinstance(model.inner[0], nn.Linear)
