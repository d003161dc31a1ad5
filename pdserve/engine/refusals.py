"""Models that would be computed wrongly here, refused by name before anything is loaded."""

from collections.abc import Iterator, Mapping
from typing import Any

from pdserve.core.errors import StartupError

MAX_HEAD_DIM = 256
_EXACT_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
# Their angles depend on the longest sequence of a batch, so a sequence would depend on its neighbours.
_NEIGHBOURLY_ROPE_TYPES = {"longrope": "longrope RoPE", "su": "longrope RoPE", "dynamic": "dynamic RoPE"}
_SINK_MODELS = frozenset({"gpt_oss"})
_RECURRENT_FIELDS = (
    "hybrid_override_pattern",
    "hybrid_layer_ids",
    "layers_block_type",
    "block_types",
    "linear_attn_config",
    "linear_num_key_heads",
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "ssm_cfg",
    "attention_hidden_size",
    "conv_L_cache",
)


def refuse_unsupported(config: Any) -> None:
    """Raises StartupError that names every unsupported feature of a transformers configuration."""
    if features := list(unsupported_features(config)):
        raise StartupError(f"model {_name(config)} is not supported, for it uses {', '.join(features)}: choose another")


def unsupported_features(config: Any) -> Iterator[str]:
    """The name of each feature in use that the engine does not compute."""
    if getattr(config, "is_encoder_decoder", False):
        yield "an encoder-decoder architecture"
    if getattr(config, "quantization_config", None) is not None:
        yield "a quantised checkpoint"
    if any(hasattr(config, part) for part in ("text_config", "vision_config", "audio_config")):
        yield "inputs other than text"
    if getattr(config, "kv_lora_rank", None) is not None:
        yield "multi-head latent attention (MLA)"
    yield from _layer_features(config)
    if config.model_type in _SINK_MODELS or getattr(config, "attention_sink", None):
        yield "attention sinks"
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, field, None) is not None:
            yield f"logit soft-capping ({field})"
    yield from _rope_features(config)
    yield from _head_features(config)


def head_dim(config: Any) -> int:
    """Elements of one head of a transformers configuration."""
    explicit = getattr(config, "head_dim", None)
    return int(explicit or config.hidden_size // config.num_attention_heads)


def num_kv_heads(config: Any) -> int:
    """Key and value heads of a transformers configuration."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _layer_features(config: Any) -> Iterator[str]:
    layer_types = set(getattr(config, "layer_types", None) or ())
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    if windowed or "sliding_attention" in layer_types:
        yield "sliding window attention"
    if getattr(config, "attention_chunk_size", None) is not None or "chunked_attention" in layer_types:
        yield "chunked attention"
    foreign = sorted(layer_types - {"full_attention", "sliding_attention", "chunked_attention"})
    recurrent = [field for field in _RECURRENT_FIELDS if getattr(config, field, None) is not None]
    if foreign or recurrent:
        yield f"linear or hybrid layers ({', '.join(foreign or recurrent)})"


def _rope_features(config: Any) -> Iterator[str]:
    """RoPE is described by one mapping, or by one for each type of layer."""
    described = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = [part for part in described.values() if isinstance(part, Mapping)] or [described]
    for parameters in each:
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        if rope_type not in _EXACT_ROPE_TYPES:
            yield _NEIGHBOURLY_ROPE_TYPES.get(rope_type, f"RoPE of type {rope_type}")


def _head_features(config: Any) -> Iterator[str]:
    if not getattr(config, "num_attention_heads", None):
        yield "no attention heads"
        return
    size = head_dim(config)
    if size > MAX_HEAD_DIM or size % 8:
        yield f"attention heads of {size} elements (the limit is {MAX_HEAD_DIM}, in multiples of 8)"
    if config.num_attention_heads % num_kv_heads(config):
        yield f"{config.num_attention_heads} heads over {num_kv_heads(config)} key heads"


def _name(config: Any) -> str:
    return str(getattr(config, "name_or_path", "") or config.model_type)
