"""Tiny random models in folders like real ones, one for each architecture: exact, and loaded in a moment."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

KINDS = ("llama", "qwen2", "qwen3", "mistral", "phi3")
EOS_TOKEN = "<|im_end|>"
START_TOKEN = "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_VOCAB_SIZE = 320
_CORPUS = ("the quick brown fox jumps over the lazy dog and the other animals of the forest say hello to it",)
_SHAPE: dict[str, Any] = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    # Wide weights make the best logit stand out, so equality tests do not depend on rounding.
    "initializer_range": 0.2,
}


def tiny_model(kind: str, cache_dir: Path) -> Path:
    """The folder of the tiny model of an architecture, one of KINDS, made when it is not there yet.

    Its tokenizer is a byte-level BPE with a chat template. The context is 1,024 tokens.
    """
    folder = cache_dir / f"tiny-{kind}"
    if not folder.is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=cache_dir))
        _save_model(kind, draft)
        _save_tokenizer(draft)
        try:
            draft.rename(folder)
        except OSError:
            # Another process was faster, with the same content.
            shutil.rmtree(draft)
    return folder


def _save_model(kind: str, folder: Path) -> None:
    import torch

    torch.manual_seed(KINDS.index(kind))
    config = _config(kind)
    model = _architecture(kind)(config)
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)


def _config(kind: str) -> Any:
    import transformers

    config_classes: dict[str, Callable[..., Any]] = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "mistral": transformers.MistralConfig,
        "phi3": transformers.Phi3Config,
    }
    own_fields: dict[str, dict[str, Any]] = {"qwen3": {"head_dim": 32}, "mistral": {"sliding_window": None}}
    return config_classes[kind](**_SHAPE, **own_fields.get(kind, {}))


def _architecture(kind: str) -> Callable[[Any], Any]:
    import transformers

    return {
        "llama": transformers.LlamaForCausalLM,
        "qwen2": transformers.Qwen2ForCausalLM,
        "qwen3": transformers.Qwen3ForCausalLM,
        "mistral": transformers.MistralForCausalLM,
        "phi3": transformers.Phi3ForCausalLM,
    }[kind]


def _save_tokenizer(folder: Path) -> None:
    """Written by hand: PreTrainedTokenizerFast reads it, without torch."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(START_TOKEN, special=True), AddedToken(EOS_TOKEN, special=True)]
    trainer = BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START_TOKEN,
        "eos_token": EOS_TOKEN,
        "pad_token": EOS_TOKEN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _SHAPE["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
