"""Loading a transformers model whose attention goes to our paged cache."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from pdserve.core.errors import StartupError
from pdserve.core.geometry import KVGeometry
from pdserve.engine.attention.base import StepAttention
from pdserve.engine.packed_linear import pack_linears
from pdserve.engine.refusals import head_dim, num_kv_heads, refuse_unsupported
from pdserve.model_folder import check_folder, model_fingerprint

# transformers makes no mask for an attention name that it knows no mask for: ours is causal by construction.
ATTENTION_NAME = "pdserve_paged"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What transformers passes to every attention function and we take from the step itself, or have no use for.
_KNOWN_ARGUMENTS = frozenset({"position_ids", "use_cache"})


def load_config(folder: Path) -> Any:
    """The model's transformers configuration. Raises StartupError if it is unusable or needs what we do not have."""
    check_folder(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StartupError(f"config.json of {folder} is unusable ({reason}): choose another model") from error
    refuse_unsupported(config)
    return config


def kv_geometry(folder: Path, config: Any, dtype: str, block_size: int) -> KVGeometry:
    """The cache's shape for this model."""
    return KVGeometry(
        model_fingerprint=model_fingerprint(folder),
        adapter="",
        dtype=dtype,
        codec="raw",
        num_layers=config.num_hidden_layers,
        num_kv_heads=num_kv_heads(config),
        head_dim=head_dim(config),
        block_size=block_size,
    )


def compute_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """What activations and weights are in: `dtype`, but float32 on a CPU without bfloat16 arithmetic.

    There, bfloat16 products are several times slower than float32 ones; the cache keeps its dtype all the same.

    Raises:
        StartupError: the device cannot compute this dtype.
    """
    if dtype not in DTYPES:
        raise StartupError(f"unknown dtype {dtype}: choose one of {', '.join(DTYPES)}")
    if device.type != "cpu" or dtype == "float32":
        return DTYPES[dtype]
    if dtype == "float16":
        raise StartupError("float16 needs a GPU: choose bfloat16 or float32 on a CPU")
    return torch.bfloat16 if _has_bfloat16_arithmetic() else torch.float32


def load_model(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The model on its device, for inference. Raises StartupError if its weights or its code are unusable."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    # A worker's standard error is its log.
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        # With loading info it returns a pair, which its types do not say.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StartupError(f"cannot load the weights of {folder} ({reason}): download the model again") from error
    model, loading = loaded
    # Weights that a file lacks would be random ones.
    if missing := sorted(loading["missing_keys"]):
        raise StartupError(f"the weights of {folder} lack {', '.join(missing[:3])}: download the model again")
    if not getattr(model, "_supports_attention_backend", False):
        raise StartupError(f"{type(model).__name__} computes attention in its own way: choose another model")
    model = model.to(device).eval()
    if device.type == "cpu":
        pack_linears(model)
    return model


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    paged_step: StepAttention,
    dropout: float = 0.0,
    **others: object,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer.

    Args:
        query: [1, heads, tokens, head_dim]
        key, value: [1, kv_heads, tokens, head_dim]
    Returns: [1, tokens, heads, head_dim] and no weights.
    Raises:
        StartupError: the model asks for something else than causal attention over its whole context.
    """
    unknown = sorted(name for name, value in others.items() if name not in _KNOWN_ARGUMENTS and value is not None)
    if attention_mask is not None or dropout or unknown or not getattr(module, "is_causal", True):
        asked = ", ".join(unknown) or "masked, dropped or bidirectional attention"
        raise StartupError(f"the model's attention uses {asked}, which is not supported: choose another model")
    attended = paged_step.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
    )
    return attended[None], None


def _has_bfloat16_arithmetic() -> bool:
    features = torch.cpu.get_capabilities()
    return bool(features.get("avx512_bf16") or features.get("amx_bf16"))
