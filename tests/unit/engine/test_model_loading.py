"""The attention function refuses whatever it does not compute."""

from typing import Any

import pytest
import torch

from pdserve.core.errors import StartupError
from pdserve.engine.model_loading import compute_dtype, paged_attention


class _Echo:
    """Attention that returns its query."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        return query


class _Module(torch.nn.Module):
    layer_idx = 0
    is_causal = True


def _call(attention_mask: torch.Tensor | None = None, **arguments: Any) -> tuple[torch.Tensor, None]:
    query, key = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8)
    return paged_attention(_Module(), query, key, key, attention_mask, scaling=1.0, paged_step=_Echo(), **arguments)


def test_arguments_at_their_defaults_pass() -> None:
    out, weights = _call(dropout=0.0, sliding_window=None, softcap=None, s_aux=None, use_cache=False, position_ids=1)
    assert out.shape == (1, 3, 4, 8)
    assert weights is None


@pytest.mark.parametrize(
    ("argument", "value"),
    [("sliding_window", 128), ("softcap", 50.0), ("s_aux", torch.ones(4)), ("is_causal", False), ("new_thing", 1)],
)
def test_an_unknown_argument_is_named(argument: str, value: object) -> None:
    arguments: dict[str, Any] = {argument: value}
    with pytest.raises(StartupError, match=argument):
        _call(**arguments)


def test_masks_dropout_and_bidirectional_attention_are_refused() -> None:
    with pytest.raises(StartupError, match="masked"):
        _call(torch.zeros(1, 1, 3, 3))
    with pytest.raises(StartupError, match="dropped"):
        _call(dropout=0.1)


def test_a_gpu_computes_in_the_dtype_of_the_cache() -> None:
    cuda = torch.device("cuda")
    assert compute_dtype("float16", cuda) is torch.float16
    assert compute_dtype("bfloat16", cuda) is torch.bfloat16
    assert compute_dtype("float32", torch.device("cpu")) is torch.float32
