"""Linear layers with weights in the order that oneDNN's kernels read them: faster for the few rows of a decode step."""

from typing import Any

import torch
from torch import Tensor, nn

# Laid out for a decode batch; measured, such weights do as well for one row, and for a prompt's chunk.
_EXPECTED_ROWS = 8


class PackedLinear(nn.Module):
    """A linear layer for inference on a CPU: [..., in_features] to [..., out_features]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._out_features = linear.out_features
        self._bias = linear.bias
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _EXPECTED_ROWS)

    def forward(self, rows: Tensor) -> Tensor:
        # A step in the middle of prompts asks for no logits, and oneDNN for at least one row.
        if not rows.numel():
            return rows.new_empty((*rows.shape[:-1], self._out_features))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return out


@torch.inference_mode()
def pack_linears(model: Any) -> None:
    """Replaces the model's linear layers where that is faster, in place.

    That is all of them in bfloat16, and in float32 the output layer: the others' products are as fast as they are.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and (child is head or child.weight.dtype is torch.bfloat16):
                setattr(parent, name, PackedLinear(child))
