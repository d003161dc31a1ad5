"""What a model folder says of itself, and what an unusable one is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.core.errors import StartupError
from pdserve.model_folder import DEFAULT_MODEL, cache_dir, load_facts, model_fingerprint, model_path

CONFIG = {"vocab_size": 320, "max_position_embeddings": 1024, "eos_token_id": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As small as a model folder can be."""
    model = tmp_path / "some-model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    return model


def test_facts(folder: Path) -> None:
    facts = load_facts(folder)
    assert (facts.model_id, facts.vocab_size, facts.max_context_tokens) == ("some-model", 320, 1024)
    assert facts.eos_ids == {2}


@pytest.mark.parametrize(("eos", "expected"), [(7, {7}), ([7, 8], {7, 8}), (None, set())])
def test_the_generation_config_overrules_the_end_tokens(folder: Path, eos: object, expected: set[int]) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert load_facts(folder).eos_ids == expected


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_is_told_what_it_lacks(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(StartupError, match=name.replace("model.", r"\*\.")) as error:
        load_facts(folder)
    assert "\n" not in str(error.value)


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="does not exist"):
        load_facts(tmp_path / "nowhere")


def test_a_folder_with_nothing_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "index.md").touch()
    with pytest.raises(StartupError, match=r"is no model folder: it has no config\.json; name a folder with"):
        load_facts(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"vocab_size": "many"}', '{"vocab_size": 0}'])
def test_an_unusable_configuration(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(StartupError):
        load_facts(folder)


def test_the_fingerprint_follows_the_content(folder: Path) -> None:
    first = model_fingerprint(folder)
    assert model_fingerprint(folder) == first
    (folder / "model.safetensors").write_bytes(b"WEIGHTS")
    os.utime(folder / "model.safetensors", ns=(0, 0))
    second = model_fingerprint(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": 3}))
    assert len({first, second, model_fingerprint(folder)}) == 3


def test_a_copy_has_the_same_fingerprint_and_its_own_memory_of_it(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (copy / name).write_bytes((folder / name).read_bytes())
    assert model_fingerprint(copy) == model_fingerprint(folder)


def test_a_damaged_memory_of_the_fingerprint_is_replaced(folder: Path) -> None:
    first = model_fingerprint(folder)
    (folder / ".pdserve-fingerprint.json").write_text('{"fingerprint": "0000"')
    assert model_fingerprint(folder) == first


def test_the_default_model_lies_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDSERVE_CACHE_DIR", str(tmp_path))
    assert cache_dir() == tmp_path
    assert model_path(DEFAULT_MODEL) == tmp_path / "models" / DEFAULT_MODEL
    assert model_path("/models/x") == Path("/models/x")


def test_facts_need_no_torch() -> None:
    code = (
        "import sys, pdserve.model_folder; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
