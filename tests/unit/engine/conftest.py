"""Tiny models and runners, made once for all tests of the engine."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from pdserve.engine.model_runner import TorchModelRunner
from tests.steps import Oracle
from tests.tiny_models import tiny_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Operators this small only wait for each other on more, most of all where tests share the cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny_runner(models_dir: Path) -> Callable[[str], TorchModelRunner]:
    """A float32 CPU runner of one kind of tiny model. Nothing of one test's sequences matters to the next."""
    return cache(lambda kind: TorchModelRunner(tiny_model(kind, models_dir), "float32", "cpu", num_blocks=256))


@pytest.fixture(scope="session")
def tiny_oracle(models_dir: Path) -> Callable[[str], Oracle]:
    return cache(lambda kind: Oracle(tiny_model(kind, models_dir)))
