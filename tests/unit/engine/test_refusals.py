"""Every refusal by its name, and the configurations beside it that are fine."""

from typing import Any

import pytest
import transformers

from pdserve.core.errors import StartupError
from pdserve.engine.refusals import head_dim, num_kv_heads, refuse_unsupported

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0] * 64,
    "long_factor": [2.0] * 64,
}


def _config(name: str, **fields: Any) -> Any:
    return getattr(transformers, name)(**fields)


@pytest.mark.parametrize(
    ("feature", "config"),
    [
        ("sliding window attention", _config("MistralConfig", sliding_window=4096)),
        ("sliding window attention", _config("Qwen2Config", use_sliding_window=True, max_window_layers=1)),
        ("sliding window attention", _config("Phi3Config", sliding_window=2047)),
        ("chunked attention", _config("Llama4TextConfig")),
        (r"multi-head latent attention \(MLA\)", _config("DeepseekV3Config")),
        (r"linear or hybrid layers \(linear_attention\)", _config("Qwen3NextConfig")),
        ("linear or hybrid layers", _config("MambaConfig")),
        ("linear or hybrid layers", _config("JambaConfig")),
        ("linear or hybrid layers", _config("RwkvConfig")),
        ("attention sinks", _config("GptOssConfig")),
        (r"logit soft-capping \(attn_logit_softcapping\)", _config("Gemma2Config")),
        ("longrope RoPE", _config("LlamaConfig", rope_parameters=LONG_ROPE)),
        (
            "dynamic RoPE",
            _config("LlamaConfig", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        ),
        ("an encoder-decoder architecture", _config("T5Config")),
        ("a quantised checkpoint", _config("LlamaConfig", quantization_config={"quant_method": "fp8"})),
        ("inputs other than text", _config("LlavaConfig")),
        ("attention heads of 512 elements", _config("LlamaConfig", head_dim=512)),
        ("attention heads of 20 elements", _config("LlamaConfig", head_dim=20)),
    ],
)
def test_refused_by_name(feature: str, config: Any) -> None:
    with pytest.raises(StartupError, match=feature) as error:
        refuse_unsupported(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "config",
    [
        _config("LlamaConfig"),
        _config("LlamaConfig", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
        _config("MistralConfig", sliding_window=None),
        _config("Qwen2Config", use_sliding_window=False, sliding_window=4096),
        _config("Qwen3Config"),
        _config("Phi3Config"),
    ],
    ids=lambda config: config.model_type,
)
def test_accepted(config: Any) -> None:
    refuse_unsupported(config)


def test_every_feature_is_listed_at_once() -> None:
    with pytest.raises(StartupError, match=r"sliding window attention.*soft-capping"):
        refuse_unsupported(_config("Gemma2Config"))


def test_shapes_come_from_the_configuration_or_its_defaults() -> None:
    explicit = _config("Qwen3Config", head_dim=64, hidden_size=96, num_attention_heads=6, num_key_value_heads=2)
    implied = _config("LlamaConfig", hidden_size=96, num_attention_heads=6)
    assert (head_dim(explicit), num_kv_heads(explicit)) == (64, 2)
    assert (head_dim(implied), num_kv_heads(implied)) == (16, 6)
