"""Model folders on disk: where they lie, and what can be known of a model without loading it."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pdserve.core.errors import StartupError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_FINGERPRINT_FILE = ".pdserve-fingerprint.json"
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What frontends and schedulers know of a model.

    Attributes:
        model_id: the folder's name; what clients call the model.
        vocab_size: rows of the model's logits; the tokenizer may have fewer.
        max_context_tokens: prompt and output together.
        eos_ids: token ids that end a turn.
    """

    model_id: str
    vocab_size: int
    max_context_tokens: int
    eos_ids: frozenset[int]


def cache_dir() -> Path:
    """Where converted models and compiled kernels are kept: PDSERVE_CACHE_DIR, or ~/.cache/pdserve."""
    configured = os.environ.get("PDSERVE_CACHE_DIR")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "pdserve"


def model_path(model: str) -> Path:
    """The folder that `model` means: the default model's name, or a path. It need not exist."""
    return cache_dir() / "models" / DEFAULT_MODEL if model == DEFAULT_MODEL else Path(model).expanduser()


def check_folder(folder: Path) -> None:
    """Raises StartupError unless the folder holds a model with safetensors weights and a tokenizer."""
    if not folder.is_dir() and folder == model_path(DEFAULT_MODEL):
        raise StartupError(
            f"{DEFAULT_MODEL} has not been made in {folder} yet: start a worker or `pdserve up`, which do it"
        )
    if not folder.is_dir():
        raise StartupError(
            f"model folder {folder} does not exist: name a folder that holds config.json and safetensors"
        )
    if not ((folder / "config.json").is_file() or (folder / "tokenizer.json").is_file() or _weight_files(folder)):
        raise StartupError(
            f"{folder} is no model folder: it has no config.json; name a folder with config.json, tokenizer.json and "
            "*.safetensors"
        )
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise StartupError(f"model folder {folder} has no {name}: download the model again, whole")
    if not _weight_files(folder):
        raise StartupError(
            f"model folder {folder} has no *.safetensors: only safetensors are loaded, convert the weights"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder. Raises StartupError when it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path} ({error}): download the model again, whole") from error
    if not isinstance(content, dict):
        raise StartupError(f"{path} is not a JSON object: download the model again, whole")
    return content


def load_facts(folder: Path) -> ModelFacts:
    """Reads a model's facts. Raises StartupError for a missing or incomplete folder."""
    check_folder(folder)
    config = read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    eos_ids = generation.get("eos_token_id", config.get("eos_token_id"))
    return ModelFacts(
        model_id=folder.resolve().name,
        vocab_size=_positive(config, "vocab_size", folder),
        max_context_tokens=_positive(config, "max_position_embeddings", folder),
        eos_ids=_token_ids(eos_ids),
    )


def model_fingerprint(folder: Path) -> str:
    """Hex digest of configuration and weights. Remembered beside them, for as long as sizes and times stay the same.

    Raises:
        StartupError: the folder is missing or incomplete.
    """
    check_folder(folder)
    files = [folder / "config.json", *_weight_files(folder)]
    stamp = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    remembered = folder / _FINGERPRINT_FILE
    known = _remembered(remembered)
    if known.get("files") == stamp and isinstance(known.get("fingerprint"), str):
        return str(known["fingerprint"])
    fingerprint = _digest(files)
    _remember(remembered, {"files": stamp, "fingerprint": fingerprint})
    return fingerprint


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _positive(config: Mapping[str, Any], name: str, folder: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise StartupError(f"config.json of {folder} has no usable {name}: this model is not supported")
    return value


def _token_ids(value: object) -> frozenset[int]:
    if isinstance(value, int):
        return frozenset([value])
    return (
        frozenset(token_id for token_id in value if isinstance(token_id, int))
        if isinstance(value, list)
        else frozenset()
    )


def _digest(files: list[Path]) -> str:
    digest = blake2b(digest_size=32)
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as content:
            while part := content.read(_READ_BYTES):
                digest.update(part)
    return digest.hexdigest()


def _remembered(path: Path) -> dict[str, Any]:
    """Empty when there is none, or it is damaged: then it is made anew."""
    try:
        return read_json(path)
    except StartupError:
        return {}


def _remember(path: Path, content: Mapping[str, Any]) -> None:
    # Models are often on read-only volumes; the digest is then computed at each start.
    if not os.access(path.parent, os.W_OK):
        return
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(path)
