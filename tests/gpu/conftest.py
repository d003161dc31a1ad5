"""Tests on a CUDA device. They are left out of every other run; on a machine with a GPU and a CUDA build of torch:

    python -m pytest tests/gpu tests/unit/engine/attention -m gpu

The default build of the project's environment is torch for CPUs. Half precision needs a device that flash attention 2
runs on (Ampere or newer). Two gigabytes of GPU memory are enough.
"""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")
